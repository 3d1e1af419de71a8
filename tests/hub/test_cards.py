"""Model cards carry what the hub reads, as far as it is known: nothing is invented, nothing that a card says is replaced."""

import json
import shutil

import pytest
from conftest import ROOT
from huggingface_hub import ModelCard

from adaperceiver import (
    AccuracyTable,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForImageClassification,
)
from adaperceiver.card_adaperceiver import PAPER, build_model_card, hub_id, main_points
from adaperceiver.training.cards import accuracy_table, known_metadata, model_card, write_card


GRID = [
    {"tokens": tokens, "width": width, "depth": depth, "value": tokens + width / 100 + depth / 10}
    for tokens in (4, 8, 16)
    for width in (16, 24, 32)
    for depth in (1, 2, 3, 4)
]
CHECKPOINTS = sorted(path.parent for path in (ROOT / "checkpoints").glob("*/config.json"))


def points_of(card):
    return [tuple(result.metric_args.values()) for result in card.data.eval_results]


def test_an_automatic_card_says_what_is_known_and_no_more(tiny_model):
    card = build_model_card(tiny_model(AdaPerceiverForImageClassification), "me/tiny", save_code=True)
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "image-classification",
        "tags": ["adaperceiver"],
    }
    assert f"https://{PAPER}" in card.text
    assert "@article{jajal2025adaperceiver" in card.text
    assert 'revision = "main"' in card.text


def test_the_accuracy_table_becomes_results_at_the_main_operating_points(tiny_model):
    model = tiny_model(AdaPerceiverForDepthEstimation)
    model.accuracy_table = AccuracyTable("rmse", GRID, higher_is_better=False, dataset="sayakpaul/nyu", split="test")
    card = ModelCard(str(build_model_card(model, "me/tiny-depth", save_code=False)))
    (result,) = card.data.to_dict()["model-index"][0]["results"]
    assert card.data.to_dict()["model-index"][0]["name"] == "tiny-depth"
    assert result["task"] == {"type": "depth-estimation"}
    assert result["dataset"] == {"type": "sayakpaul/nyu", "name": "sayakpaul/nyu", "split": "test"}
    assert {metric["type"] for metric in result["metrics"]} == {"rmse"}
    assert points_of(card) == [
        (4, 16, 1),  # the smallest
        (4, 32, 4),
        (8, 32, 4),
        (16, 16, 4),
        (16, 24, 4),
        (16, 32, 2),  # half the depth
        (16, 32, 4),
    ]
    values = {(point["tokens"], point["width"], point["depth"]): point["value"] for point in GRID}
    assert [one.metric_value for one in card.data.eval_results] == [values[point] for point in points_of(card)]


def test_scores_on_unknown_data_are_no_results(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification)
    model.accuracy_table = AccuracyTable("made up", GRID)
    assert "model-index" not in build_model_card(model, "tiny", save_code=True).data.to_dict()


def test_a_single_point_is_the_main_one():
    assert main_points(GRID[:1]) == GRID[:1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pjajal/adaperceiver-v1", "pjajal/adaperceiver-v1"),
        ("folder/model", None),
        ("model", None),
        ("runs/a/b", None),
        ("", None),
    ],
)
def test_only_what_is_on_the_hub_becomes_metadata(name, expected, tmp_path, monkeypatch):
    (tmp_path / "folder" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_id(name) == expected


def test_the_base_model_is_the_one_of_the_hub_that_was_loaded(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification)
    model.name_or_path = "me/base"
    assert build_model_card(model, "me/tuned", save_code=True).data.base_model == "me/base"
    assert build_model_card(model, "me/base", save_code=True).data.base_model is None
    assert build_model_card(model, "me/tuned", True, "---\nbase_model: a/b\n---\n").data.base_model == "a/b"


def test_a_training_knows_its_data_and_its_start_or_its_teacher():
    distilled = {"dataset": ["timm/imagenet-12k-wds", "scenes"], "init_from": None, "teacher": "timm/vit"}
    assert known_metadata(distilled) == {"datasets": ["timm/imagenet-12k-wds"], "base_model": "timm/vit"}
    tuned = {"dataset": "path/to/own/images", "model": "me/base"}
    assert known_metadata(tuned) == {"base_model": "me/base"}
    card = ModelCard(model_card("Tuned", "examples/x.py", {"seed": 0, **tuned}, {"top1": 0.5}))
    assert card.data.base_model == "me/base"
    assert PAPER in card.text


def test_the_card_of_a_training_has_its_scores(tiny_model, tmp_path):
    model = tiny_model(AdaPerceiverForImageClassification)
    model.accuracy_table = accuracy_table("top1", GRID, "timm/imagenet-1k-wds")
    text = model_card("Tuned", "examples/x.py", {"dataset": "timm/imagenet-1k-wds"}, {})
    model.save_pretrained(tmp_path / "run" / "final", model_card=text)
    data = ModelCard.load(tmp_path / "run" / "final" / "README.md").data
    assert (data.datasets, data.pipeline_tag) == (["timm/imagenet-1k-wds"], "image-classification")
    assert data.eval_results[0].dataset_split == "validation"

    (tmp_path / "run" / "arguments.json").write_text(
        json.dumps({"dataset": "timm/imagenet-1k-wds", "model": "me/base"})
    )
    card = write_card(tmp_path / "run" / "final", "# My model\n", license="mit")
    assert (card.data.license, card.data.base_model, card.data.model_name) == ("mit", "me/base", "run")
    assert card.data.datasets == ["timm/imagenet-1k-wds"]
    assert card.text.count(PAPER) == 1


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda folder: folder.name)
def test_the_card_of_a_shipped_checkpoint_is_the_one_that_is_built(folder, tmp_path):
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    card = write_card(copy)
    assert (copy / "README.md").read_text() == (folder / "README.md").read_text()
    assert card.data.license
    assert card.data.datasets
    table = {(p["tokens"], p["width"], p["depth"]): p["value"] for p in AccuracyTable.from_pretrained(folder).points}
    assert [result.metric_value for result in card.data.eval_results] == [table[point] for point in points_of(card)]
