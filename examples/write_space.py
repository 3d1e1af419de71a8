"""
Write the page of `app.py` as a folder for a Space of the hub, which needs nothing of this repository:

    python examples/write_space.py FOLDER [CHECKPOINT] [--masks CHECKPOINT] [--depth CHECKPOINT] [--images FOLDER_OR_PARQUET]
    python FOLDER/app.py    # in any environment with FOLDER/requirements.txt
    hf upload YOU/adaperceiver FOLDER --repo-type space
"""

import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import app
from huggingface_hub import snapshot_download

from adaperceiver.evaluation import answers
from adaperceiver.hub_adaperceiver import write_sources


PACKAGE = "adaperceiver.evaluation"  # of what the page imports; in a Space it is the folder `evaluation`
COPIED = ("answers.py", "pictures.py", "style.py")
REQUIREMENTS = ("torch", "transformers", "gradio", "matplotlib", "numpy", "pillow", "safetensors")
CARD = """---
title: AdaPerceiver
emoji: 🎚️
sdk: gradio
sdk_version: {gradio}
python_version: "3.12"
app_file: app.py
license: apache-2.0
---

One vision transformer whose tokens, width and depth are chosen at every call. Choose, and compare two choices.
"""


def write_space(folder: Path, checkpoints: dict[str, str], source: str | None) -> None:
    modules, images = folder / "evaluation", folder / "images"
    for one in (modules, images):
        one.mkdir(parents=True)
    for name in COPIED:
        shutil.copy(Path(answers.__file__).with_name(name), modules)
    page = Path(app.__file__).read_text(encoding="utf-8").replace(PACKAGE, "evaluation")
    (folder / "app.py").write_text(page, encoding="utf-8")
    (folder / "requirements.txt").write_text(
        "".join(f"{name}=={version(name).split('+')[0]}\n" for name in REQUIREMENTS)
    )
    (folder / "README.md").write_text(CARD.format(gradio=version("gradio")), encoding="utf-8")
    names = []
    for checkpoint in checkpoints.values():
        found = Path(checkpoint) if Path(checkpoint).is_dir() else Path(snapshot_download(checkpoint))
        names.append(Path(checkpoint).name)
        copied = folder / "checkpoints" / names[-1]
        shutil.copytree(found, copied)
        write_sources(copied)  # of links to the package, too
    for path in app.photographs(source, names, images):
        if Path(path).parent != images:
            shutil.copy(path, images)


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0].startswith("-"):
        fail("name the FOLDER to write, then arguments of app.py.")
    folder = Path(arguments[0])
    checkpoints, source = app.parse(arguments[1:])
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fail(f"{folder} must be a new or an empty folder.")
    write_space(folder, checkpoints, source)
    print(f"{folder} is a Space: try it with `python {folder / 'app.py'}`.")


def fail(problem: str) -> NoReturn:
    print(f"write_space.py: error: {problem}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
