"""examples/run_*.py: fine-tuning with a frozen backbone, on rendered scenes and on data that is wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import EXAMPLES
from PIL import Image
from transformers import pipeline

from adaperceiver import (
    AccuracyTable,
    AdaPerceiverDepthEstimationPipeline,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverImageClassificationPipeline,
    AdaPerceiverImageSegmentationPipeline,
    AdaptiveConfig,
)
from adaperceiver.training.arguments import as_options, parse


pytest.importorskip("kornia", reason="augmentation needs kornia")
import run_depth_estimation
import run_image_classification
import run_semantic_segmentation

from adaperceiver.training import finetuning
from adaperceiver.training.scenes import FIRST_INDEX, MASK_LABELS, scene


TASKS = {
    "classification": (
        run_image_classification,
        AdaPerceiverForImageClassification,
        AdaPerceiverImageClassificationPipeline,
        "image-classification",
    ),
    "segmentation": (
        run_semantic_segmentation,
        AdaPerceiverForSemanticSegmentation,
        AdaPerceiverImageSegmentationPipeline,
        "image-segmentation",
    ),
    "depth": (
        run_depth_estimation,
        AdaPerceiverForDepthEstimation,
        AdaPerceiverDepthEstimationPipeline,
        "depth-estimation",
    ),
}


@pytest.fixture
def checkpoint(tiny_model, tmp_path):
    """A classifier and feature model, as distillation leaves it."""
    tiny_model(AdaPerceiverForDistillation).save_pretrained(tmp_path / "checkpoint", save_code=False)
    return str(tmp_path / "checkpoint")


@pytest.fixture
def arguments(checkpoint, tmp_path):
    """Command line of a run of seconds on scenes; `changes` override it."""

    def build(task, **changes):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text("{}")
        values = {
            "model": checkpoint,
            "output_dir": tmp_path / "run",
            "steps": 4,
            "batch_size": 8,
            "micro_batch_size": 4,
        }
        values |= {"train_samples": 24, "validation_samples": 10, "warmup_steps": 1, "log_steps": 1, "save_steps": 2}
        values |= {"eval_steps": 2, "workers": 0, "tracker": "none", "optimizer": "adamw", "ema_decay": 0.5}
        if task == "classification":
            values |= {"randaugment_magnitude": 0, "mixup_alpha": 0}
        else:
            values |= {"image_size": [32, 32]}
        return [str(recipe), *as_options({**values, **changes})]

    return build


def lines_of(folder):
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("task", TASKS)
def test_training_reaches_the_readout_and_the_head_alone(task, arguments, checkpoint, tmp_path):
    script, model_class, pipeline_class, name = TASKS[task]
    script.main(arguments(task))
    before = AdaPerceiverForDistillation.from_pretrained(checkpoint).state_dict()
    after = model_class.from_pretrained(tmp_path / "run" / "final").state_dict()
    changed = {key for key, value in after.items() if key not in before or not torch.equal(value, before[key])}
    readout = "class_readout" if task == "classification" else "dense_readout"
    head = "classifier." if task == "classification" else "head."
    assert {key for key in after if key.startswith((f"adaperceiver.{readout}.", head))} == changed

    use = pipeline(name, model=str(tmp_path / "run" / "final"), pipeline_class=pipeline_class)
    assert use(Image.new("RGB", (32, 32)), tokens=4)
    assert "steps: 4" in (tmp_path / "run" / "final" / "README.md").read_text()
    assert {line["step"] for line in lines_of(tmp_path / "run")} == {1, 2, 3, 4}
    table = json.loads((tmp_path / "run" / "final" / "accuracy_table.json").read_text())
    assert {point["tokens"] for point in table["points"]} == {2, 4, 6, 8, 12, 16}
    assert table["higher_is_better"] is (task != "depth")


@pytest.mark.parametrize("task", TASKS)
def test_what_is_frozen_keeps_no_activations(task, checkpoint):
    args = finetuning.FineTuningArguments(model=checkpoint, adaptive_axes=["tokens", "depth", "width"])
    model, graphs = finetuning.load_model(args, TASKS[task][3], None).train(), []
    modules = [model.adaperceiver.embeddings, model.adaperceiver.read, *model.adaperceiver.layers]
    for module in modules:
        module.register_forward_hook(lambda module, inputs, output: graphs.append(output.requires_grad))
    labels = torch.randint(0, 10, (2,) if task == "classification" else (2, 32, 32))
    loss = model(torch.randn(2, 3, 32, 32), labels=labels if task != "depth" else labels + 0.5).loss
    assert graphs == [False] * len(modules)
    loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        name for name, p in model.named_parameters() if p.requires_grad
    }


def test_layers_that_the_checkpoint_does_not_have_are_trained(tiny_model, tmp_path):
    tiny_model(AdaPerceiverForImageClassification).save_pretrained(tmp_path / "classifier", save_code=False)
    args = finetuning.FineTuningArguments(model=str(tmp_path / "classifier"))
    model = finetuning.load_model(args, "image-segmentation", ["a", "b"])
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"adaperceiver", "feature_adapter", "head"}
    assert not any(p.requires_grad for p in model.adaperceiver.layers.parameters())
    args.train_all = True
    assert all(p.requires_grad for p in finetuning.load_model(args, "depth-estimation", None).parameters())


def test_a_new_task_with_as_many_classes_inherits_no_scores(tiny_model, arguments, tmp_path, caplog):
    model = tiny_model(AdaPerceiverForImageClassification)  # ten classes, as the scenes have
    model.adaptive_config = AdaptiveConfig(exit_threshold=0.1, exit_temperatures=[2.0, 1.0])
    model.accuracy_table = AccuracyTable("of another task", [{"tokens": 2, "width": 16, "depth": 1, "value": 0.99}])
    model.save_pretrained(tmp_path / "classifier", save_code=False)
    run_image_classification.main(arguments("classification", model=tmp_path / "classifier", steps=1, eval_steps=0))
    assert "Dropped accuracy_table, exit_threshold, exit_temperatures" in caplog.text
    final = AdaPerceiverForImageClassification.from_pretrained(tmp_path / "run" / "final")
    assert final.adaptive_config == AdaptiveConfig()
    assert final.accuracy_table.metric == "top1 on the validation data of scenes"


def test_mixed_images_are_trained_on_their_mixed_labels():
    batch = {"labels": torch.tensor([0, 2]), "other_labels": torch.tensor([1, 2]), "share": torch.tensor([0.3, 0.9])}
    target = run_image_classification.mixed_labels(batch, 3)
    torch.testing.assert_close(target.exp(), torch.tensor([[0.3, 0.7, 0], [0, 0, 1]]), rtol=0, atol=1e-6)
    logits = torch.randn(2, 3, requires_grad=True)
    divergence = torch.nn.functional.kl_div(logits.log_softmax(-1), target, reduction="batchmean", log_target=True)
    cross_entropy = torch.nn.functional.cross_entropy(logits, target.exp())
    ours, expected = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (divergence, cross_entropy))
    torch.testing.assert_close(ours, expected)


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_loss_curve(arguments, tmp_path):
    run_semantic_segmentation.main(arguments("segmentation", output_dir=tmp_path / "whole", steps=6))
    command = [sys.executable, str(EXAMPLES / "run_semantic_segmentation.py"), *arguments("segmentation", steps=6)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not (tmp_path / "run" / "checkpoint-2").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "run" / "checkpoint-2").exists()
    assert not (tmp_path / "run" / "final").exists(), "the run was over before it could be killed"
    run_semantic_segmentation.main([*arguments("segmentation", steps=6), "--resume"])
    whole, resumed = (
        {line["step"]: line["loss"] for line in lines_of(tmp_path / name) if "loss" in line}
        for name in ("whole", "run")
    )
    assert resumed == pytest.approx(whole, rel=1e-6)


def test_the_best_depth_model_is_the_one_with_the_least_error(arguments, tmp_path, monkeypatch):
    errors = iter([0.9, 0.3, 0.6])

    def measured(*args, **kwargs):
        row = {"tokens": 16, "width": 32, "depth": 2, "exit_threshold": None, "gflops": 1.0}
        return [{**row, "rmse": next(errors)}]

    monkeypatch.setattr(finetuning, "evaluate_grid", measured)
    run_depth_estimation.main(arguments("depth", steps=6))
    assert "rmse: 0.3000" in (tmp_path / "run" / "best" / "README.md").read_text()
    assert "rmse: 0.6000" in (tmp_path / "run" / "final" / "README.md").read_text()


# --- bad input: known before training starts, and nothing is left behind


@pytest.fixture
def pairs(tmp_path):
    """Two splits of images and masks as the ADE20K tree has them; `spoil` changes a mask."""

    def write(spoil=lambda mask: mask):
        for split in ("training", "validation"):
            for kind in ("images", "annotations"):
                (tmp_path / "ade" / kind / split).mkdir(parents=True)
            for number in range(3):
                image = np.full((24, 32, 3), 50 * number, dtype=np.uint8)
                mask = np.full((24, 32), number, dtype=np.uint8)
                mask = spoil(mask) if number == 2 else mask
                Image.fromarray(image).save(tmp_path / "ade" / "images" / split / f"{number}.jpg")
                Image.fromarray(mask).save(tmp_path / "ade" / "annotations" / split / f"{number}.png")
        return tmp_path / "ade"

    return write


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda mask: mask + 170, "sample 2, id 2: the mask has class 172"),
        (lambda mask: mask[:20], "sample 2, id 2: the image is 24x32 .*, its target 20x32"),
    ],
)
def test_a_mask_that_cannot_be_used_is_named_before_training(spoil, message, pairs, arguments, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_semantic_segmentation.main(
            arguments("segmentation", dataset=pairs(spoil), micro_batch_size=2, batch_size=2)
        )
    assert not list((tmp_path / "run").glob("*checkpoint*"))
    assert not (tmp_path / "run" / "final").exists()


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (
            "segmentation",
            {"image_size": [30, 32]},
            r"--image_size must be a height and a width, multiples of 8, got 30 32",
        ),
        ("segmentation", {"image_size": [32]}, "--image_size must be a height and a width"),
        ("depth", {"dataset": "nowhere/at/all"}, "nowhere/at/all.* could not be loaded"),
        ("classification", {"streaming": True}, "--streaming is not for fine-tuning"),
    ],
)
def test_arguments_that_cannot_be_followed_are_named(task, changes, message, arguments):
    with pytest.raises(ValueError, match=message):
        TASKS[task][0].main(arguments(task, **changes))


# --- the embedded defaults


def run_default(task, steps, tmp_path):
    """The recipe as it is, with the shipped checkpoint, for fewer steps: the last metrics."""
    options = {
        "output_dir": tmp_path / "run",
        "steps": steps,
        "validation_samples": 200,
        "workers": 0,
        "tracker": "none",
    }
    TASKS[task][0].main(as_options(options))
    return lines_of(tmp_path / "run")[-1]


@pytest.mark.slow
def test_classification_by_default_is_well_above_chance(tmp_path):
    assert run_default("classification", 100, tmp_path)["top1"] > 0.2  # of ten classes


@pytest.mark.slow
def test_segmentation_by_default_is_well_above_chance(tmp_path):
    masks = np.stack([scene(FIRST_INDEX["validation"] + index)["mask"] for index in range(200)])
    everywhere_background = (masks == 0).mean() / len(MASK_LABELS)  # mean IoU over all classes
    assert run_default("segmentation", 125, tmp_path)["mean_iou"] > 1.7 * everywhere_background


@pytest.mark.slow
def test_depth_by_default_is_well_above_chance(tmp_path):
    depths = np.stack([scene(FIRST_INDEX["validation"] + index)["depth"] for index in range(200)])
    always_the_same = np.sqrt(((depths - depths.mean()) ** 2).mean(axis=(1, 2))).mean()
    assert run_default("depth", 125, tmp_path)["rmse"] < 0.6 * always_the_same


def test_the_recipes_name_only_known_arguments():
    scripts = {
        run_image_classification: ["imagenet1k", "scenes_classification", "own_classification"],
        run_semantic_segmentation: ["ade20k", "scenes_segmentation", "own_segmentation", "pets_masks", "camvid"],
        run_depth_estimation: ["nyuv2", "scenes_depth", "own_depth", "nyuv2_small"],
    }
    for script, recipes in scripts.items():
        for recipe in recipes:
            path = EXAMPLES / "recipes" / f"{recipe}.yaml"
            assert len(parse(script.GROUPS, [str(path)], path)) == 1
            assert f"examples/{Path(script.__file__).name}" in path.read_text()
