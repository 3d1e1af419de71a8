"""Once-for-all training: one pass gives the losses and gradients of a loop over all configurations."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import TINY, images
from official import official_model, recorded

from adaperceiver import (
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    OnceForAll,
)
from adaperceiver.official_adaperceiver import our_name
from adaperceiver.once_for_all_adaperceiver import sum_in_turn


STEP = OnceForAll(tokens=(2, 4, 16), depth_tokens=(4, 12), width=(32, 16, 24, 16))
TARGETS = {
    AdaPerceiverForImageClassification: [{"labels"}, {"teacher_logits"}, {"labels", "teacher_logits"}],
    AdaPerceiverForDistillation: [{"teacher_features"}, {"labels", "teacher_logits", "teacher_features"}],
    AdaPerceiverForSemanticSegmentation: [{"labels"}],
    AdaPerceiverForDepthEstimation: [{"labels"}],
}
CASES = [(model_class, names) for model_class, choices in TARGETS.items() for names in choices]


def targets_of(model, names):
    torch.manual_seed(1)
    maps = {AdaPerceiverForSemanticSegmentation: torch.randint(0, 10, (4, 32, 32))}
    maps[AdaPerceiverForDepthEstimation] = torch.rand(4, 32, 32) * 9 + 0.5
    targets = {
        "labels": maps.get(type(model), torch.randint(0, 10, (4,))),
        "teacher_logits": torch.randn(4, 10),
        "teacher_features": torch.randn(4, 16, 24),
    }
    return {name: targets[name] for name in names}


def naive_loss(model, pixel_values, targets, step):
    """The definition: every configuration on its own."""

    def loss_at(depth, tokens, **given):
        return model(pixel_values, tokens=tokens, depth=depth, width=step.width, **given).loss

    layers, total = model.config.num_hidden_layers, 0.0
    for names, normalized in (({"labels", "teacher_logits"}, True), ({"teacher_features"}, False)):
        given = {name: targets[name] for name in targets.keys() & names}
        if given:
            token_losses = [loss_at(layers, tokens, **given) for tokens in step.tokens]
            depth_losses = [
                depth / layers * loss_at(depth, tokens, **given)
                for depth, tokens in enumerate(step.depth_tokens, start=1)
            ]
            weights = sum(depth / layers for depth in range(1, len(depth_losses) + 1))
            total = total + sum(token_losses) / (len(token_losses) if normalized else 1)
            if depth_losses:
                total = total + sum(depth_losses) / (weights if normalized else 1)
    return total


def gradients(model, loss):
    """By parameter; zeros where there is none."""
    model.zero_grad()
    loss.backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }


def assert_same_gradients(actual, expected):
    """To 1e-5 of the largest entry of each."""
    for name, gradient in expected.items():
        scale = gradient.abs().max().clamp(min=1)
        torch.testing.assert_close(
            actual[name] / scale, gradient / scale, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(("model_class", "names"), CASES)
@pytest.mark.parametrize("step", [STEP, STEP._replace(depth_tokens=()), STEP._replace(width=24)], ids=range(3))
def test_one_pass_gives_the_loss_and_gradients_of_the_loop_over_configurations(model_class, names, step, tiny_model):
    model, pixel_values = tiny_model(model_class).train(), images(4)
    targets = targets_of(model, names)
    expected = naive_loss(model, pixel_values, targets, step)
    actual = model(pixel_values, once_for_all=step, **targets).loss
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    scaled = [gradients(model, 3 * loss) for loss in (actual, expected)]  # as by accumulation
    assert_same_gradients(*scaled)


def test_the_joint_loss_and_its_gradients_are_the_official_ones():
    model, labels = official_model(AdaPerceiverForImageClassification).train(), recorded()["joint/labels"].long()
    depth_tokens = tuple(recorded()["joint/depth_readout_tokens"].tolist())
    step = OnceForAll(tokens=(4, 8, 16), depth_tokens=depth_tokens, width=(64, 32))
    order = [1, 0]  # the recorded widths are (32, 64): images in the other order must not matter
    outputs = model(recorded()["input/x"][order], labels=labels[order], once_for_all=step)
    torch.testing.assert_close(outputs.loss, recorded()["joint/loss"].reshape(()), rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs.logits[order][:, None], recorded()["joint/token_logits/t16"], rtol=0, atol=1e-5)
    outputs.loss.backward()
    keys = [key for key in recorded() if key.startswith("joint/grad")]
    assert len(keys) > 50
    for key in keys:
        gradient = model.get_parameter(our_name(key.split("/")[-1])).grad
        actual = gradient.norm() if key.startswith("joint/grad_norm/") else gradient
        torch.testing.assert_close(actual, recorded()[key].reshape(actual.shape), rtol=1e-4, atol=1e-5)


def eager_attention(model):
    model.set_attn_implementation("eager")


def checkpointed(model):
    model.gradient_checkpointing_enable()


def hooked(model):
    """The layers are called as they are: the class readout does not fold its query, and the FFNs mask their units."""
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)


def sharded(model):
    """As ZeRO marks parameters that are gathered in the call of their module."""
    for parameter in model.parameters():
        parameter.ds_id = 0


@pytest.mark.parametrize("change", [eager_attention, checkpointed, hooked, sharded])
def test_the_way_a_joint_step_is_computed_changes_neither_loss_nor_gradients(change, tiny_model):
    model, pixel_values = tiny_model(AdaPerceiverForDistillation).train(), images(4)
    targets = targets_of(model, ["labels", "teacher_logits", "teacher_features"])
    expected = model(pixel_values, once_for_all=STEP, **targets).loss
    expected_gradients = gradients(model, expected)
    change(model)
    actual = model(pixel_values, once_for_all=STEP, **targets).loss
    torch.testing.assert_close(actual, expected)
    assert_same_gradients(gradients(model, actual), expected_gradients)


def test_a_joint_loss_without_gradients_is_the_same(tiny_model):
    model, pixel_values = tiny_model(AdaPerceiverForDistillation).train(), images(4)
    targets = targets_of(model, ["labels", "teacher_features"])
    expected = model(pixel_values, once_for_all=STEP, **targets).loss
    with torch.no_grad():
        actual = model(pixel_values, once_for_all=STEP, **targets).loss
    assert not actual.requires_grad
    torch.testing.assert_close(actual, expected.detach())


@pytest.mark.parametrize("axes", [["tokens"], ["tokens", "depth"], ["tokens", "depth", "width"], ["width"], ["depth"]])
def test_a_draw_covers_the_axes_and_nothing_else(axes, tiny_config):
    steps = [OnceForAll.draw(tiny_config, axes, batch_size=5) for _ in range(200)]
    tokens = (2, 4, 6, 8, 12, 16) if "tokens" in axes else (16,)
    assert {step.tokens for step in steps} == {tokens}
    if "depth" in axes:
        assert {len(step.depth_tokens) for step in steps} == {2}  # one for each block
        assert {count for step in steps for count in step.depth_tokens} == set(tokens)
    else:
        assert {step.depth_tokens for step in steps} == {()}
    if "width" in axes:
        assert {len(step.width) for step in steps} == {5}  # one for each image
        assert {width for step in steps for width in step.width} == {16, 24, 32}
    else:
        assert {step.width for step in steps} == {32}


def test_a_generator_repeats_a_draw(tiny_config):
    def draw(seed):
        axes = ["tokens", "depth", "width"]
        return OnceForAll.draw(tiny_config, axes, 100, torch.Generator().manual_seed(seed))

    assert draw(0) == draw(0) != draw(1)


def test_a_share_of_the_images_may_have_the_full_width(tiny_config):
    axes, generator = ["tokens", "depth", "width"], torch.Generator().manual_seed(0)
    step = OnceForAll.draw(tiny_config, axes, 4000, generator, full_share=0.5)
    assert step.width.count(32) / 4000 == pytest.approx(0.5, abs=0.03)
    assert step.width.count(16) / 4000 == pytest.approx(0.25, abs=0.03)
    assert step.full_share == 0.5


def test_a_draw_is_shared_out_by_image():
    assert STEP.of_images([2, 0]) == STEP._replace(width=(24, 32))
    assert STEP._replace(width=24).of_images([2, 0]) == STEP._replace(width=24)


def test_the_weights_of_either_kind_of_readout_sum_to_one():
    weights = OnceForAll(tokens=(4, 8), depth_tokens=(4, 8, 8), width=32).weights(layers=3)
    assert weights == {1: {4: pytest.approx(1 / 6)}, 2: {8: pytest.approx(2 / 6)}, 3: {4: 0.5, 8: pytest.approx(1.0)}}


def test_the_full_readout_may_have_a_share_of_the_weights():
    step = OnceForAll(tokens=(4, 8), depth_tokens=(4, 8, 8), width=32, full_share=0.5)
    weights = step.weights(layers=3)
    assert weights[3][8] == pytest.approx(1.0)  # of two in all
    assert sum(weight for of in weights.values() for weight in of.values()) == pytest.approx(2.0)
    plain = step._replace(full_share=None).weights(layers=3)
    assert weights[1][4] / weights[2][8] == pytest.approx(plain[1][4] / plain[2][8])
    assert OnceForAll((8,), (), 32, full_share=0.5).weights(layers=3) == {3: {8: 1.0}}


@pytest.mark.parametrize(("model_class", "names"), CASES)
def test_partial_readouts_may_leave_the_blocks_alone(model_class, names, tiny_model):
    """With a factor of 0 the encoder learns from the full readouts alone, and the readouts from all, as before."""
    model, pixel_values = tiny_model(model_class).train(), images(4)
    targets = targets_of(model, names)

    def gradients_of(step):
        return gradients(model, model(pixel_values, once_for_all=step, **targets).loss)

    whole, cut = gradients_of(STEP), gradients_of(STEP._replace(partial_gradient=0.0))
    only_first = STEP._replace(width=(32, 16, 16, 16), partial_gradient=0.0)  # one image at full width
    shared = [name for name in whole if ".layers." in name or ".read." in name]
    others = [name for name in whole if name.startswith(("classifier", "head", "feature_adapter.ffn.fc2"))]
    assert any((whole[name] - cut[name]).abs().max() > 1e-4 for name in shared)
    assert_same_gradients({name: cut[name] for name in others}, {name: whole[name] for name in others})
    full_weight = only_first.weights(2, model.normalizes_dense_losses)[2][16]
    alone = {name: target[:1] for name, target in targets.items()}
    plain = gradients(model, model(pixel_values[:1], tokens=16, width=32, depth=2, **alone).loss)
    if names <= {"labels", "teacher_logits"} and model_class is AdaPerceiverForImageClassification:
        actual = gradients_of(only_first)
        expected = {name: full_weight * plain[name] / 4 for name in shared}  # the mean over four images
        assert_same_gradients({name: actual[name] for name in shared}, expected)


def test_partial_readouts_may_learn_from_the_full_one(tiny_model):
    model, pixel_values = tiny_model(AdaPerceiverForImageClassification).train(), images(4)
    step, labels = STEP._replace(width=32, depth_tokens=()), torch.tensor([1, 2, 3, 4])
    full, *partial = (model(pixel_values, tokens=tokens, labels=labels) for tokens in (16, 2, 4))
    teacher = full.logits.detach()
    loss = full.loss
    for outputs in partial:
        divergence = torch.nn.functional.kl_div(
            outputs.logits.log_softmax(-1), teacher.softmax(-1), reduction="batchmean"
        )
        loss = loss + outputs.loss + 0.5 * divergence
    actual = model(pixel_values, labels=labels, once_for_all=step._replace(self_distillation=0.5)).loss
    torch.testing.assert_close(actual, loss / 3, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, actual), gradients(model, loss / 3))


def test_training_mode_gives_the_joint_loss_by_configuration_and_evaluation_the_plain_one(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification, adaptive_axes=["tokens", "depth", "width"]).train()
    pixel_values, labels = images(4), torch.tensor([1, 2, 3, 4])
    torch.manual_seed(3)
    step = OnceForAll.draw(model.config, model.config.adaptive_axes, 4)
    expected = model(pixel_values, labels=labels, once_for_all=step)
    torch.manual_seed(3)
    actual = model(pixel_values, labels=labels)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=0, atol=0)
    at_point = model(pixel_values, labels=labels, tokens=8)  # a call that names a point trains that point
    torch.testing.assert_close(at_point.loss, torch.nn.functional.cross_entropy(at_point.logits, labels))
    outputs = model.eval()(pixel_values, labels=labels)
    torch.testing.assert_close(outputs.loss, torch.nn.functional.cross_entropy(outputs.logits, labels))


def test_logits_of_a_joint_step_are_in_the_order_of_the_images(tiny_model):
    model, pixel_values = tiny_model(AdaPerceiverForImageClassification).train(), images(4)
    logits = model(pixel_values, labels=torch.zeros(4, dtype=torch.long), once_for_all=STEP).logits
    torch.testing.assert_close(logits, model(pixel_values, width=list(STEP.width)).logits, rtol=1e-5, atol=1e-5)


def test_frozen_parts_get_no_gradient(tiny_model):
    model = tiny_model(AdaPerceiverForSemanticSegmentation).train()
    model.requires_grad_(False)
    trained = [*model.adaperceiver.dense_readout.parameters(), *model.head.parameters()]
    for parameter in trained:
        parameter.requires_grad_(True)
    model(images(4), labels=torch.randint(0, 10, (4, 32, 32)), once_for_all=STEP).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in trained)
    assert sum(parameter.grad is not None for parameter in model.parameters()) == len(trained)


def test_a_sum_in_turn_keeps_one_term_at_a_time():
    alive = most = 0

    class Counted(torch.autograd.Function):
        """The identity; its term is alive between the forward and the backward pass."""

        @staticmethod
        def forward(ctx, x):
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            nonlocal alive
            alive -= 1
            return gradient

    x, scale = torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.tensor(2.0))
    total = sum_in_turn(
        [(lambda x, i=i: (i * scale * Counted.apply(x)).sum(), (x,)) for i in (1.0, 2.0, 3.0)], [scale]
    )
    (10 * total).backward()
    assert most == 1
    torch.testing.assert_close(total.detach(), torch.tensor(36.0))
    torch.testing.assert_close(x.grad, torch.full((3,), 120.0))
    torch.testing.assert_close(scale.grad, torch.tensor(180.0))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (STEP._replace(tokens=(3, 16)), r"`tokens` must be among the granularities .*, got \(3, 16\)"),
        (STEP._replace(depth_tokens=(4,)), "`depth_tokens` must hold one count for each of 2 blocks"),
        (STEP._replace(width=99), "`width` must be an integer from 1 to 32, got 99"),
        (STEP._replace(width=(16, 32, 0, 16)), "`width` must be an integer from 1 to 32, got 0"),
        (STEP._replace(width=(16, 32)), "`width` must be one, or one for each of 4 images, got 2"),
    ],
)
def test_a_step_that_cannot_be_is_refused(step, message, tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification)
    with pytest.raises(ValueError, match=message):
        model(images(4), labels=torch.zeros(4, dtype=torch.long), once_for_all=step)


def test_an_operating_point_beside_a_step_is_refused(tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification)
    with pytest.raises(TypeError, match="`once_for_all` says where the model runs, got tokens beside it"):
        model(images(4), labels=torch.zeros(4, dtype=torch.long), once_for_all=STEP, tokens=8)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_outputs_of_one_configuration_are_refused_beside_a_step(name, tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification)
    with pytest.raises(ValueError, match=f"`{name}` has no place in a once-for-all step"):
        model(images(4), labels=torch.zeros(4, dtype=torch.long), once_for_all=STEP, **{name: True})


SHARDED = """
import copy, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import adaperceiver
from adaperceiver import AdaPerceiverConfig, OnceForAll

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
step = OnceForAll(tokens=(2, 4, 16), depth_tokens=(4, 12), width=(32, 16))
torch.manual_seed(0)
pixel_values, classes, maps = torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)), torch.randint(0, 10, (4, 32, 32))
targets = {
    "AdaPerceiverForImageClassification": {"labels": classes},
    "AdaPerceiverForDistillation": {"labels": classes, "teacher_features": torch.randn(4, 16, 24)},
    "AdaPerceiverForSemanticSegmentation": {"labels": maps},
}
for name, target in targets.items():
    model = getattr(adaperceiver, name)(AdaPerceiverConfig(**TINY)).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)

    def loss_of(model, rows):
        return model(pixel_values[rows], once_for_all=step, **{key: value[rows] for key, value in target.items()}).loss

    whole = copy.deepcopy(model)
    ((loss_of(whole, slice(0, 2)) + loss_of(whole, slice(2, 4))) / 2).backward()
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss_of(model, slice(2 * rank, 2 * rank + 2)).backward()
    for (parameter_name, ours), expected in zip(model.named_parameters(), whole.parameters()):
        if expected.grad is not None:
            actual, scale = ours.grad.full_tensor(), expected.grad.abs().max().clamp(min=1)
            torch.testing.assert_close(actual / scale, expected.grad / scale, rtol=0, atol=1e-5)
    print(name, "agrees")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_model_sharded_over_two_processes_gets_the_gradients_of_a_whole_one(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED.replace("**TINY", f"**{TINY}"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("agrees") == 6
