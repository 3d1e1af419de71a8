"""examples/evaluate_model.py: one encoding gives the scores of a whole grid, and a table, plots and a checkpoint that knows them."""

import csv
import json
from pathlib import Path

import evaluate_model
import pytest
import torch
from accelerate import Accelerator
from conftest import TINY
from transformers import (
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from adaperceiver import (
    AdaPerceiverBackbone,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverModel,
    AdaptiveConfig,
)
from adaperceiver.evaluation import grid as evaluation


TOKENS = [2, 4, 7, 16, 24]  # trained, trained, between, trained, beyond
WIDTHS, DEPTHS = [16, 32], [1, 2]
POINTS = [(tokens, width, depth) for tokens in TOKENS for width in WIDTHS for depth in DEPTHS]


def batches(task):
    """Three batches, the last one smaller, as the data loaders give them."""
    torch.manual_seed(1)
    for size in (4, 4, 3):
        pixel_values = torch.randn(size, 3, 32, 32)
        if task == "image-classification":
            yield pixel_values, torch.randint(0, 10, (size,))
        elif task == "image-segmentation":  # maps of different sizes
            yield pixel_values, [torch.randint(0, 10, (20 + index, 40)) for index in range(size)]
        else:
            yield pixel_values, [torch.rand(48, 64) * 9 + 0.5 for _ in range(size)]


def grid(model, task, **changes):
    new_metric = evaluation.metrics_for(task, 10)
    values = {"tokens": TOKENS, "widths": WIDTHS, "depths": DEPTHS, **changes}
    return evaluation.evaluate_grid(model, batches(task), new_metric, Accelerator(cpu=True), **values)


@pytest.mark.parametrize(
    ("task", "model_class"),
    [
        ("image-classification", AdaPerceiverForImageClassification),
        ("image-segmentation", AdaPerceiverForSemanticSegmentation),
        ("depth-estimation", AdaPerceiverForDepthEstimation),
    ],
)
@torch.no_grad()
def test_a_grid_scores_what_its_points_score_one_by_one(task, model_class, tiny_model):
    model, new_metric = tiny_model(model_class), evaluation.metrics_for(task, 10)
    for parameter in model.parameters():
        parameter.mul_(3)  # else all images look alike to it
    rows = {(row["tokens"], row["width"], row["depth"]): row for row in grid(model, task)}
    assert sorted(rows) == sorted(POINTS)
    for (tokens, width, depth), row in rows.items():
        point, metric = {"tokens": tokens, "width": width, "depth": depth}, new_metric()
        for pixel_values, targets in batches(task):
            outputs = model(pixel_values, **point)
            prediction = outputs.logits if "logits" in outputs else outputs.predicted_depth
            evaluation.add(metric, prediction, targets)
        expected = metric.compute()
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=0 if task != "depth-estimation" else 1e-5, nan_ok=True), name
        assert row["gflops"] == model.flops(**point)["total"] / 1e9
    assert len({row[evaluation.SCORES[task].name] for row in rows.values()}) > 2  # the points do differ


@torch.no_grad()
def test_early_exit_is_read_off_the_grid_as_the_model_would_exit(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification)
    thresholds = [0.2, 0.5, 1.0]
    rows = grid(model, "image-classification", tokens=[4, 16], exit_thresholds=thresholds)
    early = [row for row in rows if row["exit_threshold"] is not None]
    assert len(early) == 2 * len(WIDTHS) * len(thresholds)
    depths = set()
    for row in early:
        call = {name: row[name] for name in ("tokens", "width", "depth", "exit_threshold")}
        metric, exits = evaluation.metrics_for("image-classification", 10)(), []
        for pixel_values, labels in batches("image-classification"):
            outputs = model(pixel_values, **call)
            metric.add_batch(predictions=outputs.logits, references=labels)
            exits += outputs.exit_depth.tolist()
        assert row["top1"] == metric.compute()["top1"]
        assert row["mean_exit_depth"] == pytest.approx(sum(exits) / len(exits))
        point = model.operating_point(**call)
        costs = [model.flops_at(point._replace(depth=depth), (32, 32), 1)["total"] / 1e9 for depth in exits]
        assert row["gflops"] == pytest.approx(sum(costs) / len(costs), rel=1e-5)
        depths |= set(exits)
    assert depths == {1, 2}


@torch.no_grad()
def test_early_exit_in_a_grid_follows_the_probes_and_temperatures_of_the_checkpoint(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification, num_hidden_layers=4)
    rules = [
        ({"exit_temperatures": [2.0, 1.0, 2.0, 1.0]}, 0.39),
        ({"exit_after": 2}, 0.39),
        ({"exit_every": 2}, 0.415),
    ]
    for rule, at in rules:
        model.adaptive_config = AdaptiveConfig(**rule, exit_threshold=0.9, policy="fixed")  # the grid says at which
        for row in grid(model, "image-classification", tokens=[16], widths=[32], depths=[4], exit_thresholds=[at]):
            threshold = row["exit_threshold"] or False
            exits, correct, costs = [], [], []
            for pixel_values, labels in batches("image-classification"):
                outputs = model(pixel_values, exit_threshold=threshold)
                correct += (outputs.logits.argmax(dim=-1) == labels).tolist()
                exits += [point.depth for point in outputs.operating_points]
            point = model.operating_point(exit_threshold=threshold)
            costs = [model.flops_at(point._replace(depth=depth), (32, 32), 1)["total"] / 1e9 for depth in exits]
            assert row["top1"] == pytest.approx(sum(correct) / len(correct)), rule
            assert row["gflops"] == pytest.approx(sum(costs) / len(costs), rel=1e-5), rule
            if threshold:
                assert row["mean_exit_depth"] == pytest.approx(sum(exits) / len(exits)), rule
                assert len(set(exits)) > 1, rule


def test_one_encoding_at_each_width_serves_all_trained_tokens_and_depths(tiny_model):
    model, ran = tiny_model(AdaPerceiverForImageClassification), []
    for layer in model.adaperceiver.layers:
        layer.register_forward_hook(lambda *_: ran.append(1))
    trained = model.config.token_granularities
    grid(model, "image-classification", tokens=trained, widths=model.config.widths, exit_thresholds=[0.5])
    assert len(ran) == 3 * 3 * 2  # batches x widths x blocks: one pass at each width
    ran.clear()
    grid(model, "image-classification", tokens=[*trained, 7], widths=[32])
    assert len(ran) == 3 * 2 * 2  # 7 tokens see each other as no trained count lets them: a pass of their own


def test_nothing_to_evaluate_is_an_error(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification)
    with pytest.raises(ValueError, match="no image that can be read"):
        evaluation.evaluate_grid(
            model, [], evaluation.metrics_for("image-classification", 10), Accelerator(cpu=True), depths=[1]
        )


# --- the script


@pytest.fixture
def checkpoint(tiny_model, tmp_path):
    def save(model_class=AdaPerceiverForImageClassification, name="checkpoint", **changes):
        from adaperceiver.training.scenes import LABELS, MASK_LABELS

        names = MASK_LABELS if model_class is AdaPerceiverForSemanticSegmentation else LABELS
        labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
        settings = {key: value for key, value in TINY.items() if key != "num_labels"}
        model = tiny_model(model_class, **{**settings, "num_labels": len(names), **labels, **changes})
        model.save_pretrained(tmp_path / name, save_code=False)
        return str(tmp_path / name)

    return save


def run(checkpoint, tmp_path, *options):
    common = [
        "--output",
        str(tmp_path / "out"),
        "--validation_samples",
        "12",
        "--train_samples",
        "1",
        "--batch_size",
        "5",
    ]
    evaluate_model.main(["--model", checkpoint, *common, *options])
    return json.loads((tmp_path / "out" / "results.json").read_text())


def test_the_script_writes_tables_and_plots_and_teaches_the_checkpoint(checkpoint, tmp_path, capsys):
    folder = checkpoint()
    vit = ViTForImageClassification(
        ViTConfig(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            image_size=32,
            num_labels=10,
        )
    )
    vit.save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    found = run(
        folder, tmp_path, "--exit_thresholds", "0.5", "--baselines", str(tmp_path / "vit"), "--save_table", "--split", "validation",
        "--latency_batch_size", "2", "--tokens", "2", "8", "16", "24",
    )  # fmt: skip
    assert found["task"] == "image-classification"
    assert len(found["rows"]) == 4 * 3 * 2 + 4 * 3 + 1
    assert found["rows"][-1]["model"] == "vit"
    assert found["rows"][-1]["gflops"] > 0
    assert all(
        ("ms" in row) == (row.get("exit_threshold") is None) for row in found["rows"]
    )  # it depends on the images
    assert all(row["ms"] > 0 for row in found["rows"] if "ms" in row)
    written = list(csv.DictReader((tmp_path / "out" / "results.csv").open()))
    assert [float(row["top1"]) for row in written] == [row["top1"] for row in found["rows"]]
    for name in ("pareto.png", "tokens_width.png", "tokens_depth.png", "extrapolation.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert "top1" in capsys.readouterr().out

    model = AutoModelForImageClassification.from_pretrained(folder)
    assert len(model.accuracy_table.points) == 4 * 3 * 2
    best = max(found["rows"][: 4 * 3 * 2], key=lambda row: row["top1"])
    chosen = model.operating_point(max_gflops=1e9)
    scores = {(p["tokens"], p["width"], p["depth"]): p["value"] for p in model.accuracy_table.points}
    assert scores[chosen.tokens, chosen.width, chosen.depth] == pytest.approx(best["top1"], abs=1e-4)


@pytest.mark.parametrize(
    ("model_class", "score"),
    [(AdaPerceiverForSemanticSegmentation, "mean_iou"), (AdaPerceiverForDepthEstimation, "rmse")],
)
def test_dense_checkpoints_are_evaluated_on_their_own_task(model_class, score, checkpoint, tmp_path):
    folder = checkpoint(model_class)
    found = run(folder, tmp_path, "--depths", "2", "--save_table", "--split", "validation")
    assert len(found["rows"]) == 6 * 3
    assert all(row[score] >= 0 for row in found["rows"])
    table = json.loads(Path(folder, "accuracy_table.json").read_text())
    assert table["higher_is_better"] is (score == "mean_iou")


def test_the_checkpoints_own_defaults_have_no_part_in_the_grid(checkpoint, tmp_path):
    folder = checkpoint()
    plain = run(folder, tmp_path, "--depths", "1", "2")["rows"]
    AdaptiveConfig(exit_threshold=0.1, tokens=2).save_pretrained(folder)
    assert run(folder, tmp_path, "--depths", "1", "2")["rows"] == plain


def test_the_front_has_the_pareto_optimal_points():
    rows = [{"gflops": cost, "score": score} for cost, score in ((1, 0.5), (2, 0.4), (3, 0.7), (3, 0.8), (4, 0.8))]
    assert [row["score"] for row in evaluation.pareto(rows, "gflops", "score", True)] == [0.5, 0.8]
    assert [row["score"] for row in evaluation.pareto(rows, "gflops", "score", False)] == [0.5, 0.4]


@pytest.mark.parametrize(
    ("model_class", "options", "message"),
    [
        (AdaPerceiverModel, [], "must be a checkpoint with a head"),
        (AdaPerceiverBackbone, [], "must be a checkpoint with a head"),
        (AdaPerceiverForDepthEstimation, ["--exit_thresholds", "0.5"], "--exit_thresholds are for classifiers"),
        (AdaPerceiverForImageClassification, ["--save_table"], "--save_table needs --split validation"),
        (AdaPerceiverForImageClassification, ["--split", "dev"], "scenes must have a split dev, it has"),
        (AdaPerceiverForDepthEstimation, ["--baselines", "x"], "--baselines are for classifiers"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(model_class, options, message, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(checkpoint(model_class), tmp_path, *options)
    assert not (tmp_path / "out").exists()


def test_an_operating_point_that_is_not_there_is_named_before_anything_runs(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"`width`.*33"):
        run(checkpoint(), tmp_path, "--widths", "33")


def test_classes_that_differ_are_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"scenes has 10 classes, --model .* 3"):
        run(checkpoint(num_labels=3, id2label=None, label2id=None), tmp_path)
    other = {"id2label": dict(enumerate("abcdefghijk")), "label2id": {name: i for i, name in enumerate("abcdefghijk")}}
    with pytest.raises(ValueError, match="must have the same classes in this order"):
        run(checkpoint(AdaPerceiverForSemanticSegmentation, "other", **other), tmp_path)
