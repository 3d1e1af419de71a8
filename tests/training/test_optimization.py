"""Optimizers, schedules and recipes of the training scripts."""

import copy
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import asdict

import pytest
import torch
from conftest import ROOT, assert_equal
from distill import DistillationArguments, DistillationData
from torch import nn

from adaperceiver import AdaPerceiverConfig
from adaperceiver.training.arguments import OptimizationArguments, RunArguments, parse
from adaperceiver.training.augmentation import AugmentationArguments
from adaperceiver.training.optimization import build_optimizer, build_scheduler
from adaperceiver.training.soap import DelayedSOAP


RECIPES = ROOT / "examples" / "recipes"
OPTIMIZERS = ("adamw", "nadamw", "soap")


def network():
    """A parameter of every kind: a convolution, a token, biases, a matrix with a side that is too long to be turned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 2, stride=2), nn.Flatten(), nn.Linear(16, 40))
    model.register_parameter("token", nn.Parameter(torch.ones(1, 1, 5)))
    return model


def optimize(optimizer, model, steps):
    """Train on data of its own for every one of `steps`."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images, targets = torch.randn(8, 3, 4, 4, generator=generator), torch.randn(8, 40, generator=generator)
        optimizer.zero_grad()
        ((model(images) - targets).square().mean() + model.token.square().sum()).backward()
        optimizer.step()


def arguments(**changes):
    defaults = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_precondition_dim": 32}
    return OptimizationArguments(**{**defaults, "start_precondition_step": 4, "precondition_frequency": 3, **changes})


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---------------------------------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_decay_apart_from_the_gradient_and_biases_and_tokens_do_not(optimizer):
    model = network()
    before = copy.deepcopy(model.state_dict())
    optimizer = build_optimizer(model, arguments(optimizer=optimizer, start_precondition_step=1))
    for _ in range(2):  # for SOAP, the second is in the eigenbasis of no gradients at all
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for name, parameter in model.named_parameters():
        kept = (1 - 1e-2 * 0.1) ** 2 if name in ("0.weight", "2.weight") else 1
        torch.testing.assert_close(parameter.detach(), before[name] * kept, rtol=1e-6, atol=0)


@pytest.mark.parametrize("stop", [2, 4, 6])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_optimizer_goes_the_same_way(optimizer, stop):
    args = arguments(optimizer=optimizer)
    straight, first, resumed = network(), network(), network()
    optimize(build_optimizer(straight, args), straight, range(10))
    interrupted = build_optimizer(first, args)
    optimize(interrupted, first, range(stop))
    resumed.load_state_dict(first.state_dict())
    successor = build_optimizer(resumed, args)
    successor.load_state_dict(through_a_file(interrupted.state_dict()))
    optimize(successor, resumed, range(stop, 10))
    assert_equal(dict(resumed.named_parameters()), dict(straight.named_parameters()))


def test_before_its_start_soap_is_adamw():
    models = {"soap": network(), "adamw": network()}
    optimizers = {n: build_optimizer(m, arguments(optimizer=n, weight_decay=0.01)) for n, m in models.items()}
    tolerance = 1e-4  # a hundredth of a step: the library has epsilon and weight decay in other places than torch
    for steps in (range(4), range(4, 6)):
        for name, model in models.items():
            optimize(optimizers[name], model, steps)
        difference = (models["soap"][2].weight - models["adamw"][2].weight).abs().max()
        if steps.start == 0:
            torch.testing.assert_close(*(m.state_dict() for m in models.values()), rtol=0, atol=tolerance)
    assert difference > 20 * tolerance  # and then it is not


def test_at_its_start_soap_turns_into_the_eigenbasis_of_all_gradients_until_then():
    parameter = nn.Parameter(torch.zeros(6, 4))
    optimizer = DelayedSOAP([parameter], betas=(0.9, 0.999), precondition_frequency=2, start_precondition_step=5)
    left, right = torch.randn(6, 6), torch.randn(4, 4)
    gradients = [left @ torch.randn(6, 4) @ right for _ in range(5)]
    for step, gradient in enumerate(gradients, start=1):
        parameter.grad = gradient.clone()
        assert not any(map(len, optimizer.state[parameter].get("Q", []))), f"turned before step {step}"
        optimizer.step()

    state = optimizer.state[parameter]
    weights = [0.001 * 0.999 ** (4 - index) for index in range(5)]
    for dim, basis in enumerate(state["Q"]):
        unfolded = [gradient.transpose(0, dim) for gradient in gradients]
        expected = sum(weight * gradient @ gradient.T for weight, gradient in zip(weights, unfolded))
        turned = basis.T @ expected @ basis
        assert_close = torch.testing.assert_close
        assert_close(turned, torch.diag(torch.linalg.eigvalsh(expected).flip(0)), rtol=0, atol=1e-6 * expected.norm())
        assert_close(basis.T @ basis, torch.eye(len(basis)), rtol=0, atol=1e-5)
    # No direction moves by more than Adam would: the mean over the root of the second moment is 1 at most.
    mean = optimizer.project(state["exp_avg"], state) / (1 - 0.9**5)
    ratio = mean.abs() / (state["exp_avg_sq"] / (1 - 0.999**5)).sqrt()
    assert ratio.max() <= 1 + 1e-4
    assert state["exp_avg_sq"].sum() >= 0.999 * sum(w * g.square().sum() for w, g in zip(weights, gradients))


def regression(optimizer_class, noise, steps=300, learning_rate=0.02, **options):
    """Losses, and root mean square of the updates in learning rates, on the way to a matrix between two bad scales."""
    torch.manual_seed(0)
    bases = [torch.linalg.qr(torch.randn(size, size))[0] for size in (32, 24)]
    rows, columns = (basis * torch.logspace(0, -1.5, len(basis)) @ basis.T for basis in bases)
    target, weight = torch.randn(32, 24), nn.Parameter(torch.zeros(32, 24))
    optimizer = optimizer_class([weight], lr=learning_rate, betas=(0.9, 0.999), weight_decay=0, **options)
    losses, updates = [], []
    for _ in range(steps):
        error = rows @ (weight.detach() - target) @ columns
        weight.grad = rows @ (2 * error + noise * torch.randn(32, 24)) @ columns
        before = weight.detach().clone()
        optimizer.step()
        losses.append(error.square().sum().item())
        updates.append((weight.detach() - before).square().mean().sqrt().item() / learning_rate)
    return losses, updates


@pytest.mark.parametrize(("noise", "share"), [(0.0, 0.1), (1.0, 0.8)])
def test_soap_needs_fewer_steps_than_adamw_and_starts_without_a_jump(noise, share):
    start = 50
    losses, updates = regression(DelayedSOAP, noise, precondition_frequency=10, start_precondition_step=start)
    expected, _ = regression(torch.optim.AdamW, noise)
    assert losses[: start + 1] == pytest.approx(expected[: start + 1], rel=1e-3)
    assert max(losses[start + 1 : start + 20]) <= losses[start]
    assert max(updates[start : start + 20]) < 1.5  # Shampoo's estimate alone makes it more than 3
    assert sum(losses[-20:]) < share * sum(expected[-20:])


@pytest.mark.slow
def test_soap_takes_the_same_steps_in_two_processes(tmp_path):
    """Each rank sees half the batch. Both end with the same weights, which are those of one process with all of it."""
    code = f"""
import os, sys, torch
from adaperceiver.training.soap import DelayedSOAP
torch.set_num_threads(1)
torch.manual_seed(0)
images, targets = torch.randn(7, 8, 6), torch.randn(7, 8, 5)
rank = int(os.environ["RANK"])
torch.distributed.init_process_group("gloo", init_method="file://{tmp_path / "rendezvous"}", rank=rank, world_size=2)

def train(wrap, part):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5))
    optimizer = DelayedSOAP(model.parameters(), lr=1e-2, start_precondition_step=3, precondition_frequency=2)
    wrapped = wrap(model)
    for image, target in zip(images, targets):
        optimizer.zero_grad()
        (wrapped(image[part]) - target[part]).square().mean().backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()

ours = train(torch.nn.parallel.DistributedDataParallel, slice(rank, None, 2))
both = [torch.empty_like(ours) for _ in range(2)]
torch.distributed.all_gather(both, ours)
assert torch.equal(*both)
torch.testing.assert_close(ours, train(lambda model: model, slice(None)), rtol=0, atol=1e-5)
"""
    options = {"stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RANK": str(rank)}, **options)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)


# ----------------------------------------------------------------------------------------------------------- schedules


def learning_rates(args, steps, stop=None):
    """The rates of all `steps`; with `stop`, from there on with an optimizer and a schedule that were resumed."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    build = lambda: torch.optim.AdamW([parameter], lr=args.learning_rate)  # noqa: E731
    optimizer = build()
    scheduler = build_scheduler(optimizer, args, steps)
    rates = []
    for step in range(steps + 1):
        if step == stop:
            states = through_a_file([optimizer.state_dict(), scheduler.state_dict()])
            optimizer = build()
            scheduler = build_scheduler(optimizer, args, steps)
            optimizer.load_state_dict(states[0])
            scheduler.load_state_dict(states[1])
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize(
    ("schedule", "power", "quarter", "middle", "last"),
    [
        ("cosine", 1, 1e-5 + 9.9e-4 * (1 + math.sqrt(0.5)) / 2, 5.05e-4, 1e-5),
        ("polynomial", 1, 7.525e-4, 5.05e-4, 1e-5),
        ("polynomial", 2, 1e-5 + 9.9e-4 * 0.5625, 2.575e-4, 1e-5),
        ("constant", 1, 1e-3, 1e-3, 1e-3),
    ],
)
def test_a_schedule_warms_up_and_comes_down_as_announced(schedule, power, quarter, middle, last, warmup):
    args = OptimizationArguments(schedule=schedule, polynomial_power=power, warmup_steps=warmup)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates = learning_rates(args, steps=warmup + 8)
        resumed = [learning_rates(args, steps=warmup + 8, stop=stop) for stop in (2, 4, 6)]
    if warmup:
        assert rates[:4] == pytest.approx([1e-6 + share * (1e-3 - 1e-6) for share in (0, 0.25, 0.5, 0.75)], rel=1e-9)
    assert [rates[warmup + step] for step in (0, 2, 4, 8)] == pytest.approx([1e-3, quarter, middle, last], rel=1e-9)
    assert resumed == [rates] * 3


def test_a_warm_up_may_start_at_zero():
    assert learning_rates(OptimizationArguments(warmup_steps=2, warmup_learning_rate=0), 4)[:3] == [0, 5e-4, 1e-3]


# ------------------------------------------------------------------------------------------------------------- recipes


GROUPS = [RunArguments, DistillationData, AugmentationArguments, OptimizationArguments, DistillationArguments]


def stages_of(*command):
    """What a command line asks for: one dictionary of all options for every stage."""
    stages = parse(GROUPS, [str(part) for part in command], RECIPES / "cifar10.yaml")
    return [{name: value for group in stage for name, value in asdict(group).items()} for stage in stages]


IMAGES = 12_129_687  # of ImageNet-12k's training split
PAPER = {  # what the stages of the paper share
    "teacher": "timm/vit_huge_patch14_clip_224.laion2b_ft_in12k",
    "dataset": ["timm/imagenet-12k-wds"],
    "streaming": True,
    "student": "{}",
    "label_loss": False,
    "flip": True,
    "randaugment_ops": 2,
    "randaugment_magnitude": 15,
    "mixup_alpha": 1.0,
    "cutmix_alpha": 0.0,
    "erasing": 0.0,
    "optimizer": "soap",
    "batch_size": 4096,
    "weight_decay": 0.003,
    "beta1": 0.9,
    "beta2": 0.999,
    "clip_norm": 3.0,
    "warmup_steps": 3000,
    "warmup_learning_rate": 1e-6,
    "max_precondition_dim": 8192,
    "start_precondition_step": 500,
}
STAGE_FIELDS = (
    "distill",
    "adaptive_axes",
    "learning_rate",
    "ema_decay",
    "epochs",
    "schedule",
    "min_learning_rate",
    "precondition_frequency",
)
STAGES = {  # the fields above; a constant schedule has no lowest rate
    "stage1": ("logits", ["tokens"], 1e-3, 0.999, 50, "cosine", 1e-5, 100),
    "stage2": ("logits", ["tokens", "depth"], 1e-3, 0.999, 65, "cosine", 1e-5, 100),
    "stage3": ("logits", ["tokens", "depth", "width"], 5e-4, 0.9998, 20, "constant", None, 100),
    "features": ("features", ["tokens", "depth", "width"], 5e-4, 0.9995, 20, "cosine", 1e-5, 30),
}


@pytest.mark.parametrize("name", STAGES)
def test_the_recipes_hold_the_values_of_the_paper(name):
    (found,) = stages_of(RECIPES / f"imagenet12k_{name}.yaml")
    expected = {**PAPER, **dict(zip(STAGE_FIELDS, STAGES[name]))}
    expected["steps"] = round(expected.pop("epochs") * IMAGES / 4096)
    if expected["schedule"] == "constant":
        del expected["min_learning_rate"]
    assert {field: found[field] for field in expected} == expected
    before = {"stage1": None, "stage2": "stage1", "stage3": "stage2", "features": "stage3"}[name]
    assert found["output_dir"] == f"runs/imagenet12k/{name}"
    assert found["init_from"] == (before and f"runs/imagenet12k/{before}/final")


def test_the_recipe_of_all_stages_is_the_recipes_of_the_stages_in_sequence():
    together = stages_of(RECIPES / "imagenet12k.yaml")
    alone = [stages_of(RECIPES / f"imagenet12k_stage{number}.yaml")[0] for number in (1, 2, 3)]
    assert together == [{**stage, "init_from": None} for stage in alone]  # the script fills in the stage before


DISTILLATION = [path for path in sorted(RECIPES.glob("*.yaml")) if "examples/distill.py" in path.read_text()]


@pytest.mark.parametrize("recipe", DISTILLATION, ids=lambda path: path.stem)
def test_every_recipe_describes_a_student(recipe):
    for stage in stages_of(recipe):
        config = AdaPerceiverConfig(**json.loads(stage["student"]), adaptive_axes=stage["adaptive_axes"])
        assert set(json.loads(stage["student"])) <= set(AdaPerceiverConfig().to_dict()), "a field that does not exist"
        assert config.adaptive_axes == stage["adaptive_axes"]


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("imagenet12k*.yaml")), ids=lambda path: path.stem)
def test_the_commands_on_top_of_a_recipe_run_it(recipe, monkeypatch):
    monkeypatch.chdir(ROOT)
    comment = re.match(r"(#.*\n)+", recipe.read_text()).group().replace("\\\n#", "").splitlines()
    commands = [line.split("examples/distill.py")[1] for line in comment if line.startswith("#     accelerate launch")]
    real, smoke = (stages_of(*shlex.split(command)) for command in commands)
    expected = stages_of(recipe)
    assert real == [{**stage, "resume": True} for stage in expected]
    assert all(stage["smoke"] for stage in smoke)
    assert not {stage["output_dir"] for stage in smoke} & {stage["output_dir"] for stage in expected}


@pytest.mark.parametrize("place", ["learning_rte: 1", "stages:\n  - learning_rte: 1"])
def test_a_key_that_no_option_has_is_named(tmp_path, place):
    (tmp_path / "recipe.yaml").write_text(place)
    with pytest.raises(ValueError, match="learning_rte"):
        stages_of(tmp_path / "recipe.yaml")
