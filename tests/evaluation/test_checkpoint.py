"""The checkpoint that the repository ships, on the photographs beside it, and `make demo`."""

import json

import pytest
import torch
from conftest import ROOT, run_script
from datasets import Dataset
from transformers import AutoImageProcessor, AutoModelForImageClassification

from adaperceiver import AdaPerceiverForImageClassification


FOLDER = ROOT / "checkpoints" / "adaperceiver-tiny-cifar10"
import demo


@pytest.fixture(scope="module")
def model():
    return AutoModelForImageClassification.from_pretrained(FOLDER).eval()


@pytest.fixture(scope="module")
def samples():
    """Pixel values and labels of 200 photographs, 20 a class."""
    photographs = Dataset.from_parquet(str(ROOT / "examples" / "cifar10_samples.parquet"))
    processor = AutoImageProcessor.from_pretrained(FOLDER)
    images = [image.convert("RGB") for image in photographs["image"]]
    return processor(images, return_tensors="pt").pixel_values, torch.tensor(photographs["label"])


def test_it_is_an_ordinary_folder_of_weights(model):
    assert type(model) is AdaPerceiverForImageClassification
    files = [path.name for path in FOLDER.iterdir()]
    assert all(
        (FOLDER / name).is_symlink() for name in files if name.endswith(".py")
    )  # the code is that of the repository
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "README.md", "accuracy_table.json"} <= set(
        files
    )
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 15e6
    auto_map = json.loads((FOLDER / "config.json").read_text())["auto_map"]
    assert {f"{name.partition('.')[0]}.py" for name in auto_map.values()} <= set(files)


@torch.no_grad()
def test_it_knows_what_the_photographs_show_at_every_budget(model, samples):
    pixel_values, labels = samples
    table = {(p["tokens"], p["width"], p["depth"]): p["value"] for p in model.accuracy_table.points}
    for width in model.config.widths:
        right = (model.logits_grid(pixel_values, width=width).argmax(dim=-1) == labels).float().mean(dim=-1)
        for depth, of_depth in enumerate(right.tolist(), start=1):
            for tokens, accuracy in zip(model.config.token_granularities, of_depth):
                # 200 of the 10,000 images that the table was measured on: three standard deviations are 8 points
                assert accuracy == pytest.approx(table[tokens, width, depth], abs=0.09), (tokens, width, depth)


def test_accuracy_rises_along_each_axis_and_small_points_are_close(model):
    table = {(p["tokens"], p["width"], p["depth"]): p["value"] for p in model.accuracy_table.points}
    tokens, widths, last = model.config.token_granularities, model.config.widths, model.config.num_hidden_layers
    assert len(table) == len(tokens) * len(widths) * last
    full = table[tokens[-1], widths[-1], last]
    assert full >= 0.86
    assert 0 < full - table[tokens[0], widths[-1], last] <= 0.04
    assert 0 < full - table[tokens[-1], widths[-1], 1] <= 0.04
    of_width = [table[tokens[-1], width, last] for width in widths]
    assert of_width == sorted(of_width)
    assert 0.02 < full - table[tokens[0], widths[0], 1] < 0.03  # the smallest of all


@torch.no_grad()
def test_budgets_are_spent_by_its_table(model):
    table = {(p["tokens"], p["width"], p["depth"]): p["value"] for p in model.accuracy_table.points}
    full = model.flops()["total"] / 1e9
    for share in (0.9, 0.7, 0.6):
        point = model.operating_point(max_gflops=share * full)
        affordable = {
            at: value
            for at, value in table.items()
            if model.flops(tokens=at[0], width=at[1], depth=at[2])["total"] / 1e9 <= share * full
        }
        assert table[point.tokens, point.width, point.depth] == max(affordable.values())


@pytest.mark.slow
def test_the_demo_shows_every_budget_and_nothing_else(model, tmp_path):
    printed = run_script("demo.py", tmp_path, output=tmp_path / "out")
    assert (printed.returncode, printed.stderr) == (0, "")  # no warnings, no bars where there is no terminal
    rows = {line[:38].strip(): line[38:].split() for line in printed.stdout.splitlines() if "%" in line[38:48]}
    calls = demo.calls_for(model)
    names = [demo.name_of(call) for of_kind in calls.values() for call in of_kind]
    assert [*rows] == names
    accuracy, gflops, milliseconds = (
        {name: float(row[column].rstrip("%")) for name, row in rows.items()} for column in range(3)
    )
    assert accuracy["the full model"] > 80
    assert gflops["exit_threshold=0.5"] < gflops["exit_threshold=0.95"] < gflops["the full model"]
    budgets = [call["max_gflops"] for call in calls["best fixed point within a budget"][:-1]]
    spent = [gflops[f"max_gflops={budget}"] for budget in budgets]
    assert all(cost <= budget for cost, budget in zip(spent, budgets))
    assert spent == sorted(spent)
    assert all(value > 0 for value in milliseconds.values())
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
