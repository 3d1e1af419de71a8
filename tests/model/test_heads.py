"""Heads and losses: what the labels of each task mean."""

import pytest
import torch
from official import official_model
from torch import nn

from adaperceiver import (
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
)
from adaperceiver.loss_adaperceiver import (
    depth_loss,
    feature_distillation_loss,
    logit_distillation_loss,
    multi_scale_gradient_loss,
    segmentation_loss,
)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32)


def test_a_segmentation_label_of_255_does_not_count(images):
    model = official_model(AdaPerceiverForSemanticSegmentation)
    labels = torch.randint(0, 5, (2, 32, 32))
    labels[:, :16] = 255
    outputs = model(images, labels=labels)
    expected = nn.functional.cross_entropy(outputs.logits[:, :, 16:], labels[:, 16:])
    torch.testing.assert_close(outputs.loss, expected)


def test_segmentation_labels_may_be_larger_than_the_image(images):
    model = official_model(AdaPerceiverForSemanticSegmentation)
    labels = torch.randint(0, 5, (2, 50, 70))
    outputs = model(images, labels=labels)
    assert outputs.logits.shape == (2, 5, 32, 32)  # always at the size of the image
    features = model.feature_adapter(model.adaperceiver(images).output_tokens)
    coarse = model.head(features.transpose(1, 2).reshape(2, 80, 8, 8))
    upsampled = nn.functional.interpolate(coarse, size=(50, 70), mode="bilinear", align_corners=False)
    torch.testing.assert_close(outputs.loss, segmentation_loss(upsampled, labels, 255))


def test_an_image_without_a_pixel_that_counts_counts_for_nothing(images):
    model = official_model(AdaPerceiverForSemanticSegmentation)
    labels = torch.randint(0, 5, (2, 32, 32))
    labels[1] = 255
    expected = model(images[:1], labels=labels[:1]).loss
    torch.testing.assert_close(model(images, labels=labels).loss, expected)
    labels[0] = 255
    for adaptive_axes in ([], ["tokens"]):
        model.config.adaptive_axes = adaptive_axes
        loss = model.train()(images, labels=labels).loss
        assert loss.item() == 0
        model.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert gradients
        assert all((gradient == 0).all() for gradient in gradients)  # False for NaN


@pytest.mark.parametrize("model_class", [AdaPerceiverForSemanticSegmentation, AdaPerceiverForDepthEstimation])
def test_dense_labels_of_another_shape_are_refused(images, model_class):
    with pytest.raises(ValueError, match=r"`labels` must be of shape \(2, 32, 32\), got \(3, 32, 32\)"):
        official_model(model_class)(images, labels=torch.ones(3, 32, 32))


@torch.no_grad()
@pytest.mark.parametrize("granularities", [None, [4, 16], [6], [24]])
@pytest.mark.parametrize("model_class", [AdaPerceiverForSemanticSegmentation, AdaPerceiverForDepthEstimation])
def test_predictions_of_a_whole_grid_equal_separate_runs(images, model_class, granularities):
    model = official_model(model_class)
    grid = list(model.predictions_grid(images, granularities, depths=[1, 3], width=48))
    tokens = granularities or model.config.token_granularities
    assert [(depth, count) for depth, count, _ in grid] == [(depth, count) for depth in (1, 3) for count in tokens]
    for depth, count, prediction in grid:
        outputs = model(images, tokens=count, width=48, depth=depth)
        expected = outputs.logits if "logits" in outputs else outputs.predicted_depth
        torch.testing.assert_close(prediction, expected, rtol=0, atol=1e-5)


def test_a_grid_beyond_the_training_length_needs_an_encoding_for_each_count(images):
    with pytest.raises(ValueError, match="`granularities` must not exceed 16, got \\[16, 24\\]"):
        next(official_model(AdaPerceiverForDepthEstimation).predictions_grid(images, [16, 24]))


def test_segmentation_into_one_class_is_refused(tiny_config, images):
    tiny_config.num_labels = 1
    with pytest.raises(ValueError, match="num_labels"):
        AdaPerceiverForSemanticSegmentation(tiny_config)(images, labels=torch.zeros(2, 32, 32).long())


def test_depth_pixels_without_a_valid_label_do_not_count():
    depth, labels = torch.rand(2, 12, 10) * 9 + 0.5, torch.rand(2, 12, 10) * 9 + 0.5
    for invalid in (0.0, -1.0, 10.5, float("nan"), float("inf")):
        broken = labels.clone()
        broken[0, 3:5, 2:7] = invalid
        changed = depth.clone().requires_grad_()
        with torch.no_grad():
            changed[0, 3:5, 2:7] = 5.0
        loss = depth_loss(changed, broken, max_depth=10.0)
        torch.testing.assert_close(loss, depth_loss(depth, broken, max_depth=10.0))
        (gradient,) = torch.autograd.grad(loss, changed)
        assert gradient.isfinite().all()
        assert (gradient[0, 3:5, 2:7] == 0).all()


@pytest.mark.parametrize("warm_up", [False, True])
def test_a_batch_without_one_valid_pixel_has_no_depth_loss_and_no_nan(warm_up):
    depth = torch.rand(2, 12, 10).requires_grad_()
    loss = depth_loss(depth, torch.zeros(2, 12, 10), max_depth=10.0, warm_up=warm_up)
    loss.backward()
    assert loss.item() < 1e-5
    assert (depth.grad == 0).all()


def test_the_gradient_loss_runs_over_height_and_width_not_over_the_batch():
    maps, valid = torch.randn(3, 12, 10), torch.ones(3, 12, 10, dtype=torch.bool)
    alone = [multi_scale_gradient_loss(maps[index : index + 1], valid[:1]) for index in range(3)]
    together = multi_scale_gradient_loss(maps, valid)
    torch.testing.assert_close(together, torch.stack(alone).mean())
    assert multi_scale_gradient_loss(torch.arange(3.0).view(3, 1, 1).expand(3, 12, 10), valid) == 0  # flat maps


def test_the_gradient_loss_by_hand():
    """One row of g = 0, 1, 4, 9 and strides 1, 2, 4 and 6: pairs two pixels apart exist at stride 1 only."""
    row = torch.tensor([[[0.0, 1.0, 4.0, 9.0]]])
    assert multi_scale_gradient_loss(row, torch.ones(1, 1, 4, dtype=torch.bool)).item() == (4 + 8) / 4
    valid = torch.tensor([[[True, True, True, False]]])
    assert multi_scale_gradient_loss(row * valid, valid).item() == pytest.approx(4 / 3)


def test_depth_is_clamped_and_sized_as_the_image_outside_training(images):
    model = official_model(AdaPerceiverForDepthEstimation)
    outputs = model(images, labels=torch.full((2, 40, 40), 3.0))
    assert outputs.predicted_depth.shape == (2, 32, 32)
    assert outputs.predicted_depth.min() >= 0.001
    assert outputs.predicted_depth.max() <= 10
    assert outputs.loss.isfinite()


@torch.no_grad()
@pytest.mark.parametrize("bins", [2, 8, 64, 256, 1000])
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_depth_in_half_precision_sums_its_bins_in_float32(autocast, bins, tiny_model):
    for seed in range(10):
        torch.manual_seed(seed)
        head = tiny_model(AdaPerceiverForDepthEstimation, num_depth_bins=bins, max_depth=float(seed + 1)).head
        head.bins.weight.normal_(std=10.0 ** (seed % 3 - 1))
        features = torch.randn(1, head.bins.in_channels, 4, 4)
        if not autocast:
            head, features = head.to(torch.bfloat16), features.to(torch.bfloat16)
        larger = nn.functional.interpolate(features, size=(16, 16), mode="bilinear", align_corners=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            weights, depth = head.bins(larger), head(features)
        assert weights.dtype == torch.bfloat16
        weights = weights.double().relu() + 0.1
        centres = torch.linspace(head.config.min_depth, head.config.max_depth, bins).double()
        expected = (weights * centres[:, None, None]).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
        assert depth.dtype == features.dtype
        one_rounding = 1e-5 if autocast else 2**-8
        torch.testing.assert_close(depth.double(), expected, rtol=one_rounding, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_a_random_depth_model_in_half_precision_is_close_to_itself(autocast, tiny_model):
    for seed in range(20):
        torch.manual_seed(seed)
        model, images = tiny_model(AdaPerceiverForDepthEstimation, num_depth_bins=256), torch.randn(2, 3, 32, 32)
        expected = model(images).predicted_depth
        if not autocast:
            model = model.to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            actual = model(images).predicted_depth.float()
        torch.testing.assert_close(actual, expected, rtol=0.03, atol=0)


def test_the_depth_loss_can_warm_up(images):
    model, labels = official_model(AdaPerceiverForDepthEstimation), torch.rand(2, 32, 32) * 9 + 0.5
    assert model(images, labels=labels, loss_warm_up=True).loss < model(images, labels=labels).loss


def test_logit_distillation_is_the_kl_divergence_to_the_teacher():
    logits, teacher = torch.randn(4, 10), torch.randn(4, 10)
    probabilities = teacher.softmax(-1)
    expected = (probabilities * (probabilities.log() - logits.log_softmax(-1))).sum(-1).mean()
    torch.testing.assert_close(logit_distillation_loss(logits, teacher), expected)
    hot = 9 * logit_distillation_loss(logits / 3, teacher / 3)
    torch.testing.assert_close(logit_distillation_loss(logits, teacher, temperature=3.0), hot)


def test_feature_distillation_weighs_cosine_and_smooth_l1():
    features, teacher = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    cosine = 1 - nn.functional.cosine_similarity(features, teacher, dim=-1).mean()
    expected = 0.9 * cosine + 0.1 * nn.functional.smooth_l1_loss(features, teacher)
    torch.testing.assert_close(feature_distillation_loss(features, teacher), expected)
    assert feature_distillation_loss(features, features).item() == pytest.approx(0, abs=1e-6)


def test_the_distillation_loss_is_the_sum_of_what_is_given(images):
    model = official_model(AdaPerceiverForDistillation)
    teacher = {"teacher_logits": torch.randn(2, 10), "teacher_features": torch.randn(2, 64, 80)}
    labels = {"labels": torch.tensor([1, 7])}
    parts = [model(images, **{name: target}).loss for name, target in {**teacher, **labels}.items()]
    torch.testing.assert_close(model(images, **teacher, **labels).loss, sum(parts))
    assert model(images).loss is None
    with pytest.raises(ValueError, match=r"`teacher_features` must be of shape \(2, 64, 80\)"):
        model(images, teacher_features=torch.randn(2, 65, 80))


def test_a_distilled_checkpoint_serves_every_head(tmp_path):
    """The dense heads find their readout and feature adapter in it, the classifier its own."""
    official_model(AdaPerceiverForDistillation).save_pretrained(tmp_path)
    for model_class, new in [
        (AdaPerceiverForImageClassification, set()),
        (
            AdaPerceiverForSemanticSegmentation,
            {"head.norm.weight", "head.norm.bias", "head.classifier.weight", "head.classifier.bias"},
        ),
        (AdaPerceiverForDepthEstimation, {"head.bins.weight", "head.bins.bias"}),
    ]:
        _, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
        assert set(info["missing_keys"]) == new
