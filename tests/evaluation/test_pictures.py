"""Pictures of what happens inside, and the numbers behind them."""

import numpy as np
import pytest
import torch
import visualize
from conftest import images
from PIL import Image

from adaperceiver import (
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
)
from adaperceiver.evaluation import pictures
from adaperceiver.image_processing_adaperceiver import image_processor_for


@pytest.fixture
def photographs():
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 255, (40, 48, 3), dtype=np.uint8)) for _ in range(3)]


@torch.no_grad()
def test_what_a_latent_reads_sums_to_one_over_the_patches(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification)
    attention = pictures.read_attention(model, images(height=32, width=48), tokens=8)
    assert attention.shape == (2, 8, 4, 6)
    torch.testing.assert_close(attention.sum(dim=(2, 3)), torch.ones(2, 8))


@torch.no_grad()
def test_one_head_reads_its_values_by_the_attention_shown(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification, num_attention_heads=1)
    cross_attention, found = model.adaperceiver.read.cross_attention, []
    cross_attention.o_proj.register_forward_hook(lambda module, inputs, output: found.append(inputs[0]))
    pixel_values = images()
    model(pixel_values, tokens=8)
    input_tokens, _ = model.adaperceiver.embed(pixel_values, model.operating_point(tokens=8), {})
    _, value = cross_attention.key_value(input_tokens)
    weights = pictures.read_attention(model, pixel_values, tokens=8).flatten(2)
    torch.testing.assert_close(weights @ value[:, 0], found[0], rtol=1e-4, atol=1e-5)


def test_colors_of_features_are_those_of_the_first_point(tiny_model):
    model, pixel_values = tiny_model(AdaPerceiverForDistillation), images(3)
    points = [{}, {"tokens": 2}, {}]
    colors = pictures.feature_colors(model, pixel_values, points)
    assert colors.shape == (3, 3, 4, 4, 3)
    assert colors.min() == 0
    assert colors.max() == 1
    assert np.array_equal(colors[0], colors[2])
    assert not np.array_equal(colors[0], colors[1])
    with pytest.raises(ValueError, match="AdaPerceiverForImageClassification writes no dense output tokens"):
        pictures.feature_colors(tiny_model(AdaPerceiverForImageClassification), pixel_values, points)


@pytest.mark.parametrize("model_class", [AdaPerceiverForSemanticSegmentation, AdaPerceiverForDepthEstimation])
def test_maps_at_rising_token_counts_are_those_of_calls(tiny_model, model_class):
    model, pixel_values = tiny_model(model_class), images()
    maps = pictures.dense_predictions(model, pixel_values, [{"tokens": 2}, {"tokens": 16}])
    outputs = model(pixel_values, tokens=2)
    expected = outputs.logits.argmax(dim=1) if "logits" in outputs else outputs.predicted_depth
    torch.testing.assert_close(torch.from_numpy(maps[0]), expected.detach(), rtol=1e-4, atol=1e-5)
    assert maps.shape == (2, 2, 32, 32)


def test_every_picture_can_be_drawn(tiny_model, photographs, tmp_path):
    classifier = tiny_model(AdaPerceiverForImageClassification)
    features = tiny_model(AdaPerceiverForDistillation)
    processor = image_processor_for(classifier.config, "image-classification")
    figures = {
        "read": pictures.draw_read(classifier, processor, photographs, tokens=8),
        "features": pictures.draw_features(features, processor, photographs, {"full": {}, "2 tokens": {"tokens": 2}}),
        "exits": pictures.draw_exits(classifier, processor, photographs, threshold=0.5),
    }
    for model_class, task in (
        (AdaPerceiverForSemanticSegmentation, "image-segmentation"),
        (AdaPerceiverForDepthEstimation, "depth-estimation"),
    ):
        dense = tiny_model(model_class)
        processor = image_processor_for(dense.config, task)
        figures[task] = pictures.draw_changes(dense, processor, photographs[:1], [2, 8, 16])
    shapes = {"read": (3, 7), "features": (3, 3), "image-segmentation": (2, 4), "depth-estimation": (2, 4)}
    for name, figure in figures.items():
        figure.savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
        if name in shapes:
            rows, columns = shapes[name]
            assert len(figure.axes) == rows * columns, name


@pytest.mark.parametrize(
    ("model_class", "expected"),
    [
        (AdaPerceiverForImageClassification, {"read.png", "exits.png"}),
        (AdaPerceiverForDistillation, {"read.png", "features.png", "exits.png"}),
        (AdaPerceiverForDepthEstimation, {"read.png", "features.png", "changes.png"}),
    ],
)
def test_the_script_draws_what_a_head_can_show(tiny_model, photographs, tmp_path, capsys, model_class, expected):
    tiny_model(model_class).save_pretrained(tmp_path / "model", save_code=False)
    photographs[0].save(tmp_path / "photograph.png")
    options = ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "out")]
    visualize.main([*options, "--images", str(tmp_path / "photograph.png")])
    assert {path.name for path in (tmp_path / "out").iterdir()} == expected
    printed = capsys.readouterr().out
    assert all(name in printed for name in expected)
    with pytest.raises(ValueError, match=r"--images .*none\.png is no photograph that can be read"):
        visualize.main([*options, "--images", str(tmp_path / "none.png")])


def test_blocks_after_the_exit_are_pale_and_the_threshold_is_drawn():
    (axes,) = pictures.draw_confidence([0.5, 0.92, 0.95], threshold=0.9, exit_depth=2).axes
    first, second, third = (bar.get_facecolor() for bar in axes.patches)
    assert first == second != third
    assert [bar.get_height() for bar in axes.patches] == [0.5, 0.92, 0.95]
    assert axes.lines[0].get_ydata()[0] == 0.9
    (axes,) = pictures.draw_confidence([0.5, 0.6]).axes
    assert len(axes.lines) == 0
    assert len({bar.get_facecolor() for bar in axes.patches}) == 1
