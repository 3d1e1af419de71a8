"""What the page says of a photograph is what the model says."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForDepthEstimation,
    AutoModelForImageClassification,
    AutoModelForSemanticSegmentation,
)

from adaperceiver import (
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaptiveConfig,
)
from adaperceiver.evaluation.answers import Checkpoint, classify, depth_map, features, mask


@pytest.fixture
def photograph():
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 48, 3), dtype=np.uint8))


@pytest.fixture
def saved(tiny_model, tmp_path):
    def save(model_class, auto_class, **adaptive):
        model = tiny_model(model_class, num_labels=3)
        model.adaptive_config = AdaptiveConfig(**adaptive)
        model.save_pretrained(tmp_path / model_class.__name__)
        return Checkpoint(str(tmp_path / model_class.__name__), auto_class)

    return save


def test_an_answer_is_that_of_the_model(saved, photograph):
    checkpoint = saved(AdaPerceiverForImageClassification, AutoModelForImageClassification)
    model, pixel_values = checkpoint.model, checkpoint.pixels(photograph)
    answer = classify(checkpoint, photograph, tokens=4, width=16)
    with torch.no_grad():
        expected = model(pixel_values, tokens=4, width=16).logits[0].softmax(dim=-1)
        shallow = model(pixel_values, tokens=4, width=16, depth=1).logits.softmax(dim=-1).max().item()
    assert list(answer.probabilities.values()) == pytest.approx(expected.tolist(), abs=1e-5)
    assert answer.confidences == pytest.approx([shallow, expected.max().item()], abs=1e-5)
    assert (answer.tokens, answer.width, answer.depth, answer.exit_depth) == (4, 16, 2, 2)
    assert answer.gflops[0] == pytest.approx(model.flops(tokens=4, width=16)["total"] / 1e9)
    assert answer.gflops[1] == pytest.approx(model.flops()["total"] / 1e9)
    assert min(answer.milliseconds) > 0


def test_an_early_exit_is_where_the_confidence_says_and_costs_less(saved, photograph):
    checkpoint = saved(AdaPerceiverForImageClassification, AutoModelForImageClassification)
    full = classify(checkpoint, photograph)
    early = classify(checkpoint, photograph, exit_threshold=full.confidences[0] - 0.01)
    assert (full.exit_depth, early.exit_depth, early.depth) == (2, 1, 2)
    assert max(early.probabilities.values()) == pytest.approx(full.confidences[0], abs=1e-5)
    assert early.gflops[0] < full.gflops[0] == full.gflops[1]
    assert full.milliseconds[0] == full.milliseconds[1]  # the same call


def test_without_arguments_the_full_model_answers_whatever_the_checkpoint_chooses(saved, photograph):
    chosen = {"tokens": 2, "exit_threshold": 0.1, "exit_temperatures": [2.0, 2.0]}
    checkpoint = saved(AdaPerceiverForImageClassification, AutoModelForImageClassification, **chosen)
    answer = classify(checkpoint, photograph)
    assert (answer.tokens, answer.exit_depth) == (16, 2)
    assert checkpoint.model.adaptive_config.exit_temperatures == [2.0, 2.0]


def test_the_ends_of_budgets_can_be_afforded(saved, photograph):
    checkpoint = saved(AdaPerceiverForImageClassification, AutoModelForImageClassification)
    checkpoint.model.profile(image_size=(32, 32), repeats=1, progress=False)
    (least_gflops, most_gflops), (least_ms, _) = checkpoint.costs()
    answer = classify(checkpoint, photograph, max_gflops=least_gflops)
    assert (answer.tokens, answer.width, answer.depth) == (2, 16, 1)
    assert classify(checkpoint, photograph, max_gflops=most_gflops).tokens == 16
    classify(checkpoint, photograph, max_latency_ms=least_ms)


def test_masks_cover_every_pixel_once_and_pictures_have_the_size_of_what_the_model_sees(saved, photograph):
    segmenter = saved(AdaPerceiverForSemanticSegmentation, AutoModelForSemanticSegmentation)
    estimator = saved(AdaPerceiverForDepthEstimation, AutoModelForDepthEstimation)
    picture, masks = mask(segmenter, photograph, tokens=4)
    assert picture.dtype == np.uint8
    assert {name for _, name in masks} <= set(segmenter.model.config.id2label.values())
    assert np.array_equal(sum(veil > 0 for veil, _ in masks), np.ones(picture.shape[:2]))
    assert features(segmenter, photograph, tokens=4).shape == picture.shape
    depth = depth_map(estimator, photograph, tokens=4)
    assert depth.shape[:2] == tuple(estimator.pixels(photograph).shape[-2:])
    assert not np.array_equal(depth, depth_map(estimator, photograph))


def test_an_operating_point_carries_over_in_proportion(saved):
    checkpoint = saved(AdaPerceiverForSemanticSegmentation, AutoModelForSemanticSegmentation)
    full = {"tokens": 256, "width": 832, "depth": 21}
    assert checkpoint.in_proportion(full, full) == checkpoint.full
    assert checkpoint.in_proportion({"tokens": 64, "width": 416, "depth": 1}, full) == {
        "tokens": 4,
        "width": 16,
        "depth": 1,
    }
