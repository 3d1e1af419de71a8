"""What the documentation says is run: every page's Python blocks, top to bottom."""

import re

import pytest
from conftest import ROOT


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def marked(page):
    return pytest.param(
        page, marks=pytest.mark.slow if page.name in ("export.md", "pipelines.md", "predict.md") else ()
    )


@pytest.mark.parametrize("page", map(marked, PAGES), ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_they_say(page, tmp_path, monkeypatch, capsys):
    for folder in ("checkpoints", "examples", "modeling"):  # what pages name, beside what they write
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in CODE.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), namespace)
        promised, printed = re.findall(r"^# (.+)$", block, re.MULTILINE), capsys.readouterr().out.splitlines()
        if promised:
            assert [line.strip() for line in printed if line.strip()] == promised


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_names_every_page_and_the_commands_exist():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in readme
    commands = set(re.findall(r"^make (\w+)", readme, re.MULTILINE))
    assert commands >= {"demo", "test"}
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)
