"""Policies: fixed, the router, functions and compositions, each image at its own operating point."""

import json
import math
import re

import pytest
import torch
from accelerate import Accelerator
from conftest import TINY, assert_equal, counted_flops, images
from datasets import Image as DatasetImage
from PIL import Image
from transformers import pipeline

from adaperceiver import (
    AdaPerceiverBackbone,
    AdaPerceiverConfig,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverImageClassificationPipeline,
    AdaPerceiverModel,
    AdaptiveConfig,
    OperatingPoint,
)
from adaperceiver.evaluation import calibration, policies
from adaperceiver.training.arguments import RECIPES, as_options, parse


pytest.importorskip("kornia", reason="the training scripts need kornia")
import calibrate
import evaluate_policies
import train_policy

from adaperceiver.training import data
from adaperceiver.training.scenes import scenes


@pytest.fixture
def model(tiny_model):
    """A classifier whose router tells the images of `images(8)` apart."""
    model = tiny_model(AdaPerceiverForImageClassification, router_ratio=0.5)
    torch.nn.init.normal_(model.adaperceiver.router.head.weight, std=5)
    return model


def tokens_of(outputs):
    return [point.tokens for point in outputs.operating_points]


@torch.no_grad()
def chosen(model, pixel_values):
    """What the router says of each image, by hand."""
    logits = model.adaperceiver.router.logits(model.adaperceiver.embeddings(pixel_values))
    return [model.config.token_granularities[index] for index in logits.argmax(dim=1)]


@torch.no_grad()
def test_the_router_runs_each_image_with_the_tokens_it_chose(model):
    pixel_values = images(8)
    tokens = chosen(model, pixel_values)
    assert len(set(tokens)) > 1
    outputs = model(pixel_values, policy="router")
    assert tokens_of(outputs) == tokens
    assert_equal(outputs.logits, model(pixel_values, tokens=tokens).logits)
    one_by_one = torch.cat([model(image[None], policy="router").logits for image in pixel_values])
    torch.testing.assert_close(outputs.logits, one_by_one, rtol=0, atol=1e-5)


@torch.no_grad()
def test_tokens_bound_the_router(model):
    pixel_values = images(8)
    granularities, logits = (
        torch.tensor(model.config.token_granularities),
        model.adaperceiver.router.logits(model.adaperceiver.embeddings(pixel_values)),
    )
    bounded = granularities[logits[:, granularities <= 6].argmax(dim=1)]
    assert tokens_of(model(pixel_values, policy="router", tokens=6)) == bounded.tolist()
    assert tokens_of(model(pixel_values, policy="router", tokens=1)) == [1] * 8  # below the smallest granularity
    bounds = [16, 6] * 4
    both = tokens_of(model(pixel_values, policy="router", tokens=bounds))
    assert all(count <= bound for count, bound in zip(both, bounds))


@torch.no_grad()
def test_the_router_goes_with_early_exit(model):
    pixel_values = images(8)
    routed = model(pixel_values, policy="router", exit_threshold=0.5)
    by_hand = model(pixel_values, tokens=chosen(model, pixel_values), exit_threshold=0.5)
    assert_equal(routed.logits, by_hand.logits)
    assert_equal(routed.exit_depth, by_hand.exit_depth)


@torch.no_grad()
def test_a_policy_may_be_any_function_and_several_follow_each_other(model):
    pixel_values = images(4)

    def bright_images_get_more(input_tokens, point):
        assert input_tokens.shape == (4, 16, 32)
        return point._replace(width=(16, 32, 16, 32))

    outputs = model(pixel_values, policy=["router", bright_images_get_more], depth=1)
    expected = model(pixel_values, tokens=chosen(model, pixel_values), width=[16, 32, 16, 32], depth=1)
    assert_equal(outputs.logits, expected.logits)
    assert_equal(model(pixel_values, policy=lambda input_tokens, point: point).logits, model(pixel_values).logits)


@torch.no_grad()
def test_a_policy_may_let_some_images_leave_early(model):
    pixel_values = images(8)
    thresholds = (0.0, 1.0) * 4

    def every_other(input_tokens, point):
        return point._replace(exit_threshold=thresholds)

    chosen_by_policy = model(pixel_values, policy=every_other)
    asked_for = model(pixel_values, exit_threshold=list(thresholds))
    assert chosen_by_policy.exit_depth.tolist() == [1, 2] * 4
    assert_equal(chosen_by_policy.logits, asked_for.logits)


@torch.no_grad()
def test_fixed_wins_over_a_saved_router(model):
    pixel_values = images(4)
    model.adaptive_config = AdaptiveConfig(policy="router", tokens=8)
    assert max(tokens_of(model(pixel_values))) <= 8
    fixed = model(pixel_values, policy="fixed")
    assert tokens_of(fixed) == [8] * 4
    assert_equal(fixed.logits, model(pixel_values, policy=lambda input_tokens, point: point).logits)


def test_a_router_is_saved_and_loaded_with_its_checkpoint(model, tmp_path):
    pixel_values = images(4)
    model.adaptive_config = AdaptiveConfig(policy="router")
    model.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "adaptive_config.json").read_text()) == {"policy": "router"}
    loaded = AdaPerceiverForImageClassification.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        assert tokens_of(loaded(pixel_values)) == tokens_of(model(pixel_values))
    # A checkpoint without one takes one in: its weights are new, those of all else are the checkpoint's.
    model.adaptive_config = AdaptiveConfig()
    model.config.router_ratio, model.adaperceiver.router = None, None
    model.save_pretrained(tmp_path / "plain")
    with_router, info = AdaPerceiverForImageClassification.from_pretrained(
        tmp_path / "plain", router_ratio=0.25, output_loading_info=True
    )
    assert info["missing_keys"]
    assert all(name.startswith("adaperceiver.router.") for name in info["missing_keys"])
    assert all(parameter.isfinite().all() for parameter in with_router.parameters())


def test_pipelines_report_what_the_router_chose(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    options = {"model": str(tmp_path / "model"), "trust_remote_code": True, "policy": "router"}
    classify = pipeline("image-classification", **options)
    assert type(classify).__name__ == AdaPerceiverImageClassificationPipeline.__name__
    pictures = [Image.effect_noise((32, 32), 100 + 40 * index).convert("RGB") for index in range(6)]
    found = classify(pictures, report=True, batch_size=3)
    pixel_values = classify.image_processor(pictures, return_tensors="pt").pixel_values
    tokens = chosen(classify.model, pixel_values)
    assert [one["report"]["tokens"] for one in found] == tokens
    plain = model.flops(tokens=tokens[0])
    router = model.flops(tokens=tokens[0], policy="router")["router"]
    assert found[0]["report"]["gflops"] == (plain["total"] + router) / 1e9


@pytest.mark.parametrize("model_class", [AdaPerceiverForSemanticSegmentation, AdaPerceiverForDepthEstimation])
@torch.no_grad()
def test_dense_models_route_as_well(model_class, tiny_model):
    model, pixel_values = tiny_model(model_class, router_ratio=0.5), images(4)
    torch.nn.init.normal_(model.adaperceiver.router.head.weight, std=5)
    outputs = model(pixel_values, policy="router")
    tokens = chosen(model, pixel_values)
    assert tokens_of(outputs) == tokens
    assert_equal(outputs[0], model(pixel_values, tokens=tokens)[0])


def test_the_router_is_in_the_count(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification, router_ratio=0.5, attn_implementation="eager")
    extra = model.flops(policy="router")["total"] - model.flops()["total"]
    keep = lambda input_tokens, point: (model.adaperceiver.router(input_tokens, point), point)[1]  # noqa: E731
    pixel_values = images(1)
    counted = counted_flops(model, pixel_values, policy=keep) - counted_flops(model, pixel_values)
    assert extra == counted > 0


@torch.no_grad()
def test_other_image_sizes_route_too(model):
    assert len(tokens_of(model(images(2, 48, 24), policy="router"))) == 2


def test_a_sub_network_has_no_router(model):
    small = model.extract(tokens=8)
    assert small.config.router_ratio is None
    pixel_values = images(2)
    with torch.no_grad():
        torch.testing.assert_close(small(pixel_values).logits, model(pixel_values, tokens=8).logits, rtol=0, atol=1e-5)


def test_what_a_policy_cannot_be_is_named(model, tiny_model):
    with pytest.raises(ValueError, match=r"`policy` must be one of \('fixed', 'router'\)"):
        model(images(), policy="oracle")
    with pytest.raises(ValueError, match=r"must be one of .*got 3"):
        model(images(), policy=["router", 3])
    with pytest.raises(ValueError, match="`policy` must be one of"):
        AdaptiveConfig(policy="best")
    without = tiny_model(AdaPerceiverForImageClassification)
    with pytest.raises(ValueError, match="model without one"):
        without(images(), policy="router")
    with pytest.raises(ValueError, match="model without one"):
        without.adaptive_config = AdaptiveConfig(policy="router")
    with pytest.raises(ValueError, match=r"`router_ratio` must leave at least one hidden unit, got 0\.001"):
        AdaPerceiverConfig(router_ratio=0.001, image_size=28)
    with pytest.raises(ValueError, match="no `policy`"):
        model.logits_grid(images(), policy="router")
    with pytest.raises(ValueError, match="for all images"):
        tiny_model(AdaPerceiverBackbone, router_ratio=0.5)(images(), policy="router")
    with pytest.raises(ValueError, match="`output_attentions` needs all images"):
        tiny_model(AdaPerceiverModel, router_ratio=0.5, attn_implementation="eager")(
            images(), policy="router", output_attentions=True
        )


# --- training: examples/train_policy.py


def test_reinforce_follows_the_gradient_of_the_expected_reward():
    torch.manual_seed(0)
    logits, rewards = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    (exact,) = torch.autograd.grad(train_policy.expected_loss(logits, rewards), logits)
    generator, draws = torch.Generator().manual_seed(0), 40_000
    many = logits.repeat(draws, 1), rewards.repeat(draws, 1)  # the mean over many draws of the same three images
    loss = train_policy.reinforce_loss(*many, lambda reward: torch.tensor(0.3), generator)
    (sampled,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(sampled, exact, rtol=0, atol=0.005)
    assert exact.abs().max() > 0.05


def test_the_advantage_is_each_images_own():
    """Two images whose rewards cancel out: their mean advantage is 0, and yet both must be learned from."""
    logits = torch.zeros(2, 2, requires_grad=True)
    rewards = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    generator = torch.Generator().manual_seed(0)
    loss = train_policy.reinforce_loss(logits, rewards, lambda reward: torch.tensor(0.0), generator)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (gradient.abs() > 0.1).all()


def test_the_baseline_is_a_running_mean_of_rewards(model):
    training = train_policy.RouterTraining(model.adaperceiver.router, decay=0.75)
    assert training.follow(torch.tensor(2.0)) == 2.0
    assert training.follow(torch.tensor(6.0)) == 2.0
    assert training.follow(torch.tensor(0.0)) == 3.0


@pytest.mark.parametrize("method", ["expected", "reinforce"])
def test_a_router_learns_what_each_image_is_worth(method):
    """Bright images need all tokens, dark ones the fewest: it finds out from rewards alone."""
    model = AdaPerceiverForImageClassification(AdaPerceiverConfig(**TINY, router_ratio=1.0))
    router = train_policy.RouterTraining(model.adaperceiver.router, decay=0.9)
    optimizer, generator = torch.optim.Adam(router.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    for _ in range(150):
        bright = torch.randint(0, 2, (32,))
        pixel_values = torch.randn(32, 3, 32, 32) * 0.3 + (2 * bright - 1)[:, None, None, None]
        with torch.no_grad():
            input_tokens = model.adaperceiver.embeddings(pixel_values)
        rewards = torch.zeros(32, 6)
        rewards[bright == 1, -1], rewards[bright == 0, 0] = 1, 1
        logits = router(input_tokens)
        if method == "expected":
            loss = train_policy.expected_loss(logits, rewards)
        else:
            loss = train_policy.reinforce_loss(logits, rewards, router.follow, generator)
        optimizer.zero_grad()
        (loss - 0.01 * train_policy.entropy(logits)).backward()
        optimizer.step()
    choices = router(input_tokens).argmax(dim=1)
    assert ((choices == torch.where(bright == 1, 5, 0)).float().mean()) > 0.9


def policy_arguments(checkpoint, tmp_path, **changes):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{}")
    values = {"model": checkpoint, "output_dir": tmp_path / "run", "steps": 4, "batch_size": 8, "micro_batch_size": 4}
    values |= {"train_samples": 24, "validation_samples": 10, "warmup_steps": 1, "log_steps": 1, "save_steps": 2}
    values |= {"eval_steps": 2, "workers": 0, "tracker": "none", "optimizer": "adamw", "ema_decay": 0.5}
    return [str(recipe), *as_options({**values, **changes})]


@pytest.mark.parametrize("method", ["expected", "reinforce"])
def test_a_run_leaves_a_checkpoint_with_a_router_and_the_backbone_as_it_was(method, tiny_model, tmp_path, monkeypatch):
    plain = tiny_model(AdaPerceiverForImageClassification)
    plain.save_pretrained(tmp_path / "plain", save_code=False)
    passes = []
    original = AdaPerceiverForImageClassification.logits_by_tokens
    monkeypatch.setattr(
        AdaPerceiverForImageClassification,
        "logits_by_tokens",
        lambda self, pixel_values: passes.append(len(pixel_values)) or original(self, pixel_values),
    )
    unseen = method == "expected"
    train_policy.main(policy_arguments(tmp_path / "plain", tmp_path, method=method, unseen=unseen))
    # Each image that is learned from once, each image that is scored once an evaluation.
    assert sum(passes) == (8 + 2 * 2 if unseen else 24 + 2 * 10)

    loaded = AdaPerceiverForImageClassification.from_pretrained(tmp_path / "run" / "final").eval()
    assert loaded.adaptive_config.policy == "router"
    weights = loaded.state_dict()
    for name, weight in plain.state_dict().items():
        assert_equal(weights[name], weight)
    last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert sum(last["share_of_tokens"].values()) == pytest.approx(1)
    costs = [loaded.flops(tokens=int(tokens))["total"] / 1e9 for tokens in last["share_of_tokens"]]
    assert min(costs) < last["gflops"] < max(costs)
    with torch.no_grad():
        assert len(tokens_of(loaded(images(3)))) == 3


def test_the_cross_entropies_are_those_of_separate_calls(model, tmp_path):
    samples = scenes(9)
    dataset = samples.select_columns(["image", "label"]).cast_column("image", DatasetImage(decode=False))

    def view(pictures, labels, seed):
        return {"images": torch.stack(pictures) / 255, "labels": torch.tensor(labels)}

    batches = data.MicroBatches(dataset, 4, view, seed=3)
    losses = train_policy.cross_entropies(model, batches, tmp_path / "losses", Accelerator(cpu=True))
    pixel_values = torch.stack([data.decode(dataset[index]["image"]) for index in range(9)]) / 255
    for column, tokens in enumerate(model.config.token_granularities):
        with torch.no_grad():
            logits = model(pixel_values, tokens=tokens).logits
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(dataset["label"]), reduction="none")
        torch.testing.assert_close(losses[:, column], expected, rtol=0, atol=1e-5)


def test_the_recipe_names_only_known_arguments():
    recipe = RECIPES / "cifar10_policy.yaml"
    assert len(parse(train_policy.GROUPS, [str(recipe)], recipe)) == 1


def test_policies_are_not_trained_on_streams_or_other_classes(tiny_model, tmp_path):
    tiny_model(AdaPerceiverForImageClassification, num_labels=3).save_pretrained(tmp_path / "plain", save_code=False)
    with pytest.raises(ValueError, match="--streaming is not for policies"):
        train_policy.main(policy_arguments(tmp_path / "plain", tmp_path, streaming=True))
    with pytest.raises(ValueError, match=r"scenes has 10 classes, --model .* 3"):
        train_policy.main(policy_arguments(tmp_path / "plain", tmp_path))


# --- the table: examples/evaluate_policies.py


def answers_of(model):
    torch.manual_seed(2)
    batches = [(images(size), torch.randint(0, 10, (size,))) for size in (6, 5)]
    return batches, policies.collect(model, batches, Accelerator(cpu=True))


@pytest.mark.parametrize("rule", [{}, {"exit_temperatures": [3.0, 0.5]}, {"exit_after": 2}], ids=str)
@torch.no_grad()
def test_every_row_is_what_its_call_would_give(rule, model):
    model.adaptive_config = AdaptiveConfig(**rule)
    batches, answers = answers_of(model)
    rows = policies.policy_rows(model, answers, [4, 16], [0.3, 0.5])
    assert rows[-1].policy == "oracle"
    assert len(rows) == 2 + 4 + 1 + 2 + 1
    for row in rows[:-1]:
        correct, costs, depths = [], [], []
        for pixel_values, labels in batches:
            outputs = model(pixel_values, **row.call)
            correct += (outputs.logits.argmax(dim=-1) == labels).tolist()
            tokens = tokens_of(outputs)
            exits = [2] * len(labels) if outputs.exit_depth is None else outputs.exit_depth.tolist()
            point = model.operating_point(**row.call)
            points = [point._replace(tokens=count, depth=depth) for count, depth in zip(tokens, exits)]
            costs += [model.flops_at(one, None, 1)["total"] / 1e9 for one in points]
            depths += exits
        assert row.accuracy == pytest.approx(sum(correct) / 11), row.policy
        assert row.gflops == pytest.approx(sum(costs) / 11, rel=1e-5), row.policy
        if row.exit_depths is not None:
            assert row.exit_depths[1] == pytest.approx(depths.count(1) / 11)


@torch.no_grad()
def test_the_oracle_takes_the_cheapest_point_that_is_right_and_rows_know_the_best_fixed_one(model):
    batches, answers = answers_of(model)
    row = policies.oracle_row(model, answers)
    grid = [
        {"tokens": tokens, "width": width, "depth": depth}
        for tokens in model.config.token_granularities
        for width in model.config.widths
        for depth in (1, 2)
    ]
    cost = {index: model.flops(**point)["total"] / 1e9 for index, point in enumerate(grid)}
    spent, solved, found = [], 0, torch.zeros(len(grid))
    for pixel_values, labels in batches:
        right = [(model(pixel_values, **point).logits.argmax(dim=-1) == labels).tolist() for point in grid]
        for image in range(len(labels)):
            cheapest = [cost[index] for index in cost if right[index][image]]
            spent.append(min(cheapest or cost.values()))
            solved += bool(cheapest)
        found += torch.tensor(right).sum(dim=1)
    assert row.accuracy == pytest.approx(solved / 11)
    assert row.gflops == pytest.approx(sum(spent) / 11, rel=1e-5)
    # It is a policy like others: asked image by image, it gives what it says.
    start, asked = 0, 0
    for pixel_values, labels in batches:
        images_of_batch = slice(start, start + len(labels))
        outputs = model(pixel_values, policy=row.call.policy(images_of_batch))
        asked += int((outputs.logits.argmax(dim=-1) == labels).sum())
        assert tokens_of(outputs) == list(row.call.tokens[images_of_batch])
        start += len(labels)
    costs = [model.flops(tokens=t, width=w, depth=d)["total"] / 1e9 for t, w, d in zip(*row.call)]
    assert asked / 11 == pytest.approx(row.accuracy)
    assert sum(costs) / 11 == pytest.approx(row.gflops, rel=1e-5)
    assert row.tokens == pytest.approx({t: row.call.tokens.count(t) / 11 for t in model.config.token_granularities})
    assert row.exit_depths == pytest.approx({d: row.call.depth.count(d) / 11 for d in (1, 2)})
    for row in policies.policy_rows(model, answers, [4, 16], [0.3]):
        affordable = [found[index].item() / 11 for index in cost if cost[index] <= row.gflops * (1 + 1e-6)]
        assert row.best_fixed == pytest.approx(max(affordable)), row.policy


@pytest.mark.parametrize(
    ("first", "second", "expected"), [(5, 0, 2 / 2**5), (3, 3, 1.0), (0, 0, 1.0), (8, 2, 112 / 1024)]
)
def test_the_paired_test_counts_images_that_one_of_two_gets_right(first, second, expected):
    ours = torch.tensor([True] * first + [False] * second + [True] * 20)
    theirs = torch.tensor([False] * first + [True] * second + [True] * 20)
    assert policies.paired_p_value(ours, theirs) == pytest.approx(expected)


def test_every_step_along_an_axis_is_tested_with_the_others_at_their_largest(model):
    config = model.config
    correct = torch.rand(len(config.widths), 2, len(config.token_granularities), 200) < 0.5
    rows = policies.axis_rows(config, policies.Answers(correct, torch.zeros(()), None))
    steps = [(row["axis"], row["from"], row["to"]) for row in rows]
    assert [step for step in steps if step[0] == "width"] == [("width", 16, 24), ("width", 24, 32), ("width", 16, 32)]
    assert [step for step in steps if step[0] == "depth"] == [("depth", 1, 2)]  # one step is the whole way
    assert len(steps) == 6 + 3 + 1
    row = rows[steps.index(("tokens", 2, 16))]
    assert row["points"] == pytest.approx(
        100 * (correct[-1, -1, -1].float().mean() - correct[-1, -1, 0].float().mean()).item(), abs=1e-4
    )
    assert row["p_value"] == policies.paired_p_value(correct[-1, -1, -1], correct[-1, -1, 0])


def test_the_policy_table_is_printed_written_and_drawn(model, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model", save_code=False)
    options = ["--validation_samples", "12", "--train_samples", "1", "--batch_size", "5", "--timed_images", "6"]
    evaluate_policies.main(["--model", str(tmp_path / "model"), "--output", str(tmp_path / "out"), *options])
    printed = capsys.readouterr()
    assert "100%" in printed.err  # a tick for each timed row
    printed = printed.out
    table = json.loads((tmp_path / "out" / "policies.json").read_text())["rows"]
    assert len(table) == 6 + 6 * 3 + 1 + 3 + 1
    for row in table:
        assert row["policy"] in printed
        assert row["ms_batch_1"] > 0
        assert row["ms_large_batch"] > 0
    assert len((tmp_path / "out" / "policies.csv").read_text().splitlines()) == 1 + len(table)
    axes = json.loads((tmp_path / "out" / "axes.json").read_text())["rows"]
    assert {row["axis"] for row in axes} == {"tokens", "width", "depth"}
    assert (tmp_path / "out" / "policies.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"--tokens must be among .* got \[3\]"):
        evaluate_policies.main(["--model", str(tmp_path / "model"), "--tokens", "3"])


def test_accuracies_are_written_before_anything_is_timed(model, tmp_path, capsys, monkeypatch):
    class Stop(Exception):
        pass

    def stop(*args):
        assert "oracle" in capsys.readouterr().out
        raise Stop

    monkeypatch.setattr(policies, "milliseconds", stop)
    model.save_pretrained(tmp_path / "model", save_code=False)
    options = ["--validation_samples", "6", "--train_samples", "1", "--tokens", "4", "--exit_thresholds", "0.5"]
    with pytest.raises(Stop):
        evaluate_policies.main(["--model", str(tmp_path / "model"), "--output", str(tmp_path / "out"), *options])
    rows = json.loads((tmp_path / "out" / "policies.json").read_text())["rows"]
    assert [row["policy"].split()[0] for row in rows] == ["fixed", "early", "router", "router", "oracle"]
    assert [row["ms_batch_1"] for row in rows] == [None] * 5
    assert (tmp_path / "out" / "policies.png").exists()


@torch.no_grad()
def test_times_are_there_after_the_first_turn(model):
    _, answers = answers_of(model)
    rows = policies.policy_rows(model, answers, [4], [])
    turns = policies.time_rows(model, rows, images(3), batch_size=2, repeats=2)
    assert next(turns) == 1
    assert all(row.ms_batch_1 > 0 and row.ms_large_batch > 0 for row in rows)
    assert list(turns) == [2]


# --- calibration: examples/calibrate.py


def test_a_temperature_is_found_again():
    torch.manual_seed(0)
    logits = 2 * torch.randn(20_000, 5)
    labels = torch.distributions.Categorical(logits=logits).sample()
    assert calibration.fit_temperature(3 * logits, labels) == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("scale", [0.3, 1.0, 6.0])
def test_no_other_temperature_has_less_cross_entropy(scale):
    torch.manual_seed(0)
    logits = torch.randn(300, 5, dtype=torch.float64)
    labels = torch.distributions.Categorical(logits=logits).sample()
    losses = lambda values: [torch.nn.functional.cross_entropy(scale * logits / t, labels).item() for t in values]  # noqa: E731
    (found,) = losses([calibration.fit_temperature(scale * logits, labels)])
    assert found <= min(losses(torch.linspace(0.05, 20, 2000).tolist())) + 1e-9


@pytest.mark.parametrize(("events", "trials"), [(0, 50), (3, 1000), (40, 5000), (49, 50)])
def test_the_bound_is_where_so_few_events_become_unlikely(events, trials):
    bound = calibration.upper_bound(events, trials, 0.95)
    terms = (math.comb(trials, k) * bound**k * (1 - bound) ** (trials - k) for k in range(events + 1))
    assert sum(terms) == pytest.approx(0.05, rel=1e-6)
    assert calibration.upper_bound(trials, trials, 0.95) == 1.0


def test_the_threshold_holds_on_new_images_as_often_as_promised():
    """Images that are lost at threshold t with probability (1 - t) / 10, calibrated on again and again."""
    torch.manual_seed(0)
    point, kept, found = OperatingPoint(tokens=1, width=1, depth=2, attention="block"), 0, []
    for _ in range(60):
        confidence, labels = torch.rand(2000), torch.zeros(2000, dtype=torch.long)
        wrong = torch.rand(2000) < (1 - confidence) / 5
        first = torch.stack([confidence, 1 - confidence], dim=1).clamp(min=1e-6)
        first = torch.where((confidence < 0.5)[:, None], first.flip(1), first)  # the surer of two is the confidence
        first = torch.where(wrong[:, None], first.flip(1), first).log()
        last = torch.tensor([[5.0, -5.0]]).expand(2000, 2)  # the full model is always right
        threshold = calibration.find_threshold(torch.stack([first, last]), labels, point, 0.03, 0.9)
        found.append(threshold)
        # An image leaves if max(c, 1 - c) >= t, and is wrong then with (1 - c) / 5, c uniform.
        grid = torch.linspace(0, 1, 100_001)
        leaves = torch.maximum(grid, 1 - grid) >= threshold
        kept += ((1 - grid) / 5 * leaves).mean().item() <= 0.03
    assert kept >= 0.9 * 60 - 4
    assert min(found) < 0.95  # and it does choose


def test_calibration_saves_a_checkpoint_that_does_so_and_leaves_the_first_alone(model, tmp_path, capsys):
    for parameter in model.parameters():
        parameter.data.mul_(2)
    folder, output = tmp_path / "model", tmp_path / "calibrated"
    model.adaptive_config = AdaptiveConfig(exit_threshold=0.5, exit_every=2)
    model.save_pretrained(folder, save_code=False)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    options = ["--model", str(folder), "--validation_samples", "60", "--train_samples", "1", "--max_drop", "0.3", "--tokens", "8"]  # fmt: skip
    calibrate.main([*options, "--output", str(output)])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    saved = json.loads((output / "adaptive_config.json").read_text())
    assert (saved["tokens"], saved["exit_every"], len(saved["exit_temperatures"])) == (8, 2, 2)
    assert f"exit_threshold {saved['exit_threshold']:.3f}" in capsys.readouterr().out
    loaded, pixel_values = AdaPerceiverForImageClassification.from_pretrained(output).eval(), images(16)
    with torch.no_grad():
        outputs = loaded(pixel_values)
        first = loaded(pixel_values, depth=1, exit_threshold=False).logits / saved["exit_temperatures"][0]
    exits = first.softmax(dim=-1).amax(dim=-1) >= saved["exit_threshold"]
    assert_equal(outputs.exit_depth, torch.where(exits, 1, 2))
    calibrate.main([*options, "--output", str(folder)])  # if it is asked to
    assert json.loads((folder / "adaptive_config.json").read_text()) == saved


@torch.no_grad()
def test_calibration_reports_what_calls_give(model):
    torch.manual_seed(3)
    pixel_values, labels = images(60), torch.randint(0, 10, (60,))
    point = model.operating_point()
    logits, _ = calibration.collect(model, [(pixel_values, labels)], point.tokens, point.width, progress=False)
    found = calibration.calibrate(model, logits, labels, point, max_drop=0.5)
    check = torch.randperm(60, generator=torch.Generator().manual_seed(0))[36:]
    call = {"exit_threshold": found.exit_threshold, "exit_temperatures": found.exit_temperatures}
    outputs = model(pixel_values[check], **call)
    correct = outputs.logits.argmax(dim=-1) == labels[check]
    full = model(pixel_values[check]).logits.argmax(dim=-1) == labels[check]
    assert found.accuracy == pytest.approx(correct.float().mean().item())
    assert found.full_accuracy == pytest.approx(full.float().mean().item())
    assert found.lost == pytest.approx((full & ~correct).float().mean().item())
    assert found.mean_exit_depth == pytest.approx(outputs.exit_depth.float().mean().item())
    early = model.operating_point(**call)
    costs = [model.flops_at(early._replace(depth=at), None, 1)["total"] for at in outputs.exit_depth.tolist()]
    assert found.flops == pytest.approx(sum(costs) / 24 / model.flops()["total"])
    with pytest.raises(ValueError, match="at least 5 images, got 3"):
        calibration.calibrate(model, logits[:, :3], labels[:3], point)


def test_the_calibration_error_is_the_gap_between_confidence_and_accuracy():
    confident = torch.tensor([[9.0, 0.0]]).expand(10, 2)  # confidence 0.9999
    labels = torch.tensor([0] * 7 + [1] * 3)
    assert calibration.expected_calibration_error(confident, labels) == pytest.approx(0.3, abs=1e-3)
    unsure = torch.zeros(10, 2)  # confidence 0.5 of class 0, in another bin
    both = calibration.expected_calibration_error(torch.cat([confident, unsure]), torch.cat([labels, labels]))
    assert both == pytest.approx((0.3 + 0.2) / 2, abs=1e-3)


def test_a_scaled_classifier_says_the_same_with_scores_that_mean_what_they_say(model, tmp_path, capsys):
    for parameter in model.parameters():
        parameter.data.mul_(2)
    model.save_pretrained(tmp_path / "model", save_code=False)
    options = ["--model", str(tmp_path / "model"), "--validation_samples", "60", "--train_samples", "1", "--max_drop", "0.3"]  # fmt: skip
    calibrate.main([*options, "--output", str(tmp_path / "out"), "--scale_classifier", "--no_save_threshold"])
    temperature, before, after = map(
        float, re.search(r"divided by (.+): .+ error (.+)%, now (.+)%", capsys.readouterr().out).groups()
    )
    assert temperature > 1.5
    assert after < before
    loaded, pixel_values = AdaPerceiverForImageClassification.from_pretrained(tmp_path / "out").eval(), images(8)
    assert loaded.adaptive_config.exit_threshold is None
    with torch.no_grad():
        scaled, logits = loaded(pixel_values).logits, model(pixel_values).logits
    torch.testing.assert_close(scaled, logits / temperature, rtol=1e-3, atol=1e-3)


def test_a_bound_that_cannot_be_met_is_said_and_nothing_is_written(model, tmp_path):
    model.save_pretrained(tmp_path / "model", save_code=False)
    options = ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--train_samples", "1"]
    with pytest.raises(ValueError, match=r"No threshold keeps within --max_drop 0\.001.*at least 0\.\d+"):
        calibrate.main([*options, "--validation_samples", "20", "--max_drop", "0.001"])
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"--max_drop must be between 0 and 1, got 2\.0"):
        calibrate.main(["--model", "x", "--max_drop", "2.0"])


def test_temperatures_that_do_not_fit_are_named(model):
    with pytest.raises(ValueError, match="`exit_temperatures` must be a list of 2 numbers, one for each block"):
        model(images(), exit_threshold=0.5, exit_temperatures=[1.0])
    with pytest.raises(ValueError, match=r"`exit_temperatures\[1\]` must be a number"):
        model(images(), exit_threshold=0.5, exit_temperatures=[1.0, -1.0])
