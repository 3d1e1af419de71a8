"""The official model's outputs, reproduced: see fixtures/README.md for how they were recorded."""

import re
from collections import Counter

import pytest
import torch
from official import CONFIG, official_classifier, official_model, recorded

from adaperceiver import (
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
)
from adaperceiver.layers_adaperceiver import rotary_embedding
from adaperceiver.loss_adaperceiver import depth_loss, multi_scale_gradient_loss, scale_invariant_log_loss
from adaperceiver.official_adaperceiver import our_name


TOLERANCE = {"cls": 1e-5, "distill": 1e-5, "seg": 1e-5, "depth": 2e-5}
CLASSES = {
    "cls": AdaPerceiverForImageClassification,
    "distill": AdaPerceiverForDistillation,
    "seg": AdaPerceiverForSemanticSegmentation,
    "depth": AdaPerceiverForDepthEstimation,
}
# e.g. cls/logits/t16_w48_d3, seg_bidir/pred/t8_wNone_d4, cls_train/logits/t4_w32,64_d4, depth/pred/res40x48_t16_wNone_d4
CASE = re.compile(
    r"(?P<task>cls|distill|seg|depth)(?:_(?P<mode>bidir|train|eval))?/(?P<output>logits|features|pred)/"
    r"(?:res(?P<size>\d+x\d+)_)?t(?P<tokens>\d+)(?:_ntk)?_w(?P<width>[\d,]+|None)_d(?P<depth>\d+)"
)
CASES = {key: match.groupdict() for key in recorded() if (match := CASE.fullmatch(key))}


@pytest.fixture(scope="module")
def models():
    return {task: official_model(model_class) for task, model_class in CLASSES.items()}


def images(size: str | None = None) -> torch.Tensor:
    return recorded()["input/x" if size is None else f"input/x_{size}"]


def predict(outputs, task: str, output: str) -> torch.Tensor:
    """The recorded tensor's counterpart: the official model keeps the axis of the single output token, and of depth."""
    if output == "features":
        return outputs.features
    if task == "depth":
        return outputs.predicted_depth[:, None]
    return outputs.logits if task == "seg" else outputs.logits[:, None]


def assert_matches(actual: torch.Tensor, key: str, tolerance: float = 1e-5) -> None:
    expected = recorded()[key]
    torch.testing.assert_close(actual, expected.reshape(()) if actual.ndim == 0 else expected, atol=tolerance, rtol=0)


def test_the_recording_holds_every_kind_of_case():
    counts = Counter((case["task"], case["mode"]) for case in CASES.values())
    assert counts == {
        ("cls", None): 63,
        ("cls", "bidir"): 10,
        ("cls", "train"): 4,
        ("cls", "eval"): 3,
        ("distill", None): 12,
        ("seg", None): 6,
        ("seg", "bidir"): 3,
        ("depth", None): 5,
        ("depth", "bidir"): 3,
    }


@pytest.mark.parametrize("key", CASES)
def test_outputs_equal_the_official_ones(models, key):
    case = CASES[key]
    widths = None if case["width"] == "None" else [int(width) for width in case["width"].split(",")]
    model = models[case["task"]].train(case["mode"] == "train")
    with torch.no_grad():
        outputs = model(
            images(case["size"]),
            tokens=int(case["tokens"]),
            width=widths[0] if widths is not None and len(widths) == 1 else widths,
            depth=int(case["depth"]),
            attention="bidirectional" if case["mode"] == "bidir" else None,
        )
    assert_matches(predict(outputs, case["task"], case["output"]), key, TOLERANCE[case["task"]])


@torch.no_grad()
def test_a_call_with_nothing_said_runs_the_full_model():
    assert_matches(official_classifier()(images()).logits[:, None], "cls/logits/default")


@torch.no_grad()
@pytest.mark.parametrize(
    ("key", "tokens", "granularities"),
    [
        ("cls/logits/t16_grans16_wNone_d4", 16, [16]),
        ("cls/logits/t16_grans2_6_16_wNone_d4", 16, [2, 6, 16]),
        # groups of one latent: causal attention
        ("cls_causal/logits/t4_wNone_d4", 4, list(range(1, 17))),
        ("cls_causal/logits/t8_wNone_d4", 8, list(range(1, 17))),
        ("cls_causal/logits/t16_wNone_d4", 16, list(range(1, 17))),
    ],
)
def test_other_granularities_equal_the_official_mask(key, tokens, granularities):
    model = official_model(AdaPerceiverForImageClassification, token_granularities=granularities)
    assert_matches(model(images(), tokens=tokens).logits[:, None], key)


@torch.no_grad()
def test_small_latent_tokens_show_the_epsilon_of_the_norms():
    model = official_model(AdaPerceiverForImageClassification)
    model.adaperceiver.read.latent_token *= 1e-3
    model.adaperceiver.class_readout.output_token *= 1e-3
    assert_matches(model(images()).logits[:, None], "cls_smalltoken/logits/t16_wNone_d4")


@torch.no_grad()
def test_every_step_on_the_way_equals_the_official_one():
    model = official_classifier()
    outputs = model.adaperceiver(images(), output_hidden_states=True)
    assert_matches(outputs.input_tokens, "debug_t16/patches")
    assert_matches(model.adaperceiver(images("40x48")).input_tokens, "debug_res40x48/patches")
    assert_matches(outputs.hidden_states[0], "debug_t16/latents_after_read")
    for depth in range(1, 5):
        assert_matches(outputs.hidden_states[depth], f"debug_t16/latents_after_block{depth}")
    token = model.adaperceiver.class_readout.output_token
    assert_matches(outputs.output_tokens - token, "debug_t16/write_delta")


@torch.no_grad()
@pytest.mark.parametrize("task", ["seg", "depth"])
def test_features_below_the_dense_heads_equal_the_official_ones(models, task):
    model = models[task].eval()
    features = model.feature_adapter(model.adaperceiver(images()).output_tokens)
    assert_matches(features, f"{task}/backbone_features/t16_wNone_d4")


@pytest.mark.parametrize("tokens", [16, 24, 32])
def test_rotary_tables_equal_the_official_ones(tokens):
    cos, sin = rotary_embedding(CONFIG, tokens, torch.device("cpu")).unbind(-1)
    assert_matches(cos, f"rope/cos_t{tokens}", 1e-6)
    assert_matches(sin, f"rope/sin_t{tokens}", 1e-6)


@pytest.mark.parametrize("tokens", [4, 6, 8, 12, 16, 24, 32])
def test_token_groups_are_the_official_block_mask(tokens):
    mask = torch.zeros(tokens, tokens)
    for start, stop in CONFIG.token_groups(tokens, "block"):
        mask[start:stop, :stop] = 1
    assert torch.equal(mask, recorded()[f"mask/t{tokens}"].float())


def log_difference_and_valid(sample: slice) -> tuple[torch.Tensor, torch.Tensor]:
    depth, target = recorded()["loss/depth_pred"][sample, 0], recorded()["loss/depth_target"][sample, 0]
    valid = (target > 0) & (target <= 10)
    difference = torch.where(valid, (depth + 1e-3).log() - (torch.where(valid, target, 1.0) + 1e-3).log(), 0.0)
    return difference, valid


def test_depth_losses_equal_the_official_ones():
    difference, valid = log_difference_and_valid(slice(None))
    assert_matches(2.0 * scale_invariant_log_loss(difference, valid), "loss/sig")
    assert_matches(2.0 * scale_invariant_log_loss(difference, valid, warm_up=True), "loss/sig_warmup")
    # The official gradient loss runs over batch and channels by mistake; on a single 2-D map it is what was meant.
    assert_matches(0.5 * multi_scale_gradient_loss(*log_difference_and_valid(slice(0, 1))), "loss/grad_2d_sample0")


def test_the_depth_loss_is_the_sum_of_its_two_terms():
    depth, target = recorded()["loss/depth_pred"][:1, 0], recorded()["loss/depth_target"][:1, 0]
    difference, valid = log_difference_and_valid(slice(0, 1))
    expected = 2.0 * scale_invariant_log_loss(difference, valid) + recorded()["loss/grad_2d_sample0"].reshape(())
    torch.testing.assert_close(depth_loss(depth, target, max_depth=10.0), expected, atol=1e-5, rtol=0)


def test_one_training_pass_gives_the_official_joint_loss_and_gradients():
    """Per-sample widths; token loss at every granularity, depth loss at the recorded granularities, weights l / L."""
    model, labels = official_model(AdaPerceiverForImageClassification).train(), recorded()["joint/labels"].long()
    outputs = model.adaperceiver(images(), width=[32, 64], output_hidden_states=True)

    def logits(latents: torch.Tensor) -> torch.Tensor:
        rope = rotary_embedding(model.config, latents.shape[1], latents.device)
        return model.classifier(model.adaperceiver.class_readout(latents, rope)[:, 0])

    def loss_of(predicted: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(predicted, labels)

    token_losses, depth_losses = [], []
    for tokens in CONFIG.token_granularities:
        predicted = logits(outputs.last_hidden_state[:, :tokens])
        assert_matches(predicted[:, None], f"joint/token_logits/t{tokens}")
        token_losses.append(loss_of(predicted))
    for depth, tokens in enumerate(recorded()["joint/depth_readout_tokens"].tolist(), start=1):
        predicted = logits(outputs.hidden_states[depth][:, :tokens])
        assert_matches(predicted[:, None], f"joint/depth_logits/d{depth}")
        depth_losses.append(depth / 4 * loss_of(predicted))
    loss = sum(token_losses) / 3 + sum(depth_losses) / (1 / 4 + 2 / 4 + 3 / 4 + 1)
    assert_matches(loss, "joint/loss")

    loss.backward()
    for name, parameter in ((key.split("/")[-1], key) for key in recorded() if key.startswith("joint/grad")):
        gradient = model.get_parameter(our_name(name)).grad
        actual = gradient.norm() if parameter.startswith("joint/grad_norm/") else gradient
        expected = recorded()[parameter].reshape(actual.shape)  # tokens have leading axes here
        torch.testing.assert_close(
            actual, expected, atol=1e-5, rtol=1e-4, msg=lambda text, key=parameter: f"{key}: {text}"
        )
