"""The API reference says what the docstrings say, of everything that the package offers."""

import write_api

import adaperceiver


def test_the_reference_is_that_of_the_docstrings():
    assert write_api.PAGE.read_text() == write_api.page(), "run `python docs/write_api.py`"


def test_the_reference_names_everything_that_the_package_offers():
    page, members = write_api.page(), vars(adaperceiver).items()
    ours = [name for name, member in members if getattr(member, "__module__", "").startswith("adaperceiver")]
    assert set(write_api.NAMES) < set(ours)
    assert not [name for name in ours if f"`{name}`" not in page and f"### {name}\n" not in page]
    assert "**`extract(tokens=None, width=None, depth=None)`**" in page


def test_what_is_left_out_of_the_reference_still_exists():
    owners = [getattr(adaperceiver, name) for name in write_api.NAMES]
    assert not [name for name in write_api.FOR_HEADS if not any(hasattr(owner, name) for owner in owners)]
