"""Early exit, choices per image, budgets, costs, anytime prediction and sub-networks: fast paths against plain ones."""

import copy
import json
from itertools import product

import peft
import pytest
import torch
from conftest import assert_close, counted_flops
from official import CONFIG, official_classifier, official_model, recorded

from adaperceiver import (
    AccuracyTable,
    AdaPerceiverBackbone,
    AdaPerceiverConfig,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverModel,
    AdaptiveConfig,
    LatencyProfile,
)
from adaperceiver.layers_adaperceiver import prefix_pool, rotary_embedding


GRID = list(product(CONFIG.token_granularities, CONFIG.widths, range(1, CONFIG.num_hidden_layers + 1)))
FULL = {"tokens": 16, "width": 64, "depth": 4}


@pytest.fixture
def images() -> torch.Tensor:
    """Nine images; the first two are those of the official recording."""
    return torch.cat([recorded()["input/x"], torch.randn(7, 3, 32, 32)])


def confidences(model, images, **point) -> torch.Tensor:
    """(depths, batch): the largest class probability after each block, from plain runs."""
    depths = range(1, model.config.num_hidden_layers + 1)
    logits = torch.stack([model(images, depth=depth, **point).logits for depth in depths])
    return logits.softmax(-1).amax(-1)


# --- the folded readout


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 4, 16, 24])
@pytest.mark.parametrize("biases", [True, False])
def test_the_folded_readout_equals_the_plain_one(tokens, biases):
    model = official_model(AdaPerceiverForImageClassification).adaperceiver
    if not biases:
        model = AdaPerceiverModel(AdaPerceiverConfig.from_dict({**CONFIG.to_dict(), "qkv_bias": False})).eval()
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    rope = rotary_embedding(CONFIG, tokens, torch.device("cpu"))
    readout = model.class_readout
    for images in (1, 3):
        latents = torch.randn(images, tokens, 64)
        plain = readout.write(readout.output_token, latents, source_rope=rope)
        assert_close(readout(latents, rope), plain)
        assert_close(readout(latents, rope, readout.fold(rope)), plain)


def test_the_folded_query_follows_every_change_of_the_weights(images):
    model = official_model(AdaPerceiverForImageClassification)
    rope = rotary_embedding(CONFIG, 16, torch.device("cpu"))

    def plain_equals_folded() -> None:
        readout, latents = model.adaperceiver.class_readout, torch.randn(2, 16, 64, dtype=model.dtype)
        tolerance = 5e-6 if model.dtype == torch.float32 else 0.05
        assert_close(readout(latents, rope), readout.write(readout.output_token, latents, source_rope=rope), tolerance)

    names = set(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(images, labels=torch.zeros(9, dtype=torch.long)).loss.backward()
    optimizer.step()
    plain_equals_folded()
    model.load_state_dict({name: tensor * 1.1 for name, tensor in model.state_dict().items()})
    plain_equals_folded()
    model.to(torch.bfloat16)
    plain_equals_folded()
    model.to(torch.float32)
    plain_equals_folded()
    assert set(model.state_dict()) == names


def test_readouts_of_all_prefixes_come_from_one_pass():
    scores, source = 30 * torch.randn(2, 4, 16), torch.randn(2, 16, 8)  # far apart, so that the maximum matters
    prefixes = [1, 4, 8, 16]
    expected = [scores[..., :stop].softmax(-1) @ source[:, :stop] for stop in prefixes]
    assert_close(prefix_pool(scores, source, prefixes), torch.stack(expected, dim=1))


def test_the_gradient_of_the_prefix_readout_is_that_of_a_softmax():
    scores = torch.randn(2, 4, 16, dtype=torch.float32, requires_grad=True)
    source = torch.randn(2, 16, 8, requires_grad=True)
    prefixes = [4, 8, 16]
    fast = torch.autograd.grad(prefix_pool(scores, source, prefixes).square().sum(), (scores, source))
    plain = torch.stack([scores[..., :stop].softmax(-1) @ source[:, :stop] for stop in prefixes])
    for ours, expected in zip(fast, torch.autograd.grad(plain.square().sum(), (scores, source))):
        assert_close(ours, expected, 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("granularities", [None, [4, 16], [8], [4, 13]])
def test_logits_of_all_granularities_equal_separate_runs(images, granularities):
    model = official_classifier()
    together = model.logits_by_tokens(images, granularities, width=48, depth=3)
    alone = [model(images, tokens=t, width=48, depth=3).logits for t in granularities or CONFIG.token_granularities]
    assert_close(together, torch.stack(alone))


@pytest.mark.parametrize("granularities", [[], [8, 4], [4, 4], [6, 16], [0], [16, 32]])
def test_granularities_that_do_not_nest_are_refused(images, granularities):
    with pytest.raises(ValueError, match="granularities"):
        official_classifier().logits_by_tokens(images, granularities)


# --- early exit


@torch.no_grad()
@pytest.mark.parametrize("threshold", [0.0, 0.25, 0.3, 0.35, 1.0])
@pytest.mark.parametrize("point", [{}, {"tokens": 8, "width": 32}, {"depth": 3}])
def test_an_image_leaves_where_its_own_confidence_reaches_the_threshold(images, threshold, point):
    model, depth = official_classifier(), point.get("depth", 4)
    outputs = model(images, exit_threshold=threshold, **point)
    others = {name: value for name, value in point.items() if name != "depth"}
    reached = confidences(model, images, **others)[: depth - 1] >= threshold
    expected = torch.where(reached.any(0), reached.int().argmax(0) + 1, depth)
    assert torch.equal(outputs.exit_depth, expected)
    for index, exit_depth in enumerate(expected.tolist()):
        alone = model(images[index : index + 1], depth=exit_depth, **others).logits[0]
        assert_close(outputs.logits[index], alone)


@torch.no_grad()
def test_the_official_mean_confidences_are_ours(images):
    model = official_classifier()
    assert_close(confidences(model, images[:2]).mean(1), recorded()["cls_exit/mean_confidence_t16"].flatten(), 1e-5)


@torch.no_grad()
def test_early_exit_is_the_same_alone_and_in_any_batch(images):
    model = official_classifier()
    threshold = 0.35
    together = model(images, exit_threshold=threshold)
    assert len(together.exit_depth.unique()) > 1  # or the test shows nothing
    for order in (torch.arange(9), torch.randperm(9)[:4]):
        shuffled = model(images[order], exit_threshold=threshold)
        assert torch.equal(shuffled.exit_depth, together.exit_depth[order])
        assert_close(shuffled.logits, together.logits[order])
    for index in range(9):
        alone = model(images[index : index + 1], exit_threshold=threshold)
        assert alone.exit_depth.item() == together.exit_depth[index].item()


@torch.no_grad()
@pytest.mark.parametrize(
    ("after", "every", "allowed"), [(1, 1, {1, 2, 3, 4}), (2, 1, {2, 3, 4}), (1, 2, {1, 3, 4}), (3, 5, {3, 4})]
)
def test_images_leave_only_where_they_are_probed(images, after, every, allowed):
    model = official_classifier()
    depths = set()
    for threshold in (0.0, 0.25, 0.3, 0.35, 0.4):
        depths |= set(model(images, exit_threshold=threshold, exit_after=after, exit_every=every).exit_depth.tolist())
    assert depths <= allowed
    assert min(allowed) in depths


@torch.no_grad()
def test_those_who_left_are_not_computed_any_more(images):
    model, rows = official_model(AdaPerceiverForImageClassification), []
    for layer in model.adaperceiver.layers:
        layer.register_forward_hook(lambda _, __, output: rows.append(len(output)))
    # a threshold per image forces the pattern: three leave after block 1, four after block 2, two run through
    thresholds = [0.0] * 3 + [1.0] * 6
    outputs = model(images, exit_threshold=thresholds)
    assert rows == [9, 6, 6, 6]
    assert outputs.exit_depth.tolist() == [1] * 3 + [4] * 6


@torch.no_grad()
def test_a_large_batch_is_not_copied_for_one_image_that_leaves_at_the_end():
    model, rows = official_model(AdaPerceiverForImageClassification), []
    for layer in model.adaperceiver.layers:
        layer.register_forward_hook(lambda _, __, output: rows.append(len(output)))
    images = torch.randn(80, 3, 32, 32)
    outputs = model(images, exit_threshold=[0.0] + [1.0] * 79, exit_after=3)
    assert rows == [80, 80, 80, 80]
    assert outputs.exit_depth.tolist() == [3] + [4] * 79
    assert_close(outputs.logits[:1], model(images[:1], depth=3).logits)


@pytest.mark.parametrize(
    "model_class", [AdaPerceiverModel, AdaPerceiverForSemanticSegmentation, AdaPerceiverForDepthEstimation]
)
def test_early_exit_needs_a_classifier(tiny_config, model_class):
    with pytest.raises(ValueError, match="exit_threshold"):
        model_class(tiny_config)(torch.randn(1, 3, 32, 32), exit_threshold=0.5)


@torch.no_grad()
def test_the_distillation_model_exits_early_with_its_features(images):
    model = official_model(AdaPerceiverForDistillation)
    outputs = model(images, exit_threshold=0.3)
    for index, depth in enumerate(outputs.exit_depth.tolist()):
        alone = model(images[index : index + 1], depth=depth)
        assert_close(outputs.logits[index], alone.logits[0])
        assert_close(outputs.features[index], alone.features[0])


@torch.no_grad()
def test_hidden_states_come_with_widths_per_image_but_not_when_images_part(images):
    model = official_classifier()
    together = model(images[:2], width=[32, 64], output_hidden_states=True).hidden_states
    for index, width in enumerate((32, 64)):
        alone = model(images[index : index + 1], width=width, output_hidden_states=True).hidden_states
        assert len(together) == len(alone) == 5
        for ours, expected in zip(together, alone):
            assert_close(ours[index], expected[0])
    for point in ({"exit_threshold": 0.5}, {"tokens": [4] * 8 + [8]}):
        with pytest.raises(ValueError, match="output_hidden_states"):
            model(images, output_hidden_states=True, **point)


def test_widths_per_image_and_early_exit_go_together_in_training_too(images):
    model = official_model(AdaPerceiverForImageClassification).train()
    widths = [32, 48, 64] * 3
    together = model(images, width=widths, exit_threshold=0.35)
    assert len(together.exit_depth.unique()) > 1
    for index, width in enumerate(widths):
        alone = model(images[index : index + 1], width=width, exit_threshold=0.35)
        assert together.exit_depth[index] == alone.exit_depth[0]
        assert_close(together.logits[index], alone.logits[0])


# --- choices per image


@torch.no_grad()
@pytest.mark.parametrize(
    "model_class",
    [AdaPerceiverForImageClassification, AdaPerceiverForSemanticSegmentation, AdaPerceiverForDepthEstimation],
)
def test_images_at_their_own_points_equal_runs_one_by_one(images, model_class):
    model = official_model(model_class)
    points = [GRID[index] for index in torch.randint(len(GRID), (9,)).tolist()]
    points[3] = points[0]  # at least one group of two
    tokens, width, depth = map(list, zip(*points))
    together = model(images, tokens=torch.tensor(tokens), width=width, depth=depth)[0]
    for index, (t, w, d) in enumerate(points):
        assert_close(together[index], model(images[index : index + 1], tokens=t, width=w, depth=d)[0][0], 1e-5)


@torch.no_grad()
def test_every_group_runs_at_its_own_cost(images):
    model = official_model(AdaPerceiverForImageClassification).adaperceiver
    model.set_attn_implementation("eager")

    together = counted_flops(model, images, tokens=[4] * 4 + [16] * 5, depth=[2] * 4 + [4] * 5)
    apart = counted_flops(model, images[:4], tokens=4, depth=2) + counted_flops(model, images[4:], tokens=16, depth=4)
    assert together == apart


@torch.no_grad()
def test_latents_of_fewer_tokens_are_padded_with_zeros(images):
    model = official_classifier().adaperceiver
    outputs = model(images[:2], tokens=[4, 16])
    assert outputs.last_hidden_state.shape == (2, 16, 64)
    assert_close(outputs.last_hidden_state[:1, :4], model(images[:1], tokens=4).last_hidden_state)
    assert (outputs.last_hidden_state[0, 4:] == 0).all()


@torch.no_grad()
def test_tokens_per_image_and_early_exit_go_together(images):
    model, tokens = official_classifier(), [4, 8, 16] * 3
    together = model(images, tokens=tokens, exit_threshold=0.3)
    for index, count in enumerate(tokens):
        alone = model(images[index : index + 1], tokens=count, exit_threshold=0.3)
        assert together.exit_depth[index] == alone.exit_depth[0]
        assert_close(together.logits[index], alone.logits[0])


@pytest.mark.parametrize("point", [{"tokens": [4, 8]}, {"width": [32]}, {"depth": torch.ones(3, dtype=torch.long)}])
def test_a_list_of_another_length_than_the_batch_is_refused(images, point):
    name = next(iter(point))
    with pytest.raises(ValueError, match=f"`{name}` .*batch of 9"):
        official_classifier()(images, **point)


def test_a_bad_value_in_a_list_is_named_with_its_place(images):
    with pytest.raises(ValueError, match=r"`width\[2\]` .* from 1 to 64, got 65"):
        official_classifier()(images, width=[32, 64, 65] + [64] * 6)


# --- cost


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "model_class",
    [
        AdaPerceiverForImageClassification,
        AdaPerceiverForDistillation,
        AdaPerceiverForSemanticSegmentation,
        AdaPerceiverForDepthEstimation,
    ],
)
def test_the_cost_model_agrees_with_the_flop_counter_at_every_operating_point(model_class):
    model = official_model(model_class)
    model.set_attn_implementation("eager")  # torch does not count its fused attention on CPU
    points = [dict(zip(("tokens", "width", "depth"), point)) for point in GRID]
    points += [{"tokens": 6}, {"tokens": 24}, {"width": 41}, {"attention": "bidirectional"}]
    for point in points:
        for size, batch in (((32, 32), 1), ((24, 40), 3)):
            counted = counted_flops(model, torch.randn(batch, 3, *size), **point)
            predicted = model.flops(image_size=size, batch_size=batch, **point)
            assert abs(predicted["total"] / counted - 1) < 0.01, (point, size, predicted)


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {"use_embed_ffn": False},
        {"use_swiglu_ffn": True},
        {"qkv_bias": False},
        {"stem_layers": [[6, 1], [8, 2], [10, 4]]},
        {"stem_layers": [[6, 2, 3, 0], [8, 1, 3, 1], [8, 2, 5, 4], [8, 1, 3, 6], [10, 2]]},
    ],
)
def test_the_cost_model_knows_the_variants(tiny_config, changes):
    model = AdaPerceiverForImageClassification(
        AdaPerceiverConfig.from_dict({**tiny_config.to_dict(), **changes})
    ).eval()
    model.set_attn_implementation("eager")
    counted = counted_flops(model, torch.randn(2, 3, 32, 32), width=16)
    assert abs(model.flops(width=16, batch_size=2)["total"] / counted - 1) < 0.01


@torch.no_grad()
def test_probes_are_counted(images):
    model = official_model(AdaPerceiverForImageClassification)
    model.set_attn_implementation("eager")
    counted = counted_flops(model, images, exit_threshold=1.0)
    predicted = model.flops(exit_threshold=1.0, batch_size=9)
    assert predicted["probes"] > 0
    assert abs(predicted["total"] / counted - 1) < 0.01


def test_the_papers_model_costs_what_it_should():
    """
    At 224 pixels and 256 tokens the network takes 76 GFLOPs as it is written down, and less where what all images (or
    all latents) share is computed once. A probe costs a fiftieth of a plain readout.
    """
    with torch.device("meta"):
        model = AdaPerceiverForImageClassification(AdaPerceiverConfig(num_labels=1000))
    assert 74e9 < model.flops()["total"] < 75e9
    plain_readout = 2 * 256 * 2 * 832**2  # keys and values of every latent
    assert 45 < plain_readout / (model.flops(exit_threshold=1.0)["probes"] / 20) < 55


@torch.no_grad()
def test_the_cost_of_a_backbone_counts_its_stages(tiny_config):
    for features in (["stem"], ["stage1"], ["stage2"], ["stem", "stage1", "stage2"]):
        tiny_config.out_features = features
        model = AdaPerceiverBackbone(tiny_config).eval()
        model.set_attn_implementation("eager")
        counted = counted_flops(model, torch.randn(2, 3, 32, 32), tokens=8)
        assert abs(model.flops(batch_size=2, tokens=8)["total"] / counted - 1) < 0.01


# --- budgets


@torch.no_grad()
def test_a_budget_picks_the_best_affordable_point(images):
    model = official_classifier()
    costs = {point: model.flops(**dict(zip(FULL, point)))["total"] / 1e9 for point in GRID}
    for budget in (*sorted(costs.values())[::7], 1.0):
        affordable = [point for point, cost in costs.items() if cost <= budget]
        tokens, width, depth = max(affordable, key=lambda point: (point[2], point[1], point[0]))
        chosen = model.operating_point(max_gflops=budget)
        assert (chosen.tokens, chosen.width, chosen.depth) == (tokens, width, depth)
        expected = model(images, tokens=tokens, width=width, depth=depth).logits
        assert torch.equal(model(images, max_gflops=budget).logits, expected)


def test_what_is_given_beside_a_budget_stays():
    model = official_classifier()
    assert model.operating_point(max_gflops=1.0, tokens=4)[:3] == (4, 64, 4)
    assert model.operating_point(max_gflops=1.0, tokens=6, width=40)[:3] == (6, 40, 4)


def test_a_saved_budget_gives_way_to_a_point_that_is_spelled_out(images):
    model = official_model(AdaPerceiverForImageClassification)
    model.adaptive_config = AdaptiveConfig(max_gflops=1e-6, max_latency_ms=1e-6)
    with pytest.raises(ValueError, match="`max_latency_ms` needs a latency profile"):
        model(images)
    with pytest.raises(ValueError, match="`max_latency_ms` needs a latency profile"):
        model(images, tokens=4)
    assert model.operating_point(**FULL)[:3] == (16, 64, 4)
    model.profile(repeats=1, progress=False)  # measures in spite of it


def test_an_unreachable_budget_says_what_the_cheapest_costs(images):
    model = official_classifier()
    cheapest = model.flops(tokens=4, width=32, depth=1)["total"] / 1e9
    with pytest.raises(
        ValueError, match=f"`max_gflops` must be at least {cheapest:.4g}, .*tokens=4, width=32, depth=1"
    ):
        model(images, max_gflops=0.9 * cheapest)
    with pytest.raises(ValueError, match="tokens=16, width=64, depth=4"):
        model(images, max_gflops=0.9 * cheapest, **FULL)


def test_an_accuracy_table_decides_where_there_is_one(images, tmp_path):
    model = official_model(AdaPerceiverForImageClassification)
    points = [
        {"tokens": 4, "width": 64, "depth": 4, "value": 0.9},
        {"tokens": 16, "width": 64, "depth": 4, "value": 0.8},
    ]
    model.accuracy_table = AccuracyTable(metric="made up", points=points)
    assert model.operating_point(max_gflops=1.0)[:3] == (4, 64, 4)
    assert model.operating_point(max_gflops=1.0, tokens=16)[:3] == (16, 64, 4)
    model.save_pretrained(tmp_path)
    loaded = AdaPerceiverForImageClassification.from_pretrained(tmp_path)
    assert loaded.accuracy_table == model.accuracy_table
    model.accuracy_table.higher_is_better = False
    assert model.operating_point(max_gflops=1.0)[:3] == (16, 64, 4)
    (tmp_path / "accuracy_table.json").write_text('{"metric": "x", "points": [{"tokens": 4}]}')
    with pytest.raises(ValueError, match=r"accuracy_table\.json .*width"):
        AdaPerceiverForImageClassification.from_pretrained(tmp_path)


def test_a_latency_budget_goes_by_the_measured_profile(images, tmp_path):
    model = official_model(AdaPerceiverForImageClassification)
    with pytest.raises(ValueError, match=r"model\.profile"):
        model(images, max_latency_ms=10)
    profile = model.profile(batch_size=9, repeats=1, progress=False)
    assert len(profile.points) == 3 * 3 * 3  # tokens x widths x (first, middle and last depth)
    profile.save(tmp_path / "profile.json")
    model.latency_profile = LatencyProfile.load(tmp_path / "profile.json")
    assert model.latency_profile == profile

    for point in profile.points:  # times that are easy to reason about
        point["ms"] = point["tokens"] * point["depth"] + point["width"]
    model.latency_profile = profile
    assert profile.milliseconds(tokens=8, width=32, depth=3) == 8 * 3 + 32  # between two measured depths
    chosen = model.operating_point(batch_size=9, max_latency_ms=16 * 4 + 48)
    assert (chosen.tokens, chosen.width, chosen.depth) == (8, 64, 4)
    assert torch.equal(model(images, max_latency_ms=112).logits, model(images, tokens=8).logits)
    with pytest.raises(ValueError, match="`max_latency_ms` must be at least 36"):
        model(images, max_latency_ms=1)
    with pytest.raises(ValueError, match="for batch_size 2, but the one at hand is for 9"):
        model(images[:2], max_latency_ms=100)


@pytest.mark.parametrize("name", ["machine", "device", "dtype", "threads"])
def test_a_profile_of_other_conditions_is_refused(images, name):
    model = official_model(AdaPerceiverForImageClassification)
    profile = model.profile(batch_size=9, depths=[4], repeats=1, progress=False)
    here, elsewhere = getattr(profile, name), 99 if name == "threads" else "elsewhere"
    model(images, max_latency_ms=1e9)
    setattr(profile, name, elsewhere)
    with pytest.raises(
        ValueError, match=f"`max_latency_ms` needs a profile for {name} .* is for {elsewhere!r}"
    ) as error:
        model(images, max_latency_ms=1e9)
    assert f"{name} {here!r}," in str(error.value)


def test_what_a_profile_did_not_measure_is_not_affordable(images):
    model = official_model(AdaPerceiverForImageClassification)
    model.profile(batch_size=9, depths=[1], repeats=1, progress=False)
    assert model.operating_point(batch_size=9, max_latency_ms=1e9)[:3] == (16, 64, 1)
    assert model.operating_point(batch_size=9, max_latency_ms=1e9, tokens=8)[:3] == (8, 64, 1)
    with pytest.raises(ValueError, match=r"profile has no tokens=4, width=32, depth=2; .* and depths 1 to 1"):
        model.operating_point(batch_size=9, max_latency_ms=1e9, depth=2)
    with pytest.raises(ValueError, match=r"profile has no tokens=5, .*; it has \(tokens, width\) in"):
        model.operating_point(batch_size=9, max_latency_ms=1e9, tokens=5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "0.9"], ids=str)
def test_a_score_that_is_no_number_is_refused(value, tmp_path):
    points = [{"tokens": 4, "width": 64, "depth": 4, "value": value}]
    with pytest.raises(ValueError, match=f"`points` must have finite numbers as values, got .*{value}"):
        AccuracyTable("made up", points)
    (tmp_path / "accuracy_table.json").write_text(json.dumps({"metric": "made up", "points": points}))
    with pytest.raises(ValueError, match=r"accuracy_table\.json is not a valid AccuracyTable: `points`"):
        AccuracyTable.from_pretrained(tmp_path)


# --- anytime


@torch.no_grad()
def test_anytime_by_depth_yields_what_each_depth_would_say(images):
    model = official_classifier()
    predictions = list(model.anytime(images, tokens=8, width=48))
    assert len(predictions) == 4
    for depth, outputs in enumerate(predictions, start=1):
        assert_close(outputs.logits, model(images, tokens=8, width=48, depth=depth).logits)


@torch.no_grad()
def test_anytime_by_tokens_yields_what_each_granularity_would_say(images):
    model = official_classifier()
    predictions = list(model.anytime(images, by="tokens", width=48, depth=3))
    assert len(predictions) == 3
    for tokens, outputs in zip(CONFIG.token_granularities, predictions):
        assert_close(outputs.logits, model(images, tokens=tokens, width=48, depth=3).logits)


def test_methods_that_run_all_images_alike_refuse_what_parts_them(images):
    model = official_classifier()
    for point in ({"exit_threshold": 0.5}, {"tokens": [4] * 9}):
        with pytest.raises(ValueError, match="one operating point"):
            next(model.anytime(images, **point))
    with pytest.raises(TypeError, match="`tokens`"):
        model.logits_by_tokens(images, tokens=8)
    with pytest.raises(TypeError, match="operating_point"):
        model.adaperceiver(images, operating_point=model.operating_point(), tokens=8)


@torch.no_grad()
def test_anytime_runs_no_further_than_it_is_asked(images):
    model, calls = official_model(AdaPerceiverForImageClassification), []
    for layer in model.adaperceiver.layers:
        layer.register_forward_hook(lambda _, __, output: calls.append(output.shape[1]))
    next(model.anytime(images))
    assert calls == [16]
    steps = model.anytime(images, by="tokens")
    calls.clear()
    next(steps)
    next(steps)
    assert calls == [4] * 4 + [4] * 4  # the second step runs latents 4 to 8 only


# --- sub-networks


@torch.no_grad()
@pytest.mark.parametrize(
    "point", [FULL, {"tokens": 8, "width": 48, "depth": 3}, {"tokens": 6, "width": 41, "depth": 1}, {"tokens": 24}]
)
@pytest.mark.parametrize(
    "model_class",
    [
        AdaPerceiverForImageClassification,
        AdaPerceiverForDistillation,
        AdaPerceiverForSemanticSegmentation,
        AdaPerceiverForDepthEstimation,
    ],
)
def test_a_sub_network_equals_its_parent_at_that_point(images, model_class, point, tmp_path):
    model = official_model(model_class)
    before = copy.deepcopy(model.state_dict())
    small = model.extract(**point)
    assert_close(small(images)[0], model(images, **point)[0])
    small.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    assert_close(loaded(images)[0], small(images)[0])
    if "width" in point and point != FULL:
        assert small.num_parameters() < model.num_parameters()
    for parameter in small.parameters():  # its weights are its own
        parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_a_sub_network_adapts_within_what_it_kept(images):
    model = official_classifier()
    small = model.extract(tokens=8, width=48, depth=3)
    assert small.config.token_granularities == [4, 8]
    assert small.config.widths == [32, 48]
    assert_close(small(images, tokens=4, width=32, depth=2).logits, model(images, tokens=4, width=32, depth=2).logits)
    with pytest.raises(ValueError, match=r"`width` .* 1 to 48, got 64"):
        small(images, width=64)
    with pytest.raises(ValueError, match=r"`depth` .* 1 to 3, got 4"):
        small(images, depth=4)


def test_a_backbone_can_be_cut_too(tiny_config):
    small = AdaPerceiverBackbone(tiny_config).extract(depth=1)
    assert small.stage_names == ["stem", "stage1"]
    assert small(torch.randn(1, 3, 32, 32)).feature_maps[0].shape == (1, 32, 4, 4)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 3, 5, 8, 12])
def test_a_sub_network_keeps_the_borders_of_the_block_mask(tokens, tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification, token_granularities=[2, 4], max_latent_tokens=8)
    pixel_values = torch.randn(2, 3, 32, 32)
    assert_close(model.extract(tokens=tokens)(pixel_values).logits, model(pixel_values, tokens=tokens).logits)


def test_a_model_under_an_adapter_must_be_merged_to_be_cut(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["fc2"], init_lora_weights=False))
    with pytest.raises(ValueError, match=r"`extract` needs plain weights, got none for .*fc2.*: merge adapters first"):
        adapted.extract(depth=1)
    merged = adapted.merge_and_unload()
    assert merged.extract(depth=1).config.num_hidden_layers == 1
