"""The installed package: one import name, few imports at run time, and a wheel that stands alone."""

import ast
import importlib.metadata
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, TINY, run

import adaperceiver
from adaperceiver.hub_adaperceiver import write_sources


ONLY_FOR_SCRIPTS = ("accelerate", "datasets", "evaluate", "matplotlib", "peft", "timm", "torchvision")


@pytest.mark.slow
def test_the_import_name_is_adaperceiver_and_nothing_else(tmp_path):
    distribution = importlib.metadata.distribution("adaperceiver")
    assert distribution.read_text("top_level.txt").split() == ["adaperceiver"]
    names = ("modeling", "configuration", "adaperceiver", "adaperceiver.configuration")
    code = f"import importlib.util; print(*[importlib.util.find_spec(name) is not None for name in {names}])"
    assert run(code, tmp_path) == "False False True True"


@pytest.mark.slow
def test_the_library_runs_without_what_only_the_scripts_need(tmp_path):
    # `None` in `sys.modules` is how Python says that there is no such module, to `import` and to `find_spec`.
    code = f"""
import sys
sys.modules.update(dict.fromkeys({ONLY_FOR_SCRIPTS}))
import torch
from adaperceiver import AdaPerceiverConfig, AdaPerceiverForImageClassification
model = AdaPerceiverForImageClassification(AdaPerceiverConfig(**{TINY}))
model.save_pretrained("model")
model = AdaPerceiverForImageClassification.from_pretrained("model")
print(*model(torch.zeros(1, 3, 32, 32), tokens=8, width=16, depth=1).logits.shape)
"""
    assert run(code, tmp_path) == "1 10"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools", reason="the wheel is built with the setuptools of this environment")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("modeling", "configuration", "examples/recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "-w", str(built)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (path,) = built.iterdir()
    return path


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_beside_the_package(wheel):
    version = adaperceiver.__version__
    files = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {file.parts[0] for file in files} == {"adaperceiver", f"adaperceiver-{version}.dist-info"}
    folders = {"modeling": "adaperceiver", "configuration": "adaperceiver/configuration"}
    folders["examples/recipes"] = "adaperceiver/recipes"
    for folder, installed in folders.items():
        tree = (path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.*"))
        expected = {Path(installed) / path for path in tree if "__pycache__" not in path.parts}
        assert {file for file in files if file.suffix in (".py", ".txt", ".yaml", ".typed")} >= expected


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A virtual environment far from the repository with the wheel, and with the libraries of this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    options = ["install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *options], check=True)
    packages = Path(run("import sysconfig; print(sysconfig.get_path('purelib'))", folder, python))
    # Only folders: what makes this checkout importable here is a file that is read in `site-packages` itself.
    (packages / "libraries.pth").write_text("\n".join(path for path in sys.path if "packages" in Path(path).name))
    return python, packages / "adaperceiver"


@pytest.mark.slow
def test_an_installed_wheel_has_its_labels_metrics_and_recipes_and_needs_no_repository(installed, tmp_path):
    python, package = installed
    code = """
import sys
import adaperceiver
from adaperceiver.evaluation.grid import metrics_for
from adaperceiver.training.arguments import known_recipes
from adaperceiver.training.data import read_label_map
adaperceiver.AdaPerceiverModel
print(len(read_label_map("ade20k")), type(metrics_for("image-segmentation", 3)()).__name__, len(known_recipes()))
print(*known_recipes())
print(*sorted(module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "adaperceiver"))
"""
    found, recipes, files = (line.split() for line in run(code, tmp_path, python).splitlines())
    assert found == ["150", "MeanIou", str(len(list((ROOT / "examples" / "recipes").glob("*.yaml"))))]
    assert {Path(recipe) for recipe in recipes} == set((package / "recipes").glob("*.yaml"))
    assert str(package / "__init__.py") in files
    assert all(Path(file).is_relative_to(package) for file in files)


def imported(path):
    """The modules that a file of the package imports, by their absolute names."""
    package = ["adaperceiver", *path.relative_to(ROOT / "modeling").parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*parent, *([node.module] if node.module else [])])
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_between_the_rooms_go_one_way():
    for path in (ROOT / "modeling").rglob("*.py"):
        room = path.relative_to(ROOT / "modeling").parts[0]
        names = list(imported(path))
        if room not in ("training", "deployment"):
            assert not [name for name in names if name.startswith("adaperceiver.training")], path
        if room not in ("training", "evaluation", "deployment"):
            assert not [name for name in names if name.startswith("adaperceiver.evaluation")], path
        if room != "deployment":
            assert not [name for name in names if name.startswith("adaperceiver.deployment")], path


def test_remote_code_has_none_of_the_rooms(tmp_path):
    write_sources(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in (ROOT / "modeling").glob("*_adaperceiver.py")
    }
