"""The way of a call: resolved once, at its outermost entry, and readable off every output."""

import ast
import pickle
from pathlib import Path

import pytest
import torch
from conftest import MODEL_CLASSES, assert_equal, images
from official import official_model
from PIL import Image
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import adaperceiver
from adaperceiver import (
    AccuracyTable,
    AdaPerceiverBackbone,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverImageClassificationPipeline,
    AdaPerceiverModel,
    AdaptiveConfig,
    OnceForAll,
    image_processor_for,
)


PACKAGE = Path(adaperceiver.__file__).parent
HEADS = [
    AdaPerceiverForImageClassification,
    AdaPerceiverForDistillation,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverForDepthEstimation,
]
every_class = pytest.mark.parametrize("model_class", MODEL_CLASSES)


@pytest.fixture
def resolutions(monkeypatch):
    """One entry for each time that a point is resolved."""
    calls, resolve = [], AdaPerceiverModel.operating_point

    def counted(self, *args, **kwargs):
        calls.append(type(self))
        return resolve(self, *args, **kwargs)

    for model_class in MODEL_CLASSES:
        monkeypatch.setattr(model_class, "operating_point", counted)
    return calls


# ------------------------------------------------------------------------------------------------------ resolved once


@every_class
def test_a_call_is_resolved_once(model_class, tiny_model, resolutions):
    tiny_model(model_class)(images(), tokens=4, adaptive_config=AdaptiveConfig(width=16))
    assert resolutions == [model_class]


def test_a_call_of_a_pipeline_is_resolved_once(tiny_model, resolutions):
    model = tiny_model(AdaPerceiverForImageClassification)
    processor = image_processor_for(model.config, "image-classification")
    pipe = AdaPerceiverImageClassificationPipeline(model=model, image_processor=processor, tokens=4)
    report = pipe(Image.new("RGB", (32, 32)), width=16, report=True)["report"]
    assert resolutions == [AdaPerceiverForImageClassification]
    assert (report["tokens"], report["width"], report["depth"]) == (4, 16, 2)


def test_a_once_for_all_step_resolves_nothing(tiny_model, resolutions):
    model = tiny_model(AdaPerceiverForImageClassification, adaptive_axes=["tokens", "depth", "width"]).train()
    model.adaptive_config = AdaptiveConfig(max_latency_ms=5)  # which cannot be resolved without a profile
    model(images(), labels=torch.tensor([0, 1])).loss.backward()
    assert resolutions == []


@every_class
def test_a_resolved_point_says_what_the_arguments_say(model_class, tiny_model):
    model, pixel_values = tiny_model(model_class), images()
    point = model.operating_point(tokens=6, width=20)
    assert_equal(
        model(pixel_values, operating_point=point).to_tuple(), model(pixel_values, tokens=6, width=20).to_tuple()
    )
    with pytest.raises(TypeError, match="`operating_point` leaves nothing open, got tokens beside it"):
        model(pixel_values, operating_point=point, tokens=6)


# ---------------------------------------------------------------------------------- what every output says of itself


@every_class
def test_every_output_says_where_each_image_ran(model_class, tiny_model):
    model = tiny_model(model_class)
    outputs = model(images(3), tokens=6, width=20)
    assert [point[:3] for point in outputs.operating_points] == [(6, 20, 2)] * 3
    if model_class is not AdaPerceiverBackbone:
        outputs = model(images(3), tokens=[4, 6, 4], depth=[1, 2, 2])
        assert [point[:3] for point in outputs.operating_points] == [(4, 32, 1), (6, 32, 2), (4, 32, 2)]


def test_an_output_says_where_a_budget_led(tiny_model):
    model = tiny_model(AdaPerceiverForSemanticSegmentation)
    budget = model.flops(tokens=6, width=24, depth=2)["total"] / 1e9
    (point,) = model(images(1), max_gflops=budget).operating_points
    assert point == model.operating_point(max_gflops=budget)
    assert point.tokens < 16


@torch.no_grad()
def test_the_depth_of_an_image_that_exited_early_is_that_of_its_exit():
    model = official_model(AdaPerceiverForImageClassification)
    outputs = model(images(3), exit_threshold=[0.0, 1.0, 0.0], exit_after=2)
    assert [point.depth for point in outputs.operating_points] == [2, 4, 2]
    assert [point.depth for point in pickle.loads(pickle.dumps(outputs)).operating_points] == [2, 4, 2]


def test_anytime_predictions_say_what_they_used(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification)
    by_depth = [outputs.operating_points[0][:3] for outputs in model.anytime(images(), tokens=4)]
    assert by_depth == [(4, 32, 1), (4, 32, 2)]
    by_tokens = [outputs.operating_points[0][:3] for outputs in model.anytime(images(), by="tokens", tokens=6)]
    assert by_tokens == [(2, 32, 2), (4, 32, 2), (6, 32, 2)]


@every_class
def test_the_help_of_a_call_has_every_adaptive_argument(model_class):
    text = model_class.forward.__doc__
    for name in ("tokens", "width", "depth", "attention", "exit_threshold", "exit_after", "exit_every"):
        assert name in text
    for name in ("exit_temperatures", "policy", "max_gflops", "max_latency_ms", "adaptive_config", "operating_point"):
        assert f"        {name} (`" in text


# -------------------------------------------------------------------------------------- turning off what is turned on


@torch.no_grad()
def test_false_turns_off_what_a_checkpoint_turns_on():
    model, pixel_values = official_model(AdaPerceiverForImageClassification), images(4)
    full = model(pixel_values).logits
    model.adaptive_config = AdaptiveConfig(exit_threshold=0.0, exit_temperatures=[2.0] * 4, max_gflops=0.005)
    assert model(pixel_values, max_gflops=False).exit_depth.tolist() == [1] * 4
    outputs = model(pixel_values, exit_threshold=False, max_gflops=False)
    assert outputs.exit_depth is None
    assert_equal(outputs.logits, full)
    off = AdaptiveConfig(exit_threshold=False, exit_temperatures=False, max_gflops=False)
    assert model.operating_point(adaptive_config=off) == model.operating_point(**off.to_dict())
    assert model.operating_point(adaptive_config=off).exit_temperatures is None


def test_true_turns_nothing_on():
    for name in ("exit_threshold", "exit_temperatures", "max_gflops", "max_latency_ms"):
        with pytest.raises(ValueError, match=f"`{name}` must be .*got True"):
            AdaptiveConfig(**{name: True})
    with pytest.raises(ValueError, match=r"`tokens` must be .*got False"):
        AdaptiveConfig(tokens=False)


def test_off_survives_saving(tmp_path):
    AdaptiveConfig(exit_threshold=False, tokens=4).save_pretrained(tmp_path)
    assert AdaptiveConfig.from_pretrained(tmp_path) == AdaptiveConfig(exit_threshold=False, tokens=4)


@torch.no_grad()
@pytest.mark.parametrize("model_class", [m for m in MODEL_CLASSES if m not in HEADS[:2]])
def test_a_saved_threshold_means_nothing_without_a_classifier(model_class, tiny_model):
    model, pixel_values = tiny_model(model_class), images()
    expected = model(pixel_values).to_tuple()
    model.adaptive_config = AdaptiveConfig(exit_threshold=0.1)
    assert_equal(model(pixel_values).to_tuple(), expected)
    with pytest.raises(ValueError, match="exit_threshold"):
        model(pixel_values, exit_threshold=0.1)


@torch.no_grad()
def test_a_saved_threshold_means_nothing_where_all_images_run_alike(tiny_model):
    model, pixel_values = tiny_model(AdaPerceiverForImageClassification, router_ratio=0.5), images()
    grid, last = model.logits_grid(pixel_values), list(model.anytime(pixel_values))[-1].logits
    model.adaptive_config = AdaptiveConfig(exit_threshold=0.1, policy="router")
    assert_equal(model.logits_grid(pixel_values), grid)
    assert_equal(list(model.anytime(pixel_values))[-1].logits, last)


@torch.no_grad()
@pytest.mark.parametrize("captured", ["output_hidden_states", "output_attentions"])
def test_a_saved_threshold_or_router_means_nothing_where_states_are_captured(captured, tiny_model):
    model, pixel_values = tiny_model(AdaPerceiverForImageClassification, router_ratio=0.5), images()
    model.set_attn_implementation("eager")
    expected = model(pixel_values, **{captured: True}).to_tuple()
    saved = AdaptiveConfig(exit_threshold=0.1, policy="router")
    model.adaptive_config = saved
    assert_equal(model(pixel_values, **{captured: True}).to_tuple(), expected)
    for asked in ({"exit_threshold": 0.1}, {"policy": "router"}, {"adaptive_config": saved}):
        with pytest.raises(ValueError, match=f"`{captured}` needs all images to run through the same blocks"):
            model(pixel_values, **{captured: True}, **asked)
    model.config.output_hidden_states = True
    assert_equal(model(pixel_values).logits, expected[0])


def test_a_threshold_in_the_config_of_a_call_is_refused_where_all_images_run_alike(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification)
    with pytest.raises(ValueError, match="no `exit_threshold`"):
        model.logits_grid(images(), adaptive_config=AdaptiveConfig(exit_threshold=0.1))


@torch.no_grad()
def test_a_saved_router_means_nothing_to_a_backbone(tiny_model):
    model, pixel_values = tiny_model(AdaPerceiverBackbone, router_ratio=0.5), images()
    expected = model(pixel_values).feature_maps
    model.adaptive_config = AdaptiveConfig(policy="router")
    assert_equal(model(pixel_values).feature_maps, expected)


@pytest.mark.parametrize("labels", [0, 1])
def test_early_exit_needs_two_labels_to_be_unsure_between(labels, tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification, num_labels=labels)
    with pytest.raises(ValueError, match=f"`exit_threshold` needs at least 2 labels, got `num_labels` {labels}"):
        model(images(), exit_threshold=0.9)


# ------------------------------------------------------------------------------------------ values of the wrong kind


@every_class
@pytest.mark.parametrize("kind", ["list", "numpy"])
def test_pixel_values_that_are_no_tensor_are_refused(model_class, kind, tiny_model):
    pixel_values = images().numpy() if kind == "numpy" else images().tolist()
    with pytest.raises(TypeError, match=r"`pixel_values` must be a tensor of shape \(batch, 3, height, width\), got "):
        tiny_model(model_class)(pixel_values)


def test_pixel_values_that_are_no_tensor_are_refused_in_a_once_for_all_step(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification, adaptive_axes=["tokens"]).train()
    with pytest.raises(TypeError, match="`pixel_values` must be a tensor"):
        model(images().tolist(), labels=torch.tensor([0, 1]))


@pytest.mark.parametrize("value", [{}, {"tokens": 4}, "tokens"], ids=str)
def test_an_adaptive_config_of_another_type_is_refused(value, tiny_model, tmp_path):
    model = tiny_model(AdaPerceiverForImageClassification)
    model.save_pretrained(tmp_path)
    processor = image_processor_for(model.config, "image-classification")
    for use in (
        lambda: model(images(), adaptive_config=value),
        lambda: setattr(model, "adaptive_config", value),
        lambda: AdaPerceiverForImageClassification.from_pretrained(tmp_path, adaptive_config=value),
        lambda: AdaPerceiverImageClassificationPipeline(model=model, image_processor=processor, adaptive_config=value),
    ):
        with pytest.raises(
            TypeError, match=f"`adaptive_config` must be an AdaptiveConfig, got .* {type(value).__name__}"
        ):
            use()


@pytest.mark.parametrize("size", [(30, 32), (32, 36), (4, 32), (0, 8), (-8, 8)])
def test_a_cost_of_images_without_whole_patches_is_refused(size, tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification)
    for ask in (model.flops, model.profile, lambda image_size: model.operating_point(image_size, max_gflops=1)):
        with pytest.raises(ValueError, match="`image_size` must be multiples of the patch size 8, got "):
            ask(image_size=size)


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("flops", {"batch_size": -1}, "`batch_size` must be an integer of at least 1, got -1"),
        ("flops", {"tokens": [4, 8]}, r"`tokens` must be one value for `flops`, got \[4, 8\]"),
        ("profile", {"repeats": 0}, "`repeats` must be an integer of at least 1, got 0"),
        ("profile", {"batch_size": 0}, "`batch_size` must be an integer of at least 1, got 0"),
        ("profile", {"depths": [1, 3]}, "`depths` must be an integer from 1 to 2, got 3"),
        ("profile", {"depths": []}, "`depths` must not be empty"),
        ("extract", {"tokens": [1, 2]}, r"`tokens` must be one value for `extract`, got \[1, 2\]"),
        ("extract", {"depth": torch.tensor([1, 2])}, "`depth` must be one value for `extract`, got tensor"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(method, arguments, message, tiny_model):
    with pytest.raises(ValueError, match=message):
        getattr(tiny_model(AdaPerceiverForImageClassification), method)(**arguments)


# --------------------------------------------------------------------------------------- budgets, policies and lists


def test_a_saved_latency_budget_without_a_profile_stops_calls_and_nothing_else(tiny_model):
    model, pixel_values = tiny_model(AdaPerceiverForImageClassification), images()
    flops, labels = model.flops(), torch.tensor([0, 1])
    model.adaptive_config = AdaptiveConfig(max_latency_ms=5)
    message = "`max_latency_ms` needs a latency profile .* turn the budget off with `max_latency_ms=False`"
    for call in (
        lambda: model(pixel_values),
        lambda: model(pixel_values, tokens=4),
        lambda: model.logits_grid(pixel_values),
        lambda: model.extract(),
        lambda: model.flops(max_latency_ms=5),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert model.flops() == flops
    assert model.flops(tokens=4)["total"] < flops["total"]
    small = model.extract(depth=1)
    assert (small.config.num_hidden_layers, small.config.max_latent_tokens) == (1, 16)
    assert model(pixel_values, max_latency_ms=False).operating_point[:3] == (16, 32, 2)
    model.train()(pixel_values, labels=labels).loss.backward()
    with pytest.raises(ValueError, match=message):
        model(pixel_values, labels=labels, max_latency_ms=5)


def test_a_budget_goes_with_lists_and_holds_for_the_largest(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification)
    budget = model.flops(tokens=8, depth=1)["total"] / 1e9
    point = model.operating_point(max_gflops=budget, tokens=[2, 8])
    assert point.tokens == (2, 8)
    assert model.flops(tokens=8, width=point.width, depth=point.depth)["total"] / 1e9 <= budget
    model.accuracy_table = AccuracyTable("made up", [{"tokens": 8, "width": 16, "depth": 1, "value": 0.5}])
    assert model.operating_point(max_gflops=budget, tokens=[2, 8])[:3] == ((2, 8), 16, 1)


@pytest.mark.parametrize("policy", ["router", ["router"], ["router", lambda input_tokens, point: point]])
def test_a_budget_counts_the_router_however_it_is_named(policy, tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification, router_ratio=0.5)
    budget = model.flops(tokens=8, width=24, depth=2)["total"] / 1e9  # without the router
    point = model.operating_point(max_gflops=budget, policy=policy)
    assert model.flops_at(point, None, 1)["total"] / 1e9 <= budget
    assert model.flops_at(point, None, 1)["router"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": -1}, "`depth of the policy` must be an integer from 1 to 2, got -1"),
        ({"width": 99}, "`width of the policy` must be an integer from 1 to 32, got 99"),
        ({"attention": "zzz"}, "`attention of the policy` must be one of .*got 'zzz'"),
        ({"exit_threshold": 7}, "`exit_threshold of the policy` must be a number from 0 to 1, got 7"),
        ({"tokens": (4, 0)}, "`tokens of the policy` must be an integer of at least 1, got 0"),
        ({"tokens": (4,)}, "`tokens` must be one value, or one per image of the batch of 2, got 1 values"),
    ],
)
def test_what_a_policy_returns_is_checked(changes, message, tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification)
    with pytest.raises(ValueError, match=message):
        model(images(), policy=lambda input_tokens, point: point._replace(**changes))


# ------------------------------------------------------------------------------------------------ blocks, in one place


@torch.no_grad()
@pytest.mark.parametrize("borders", [(4,), (1, 2, 3, 4), (3, 4)])
def test_segments_of_blocks_follow_each_other(borders):
    model, pixel_values = official_model(AdaPerceiverForImageClassification).adaperceiver, images()
    point = model.operating_point(tokens=8, width=48)
    input_tokens, _ = model.embed(pixel_values, point, {})
    latents, rope = model.read_latents(input_tokens, point)
    start = 0
    for stop in borders:
        latents, start = model.run_blocks(latents, rope, point, start, stop), stop
    assert_equal(latents, model(pixel_values, operating_point=point).last_hidden_state)


@torch.no_grad()
@pytest.mark.parametrize("model_class", HEADS[:1] + HEADS[2:])
def test_one_grid_serves_all_heads(model_class):
    model, pixel_values = official_model(model_class), images()
    grid = list(model.predictions_grid(pixel_values, [4, 16], width=48, depth=2))
    assert [(depth, tokens) for depth, tokens, _ in grid] == [(1, 4), (1, 16), (2, 4), (2, 16)]
    for depth, tokens, prediction in grid:
        expected = model(pixel_values, tokens=tokens, width=48, depth=depth)[0]
        torch.testing.assert_close(prediction, expected, rtol=0, atol=1e-5)


def test_a_model_without_a_head_has_no_grid(tiny_model):
    with pytest.raises(ValueError, match="AdaPerceiverModel has no head"):
        list(tiny_model(AdaPerceiverModel).predictions_grid(images()))


# ------------------------------------------------------------------------------------- what the host waits for


class Operations(TorchDispatchMode):
    """Lists the operations that run, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


# A value that Python asks for, a result whose size depends on values, a tensor made of Python numbers.
WAITS = ("_local_scalar_dense", "nonzero", "lift_fresh")


@torch.no_grad()
@every_class
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("point", [{}, {"tokens": 6, "width": 24}, {"tokens": 24, "attention": "bidirectional"}])
def test_a_call_never_waits_for_the_device(model_class, batch, point, tiny_model):
    model = tiny_model(model_class)
    with Operations() as operations:
        model(images(batch), **point)
    assert "addmm" in operations.names
    assert not set(WAITS) & set(operations.names)
    model.to("meta")(images(batch).to("meta"), **point)  # tensors without values, which do not mix with others


@torch.no_grad()
@pytest.mark.parametrize(("threshold", "probes"), [(0.0, 1), (1.0, 3), ([0.0, 0.0, 1.0, 1.0], 3)])
def test_early_exit_waits_once_per_probe(threshold, probes):
    model, pixel_values = official_model(AdaPerceiverForImageClassification), images(4)
    with Operations() as operations:
        outputs = model(pixel_values, exit_threshold=threshold)
    assert len(set(outputs.exit_depth.tolist())) == (2 if isinstance(threshold, list) else 1)
    assert operations.names.count("nonzero") == probes
    assert "_local_scalar_dense" not in operations.names
    assert operations.names.count("lift_fresh") == 1  # the thresholds, before the first block


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("model_class", HEADS[1:])  # the distillation model reads out like a classifier, too
def test_every_point_compiles_to_one_graph(model_class, tiny_model):
    model, graphs, pixel_values = tiny_model(model_class), CompileCounter(), images()
    # The counter runs the captured graph as it is: what may break is the capture, and this leaves out minutes of code
    # generation. `fullgraph` turns a graph break into an error.
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=graphs)
    for count, point in enumerate(({}, {"tokens": 6, "width": 23, "depth": 1}), start=1):
        actual, again = compiled(pixel_values, **point)[0], compiled(images(), **point)[0]
        torch.testing.assert_close(actual, model(pixel_values, **point)[0], rtol=1e-5, atol=1e-5)
        assert graphs.frame_count == count
        assert actual.shape == again.shape


# -------------------------------------------------------------------------------------------------- who imports whom


def imports_of(name: str) -> set[str]:
    tree = ast.parse((PACKAGE / f"{name}_adaperceiver.py").read_text())
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1}
    return {module.removesuffix("_adaperceiver") for module in found}


def test_layers_know_nothing_of_training_and_the_config_nothing_of_where_it_runs():
    assert imports_of("layers") == {"configuration"}
    assert imports_of("adaptive") == {"configuration"}
    assert imports_of("loss") == set()
    assert "AdaptiveConfig" not in (PACKAGE / "configuration_adaperceiver.py").read_text()


def test_a_step_leaves_the_adaptive_arguments_to_itself(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification)
    step = OnceForAll(tokens=(4, 16), depth_tokens=(), width=32)
    point = model.operating_point()
    with pytest.raises(TypeError, match="got operating_point beside it"):
        model(images(), labels=torch.tensor([0, 1]), once_for_all=step, operating_point=point)
