"""The folder for a Space runs where this repository is not."""

import re
import subprocess
import sys
import venv
from importlib.metadata import distribution

import pytest
from conftest import ROOT


pytest.importorskip("gradio", reason="the page needs gradio: `make test-app`")
pytest.importorskip("selenium", reason="its helpers need selenium: `make test-app`")

from browser import served
from gradio_client import Client, handle_file
from packaging.requirements import Requirement


WRITE = [sys.executable, str(ROOT / "examples" / "write_space.py")]


def write_space(*arguments):
    return subprocess.run([*WRITE, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    folder = tmp_path_factory.mktemp("space") / "my-space"
    result = write_space(folder, ROOT / "checkpoints" / "adaperceiver-tiny-cifar10")
    assert result.returncode == 0, result.stderr
    return folder


def needed(lines):
    """The distributions that pip would install for `lines`: those of this environment, and what they require."""
    found, queue = {}, [Requirement(line) for line in lines]
    while queue:
        wanted = queue.pop()
        if wanted.name.lower() in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found[wanted.name.lower()] = distribution(wanted.name)
        version = found[wanted.name.lower()].version.split("+")[0]
        assert wanted.specifier.contains(version, prereleases=True), f"{wanted}, but {version} is here"
        queue += [Requirement(line) for line in found[wanted.name.lower()].requires or []]
    return found.values()


@pytest.fixture(scope="module")
def python(tmp_path_factory, space):
    """A fresh environment of what `requirements.txt` asks for and nothing else, linked instead of downloaded."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for one in needed((space / "requirements.txt").read_text().splitlines()):
        for name in {file.parts[0] for file in one.files if file.parts[0] not in ("..", "__pycache__")}:
            link = packages / name
            link.exists() or link.symlink_to(one.locate_file(name))
    return str(folder / "bin" / "python")


def run(python, code, folder):
    result = subprocess.run([python, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    return result.stdout + result.stderr


def test_the_space_answers_where_the_package_is_not_installed(space, python):
    assert "No module named 'adaperceiver'" in run(python, "import adaperceiver", space)
    assert "No module named 'datasets'" in run(python, "import datasets", space)
    with served(script=space / "app.py", python=python) as address:
        client = Client(address, verbose=False)
        picture = handle_file(sorted((space / "images").iterdir())[1])
        label, cost, chart = client.predict(picture, api_name="/B")
        assert label["label"] == "ship"
        assert "32 of 32 tokens, width 128 of 128, 6 of 6 blocks" in cost
        assert chart["plot"].startswith("data:image")
        assert "16 of 32 tokens, width 8 of 128" in client.predict(picture, api_name="/A")[1]


def test_the_space_holds_files_and_says_what_it_needs(space):
    assert not [path for path in space.rglob("*") if path.is_symlink()]
    assert "adaperceiver." not in "".join(re.findall(r"^(?:from|import) .*", (space / "app.py").read_text(), re.M))
    card = (space / "README.md").read_text()
    version = re.search(r"sdk_version: (\S+)", card)[1]
    assert f"gradio=={version}" in (space / "requirements.txt").read_text().splitlines()
    assert len(list((space / "images").glob("*.png"))) == 8


def test_a_folder_that_holds_something_is_not_overwritten(space):
    result = write_space(space)
    assert result.returncode == 2
    assert "must be a new or an empty folder" in result.stderr
