"""The API reference says what the docstrings say, of everything that the package offers."""

import sys

from conftest import ROOT

import adaperceiver


sys.path.insert(0, str(ROOT / "docs"))

import write_api


def test_the_reference_is_that_of_the_docstrings():
    assert write_api.PAGE.read_text() == write_api.page(), "run `python docs/write_api.py`"


def test_the_reference_names_everything_that_the_package_offers():
    page = write_api.page()
    assert not [name for name in adaperceiver.__all__ if f"`{name}`" not in page and f"### {name}\n" not in page]
    assert {name for name in write_api.NAMES if name not in adaperceiver.__all__} == set()
    assert "**`extract(tokens=None, width=None, depth=None)`**" in page


def test_what_is_left_out_of_the_reference_still_exists():
    owners = [getattr(adaperceiver, name) for name in write_api.NAMES]
    assert not [name for name in write_api.FOR_HEADS if not any(hasattr(owner, name) for owner in owners)]
