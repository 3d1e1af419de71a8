"""
On a GPU nothing may be left on the CPU. There is none here: another device stands in, whose tensors hold real numbers but may
not meet those of the CPU (`other_device.py`). Every entry point runs there, in float32 and under bfloat16 autocast, gives the
numbers that it gives on the CPU, and computes nothing but indices anywhere else.
"""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, images
from torch import nn

from adaperceiver import (
    AdaPerceiverBackbone,
    AdaPerceiverConfig,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverModel,
    OnceForAll,
)


DENSE = [AdaPerceiverForSemanticSegmentation, AdaPerceiverForDepthEstimation]
HEADS = [AdaPerceiverForImageClassification, AdaPerceiverForDistillation, *DENSE]
ROUTED = partial(AdaPerceiverForImageClassification, router_ratio=0.5)
# What a call may do on the host: make a list a tensor, and draw what a training step trains.
ON_HOST = ("aten.lift_fresh.", "aten.randint", "aten.rand.")


def call(**point):
    return lambda model, pixel_values: dict(model(pixel_values, **point))


def policy(input_tokens, point):
    return point._replace(tokens=(4, 16, 4, 8), depth=2)


def grid(model, pixel_values, **arguments):
    return [prediction for *_, prediction in model.predictions_grid(pixel_values, **arguments)]


def anytime(model, pixel_values, by):
    return [outputs.logits for outputs in model.anytime(pixel_values, by=by)]


def profile(model, pixel_values):
    model.profile(batch_size=4, repeats=1, progress=False)
    return model(pixel_values, max_latency_ms=1e9).logits


def targets_of(model, pixel_values):
    with pixel_values.device:
        if isinstance(model, AdaPerceiverForSemanticSegmentation):
            return {"labels": torch.arange(4 * 32 * 32).view(4, 32, 32) % 10}
        if isinstance(model, AdaPerceiverForDepthEstimation):
            return {"labels": torch.linspace(0.1, 9, 4 * 32 * 32).view(4, 32, 32)}
        found = {"labels": torch.arange(4), "teacher_logits": torch.linspace(-1, 1, 40).view(4, 10)}
        if isinstance(model, AdaPerceiverForDistillation):
            found["teacher_features"] = torch.linspace(-1, 1, 4 * 16 * 24).view(4, 16, 24)
        return found


def gradients(model, pixel_values, step=None, **options):
    """The loss of a training step, and its gradients."""
    model.train()
    step = {} if step is None else {"once_for_all": step}
    loss = model(pixel_values, **targets_of(model, pixel_values), **step, **options).loss
    loss.backward()
    return {"loss": loss, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def random_step(model, pixel_values):
    """Drawn by the model itself, the same wherever it runs."""
    model.config.adaptive_axes = ["tokens", "depth", "width"]
    torch.manual_seed(0)
    return gradients(model, pixel_values)


def hooked(model, pixel_values, **point):
    """Layers with hooks are called as they are: widths are masked, and nothing is folded."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.register_forward_hook(lambda *_: None)
    return dict(model(pixel_values, **point))


def scored(model, pixel_values):
    """The library's ways to many predictions: sums of scores are kept where they like."""
    from adaperceiver.evaluation import calibration, policies
    from adaperceiver.evaluation.grid import evaluate_grid, metrics_for

    batches = [(pixel_values, torch.arange(4).to(pixel_values.device))]
    same = SimpleNamespace(
        device=pixel_values.device, num_processes=1, gather=lambda t: t, reduce=lambda t, how: t, is_main_process=True,
        is_local_main_process=True,
    )  # fmt: skip
    rows = evaluate_grid(model, batches, metrics_for("image-classification", 10), same, exit_thresholds=[0.3])
    answers = policies.collect(model, batches, same)
    logits, _ = calibration.collect(model, batches, 8, 32, progress=False)
    return {"top1": torch.tensor([row["top1"] for row in rows]), "answers": list(answers), "logits": logits}


STEP = OnceForAll((2, 8, 16), (4, 8), (32, 16, 16, 24))
FAVOURING = OnceForAll((2, 8, 16), (4, 8), (32, 16, 16, 24), 0.5, 0.25, 0.1)

CASES: dict[str, tuple[Callable, Callable]] = {  # what is built with the tiny configuration, and what runs
    **{f"{model.__name__} call": (model, call()) for model in [AdaPerceiverModel, AdaPerceiverBackbone, *HEADS]},
    **{f"{model.__name__} point": (model, call(tokens=6, width=16, depth=1)) for model in [AdaPerceiverModel, *HEADS]},
    **{
        f"{model.__name__} lists": (model, call(tokens=[2, 16, 7, 2], width=[16, 24, 16, 32], depth=[1, 2, 1, 1]))
        for model in [AdaPerceiverModel, *HEADS]
    },
    **{f"{model.__name__} grid": (model, grid) for model in HEADS},
    **{f"{model.__name__} hooks": (model, partial(hooked, width=24, depth=1)) for model in HEADS},
    **{f"{model.__name__} loss": (model, lambda *of: gradients(*of, tokens=4, width=16)) for model in HEADS},
    **{f"{model.__name__} once-for-all step": (model, partial(gradients, step=STEP)) for model in HEADS},
    **{f"{model.__name__} drawn step": (model, random_step) for model in HEADS},
    "favouring step": (AdaPerceiverForImageClassification, partial(gradients, step=FAVOURING)),
    "eager attention": (partial(AdaPerceiverForImageClassification, attn_implementation="eager"), call(tokens=8)),
    "states and attentions": (
        partial(AdaPerceiverModel, attn_implementation="eager"),
        call(output_hidden_states=True, output_attentions=True),
    ),
    "beyond the training length": (AdaPerceiverForImageClassification, call(tokens=20)),
    "bidirectional": (AdaPerceiverForImageClassification, call(attention="bidirectional")),
    "another size": (
        AdaPerceiverForSemanticSegmentation,
        lambda model, x: dict(model(x.repeat(1, 1, 2, 1), interpolate_pos_encoding=True)),
    ),
    "early exit": (AdaPerceiverForImageClassification, call(exit_threshold=0.3)),
    "early exit per image": (
        AdaPerceiverForImageClassification,
        call(exit_threshold=[0.1, 0.3, 1, 0.2], tokens=[4, 8, 4, 8], exit_temperatures=[2.0, 1.0]),
    ),
    "router": (ROUTED, call(policy="router")),
    "router and early exit": (ROUTED, call(policy="router", exit_threshold=0.3)),
    "function as policy": (AdaPerceiverForImageClassification, call(policy=policy)),
    "budget": (AdaPerceiverForImageClassification, call(max_gflops=1e-3)),
    "latency": (AdaPerceiverForImageClassification, profile),
    "logits_by_tokens": (AdaPerceiverForImageClassification, lambda model, x: model.logits_by_tokens(x)),
    "logits_grid": (AdaPerceiverForImageClassification, lambda model, x: model.logits_grid(x, width=16)),
    "grid of one": (AdaPerceiverForDepthEstimation, partial(grid, granularities=[5], depths=[2])),
    "anytime by depth": (AdaPerceiverForImageClassification, partial(anytime, by="depth")),
    "anytime by tokens": (AdaPerceiverForImageClassification, partial(anytime, by="tokens")),
    "extract": (AdaPerceiverForSemanticSegmentation, lambda model, x: dict(model.extract(6, 16, 1)(x))),
    "drop path": (partial(AdaPerceiverForImageClassification, drop_path_rate=0.9), call()),
    "gated FFNs": (partial(AdaPerceiverForImageClassification, use_swiglu_ffn=True), call(width=16)),
    "stem": (partial(AdaPerceiverForImageClassification, stem_layers=[[8, 2], [8, 2, 3, 0], [8, 2, 3, 2]]), call()),
    "evaluation": (ROUTED, scored),
}
SAME_NUMBERS_ALONE = ("evaluation",)  # whose sums are on the CPU


def built(model_class: Callable) -> nn.Module:
    attention = "sdpa"
    changes = {}
    if isinstance(model_class, partial):
        changes = dict(model_class.keywords)
        attention, model_class = changes.pop("attn_implementation", attention), model_class.func
    torch.manual_seed(0)
    config = AdaPerceiverConfig(**{**TINY, **changes}, attn_implementation=attention)
    model = model_class(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def problem_of(case: str, autocast: bool) -> str | None:
    """What is wrong with a case on the other device, if anything."""
    import other_device
    from torch.utils import _pytree as pytree

    model_class, run = CASES[case]
    here = built(model_class)
    there, pixel_values = other_device.moved(copy.deepcopy(here)), images(4)
    half = {"dtype": torch.bfloat16, "enabled": autocast}
    with torch.autocast("cpu", **half), torch.set_grad_enabled("step" in case or "loss" in case):
        expected = pytree.tree_leaves(run(here, pixel_values))
    try:
        with (
            torch.autocast(other_device.NAME, **half),
            torch.set_grad_enabled("step" in case or "loss" in case),
            other_device.watched() as watch,
        ):
            actual = run(there, other_device.moved(pixel_values))
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    actual = pytree.tree_leaves(actual)
    if case not in SAME_NUMBERS_ALONE:
        elsewhere = [of for of in watch.on_cpu if not of.startswith(ON_HOST)]
        if elsewhere:
            return f"on the CPU: {', '.join(elsewhere[:5])}"
        values = [*actual, *there.parameters(), *there.buffers()]
        if any(isinstance(one, torch.Tensor) and one.device != other_device.DEVICE for one in values):
            return "a result is on the CPU"
        if autocast and torch.bfloat16 not in watch.products:
            return "nothing ran in half precision"
    tolerance = {"rtol": 0.1, "atol": 0.1} if autocast else {"rtol": 1e-4, "atol": 1e-5}
    if len(actual) != len(expected):
        return f"{len(actual)} results instead of {len(expected)}"
    for one, other in zip(other_device.fetched(actual), expected):
        if isinstance(other, torch.Tensor):
            one, other = one.float(), other.detach().float()
            scale = max(other.abs().max().item(), 1.0) if autocast else 1.0
            if not torch.allclose(one / scale, other / scale, **tolerance):
                return f"{(one - other).abs().max():.2g} from what the CPU says, up to {other.abs().max():.2g}"
    return None


def main() -> None:
    from adaperceiver import layers_adaperceiver as layers

    # The tensors of the other device are a class of their own, which looks like quantised weights.
    layers.is_plain_linear = lambda layer: type(layer) is nn.Linear and not layers.is_hooked(layer)
    print(json.dumps({case: [problem_of(case, autocast) for autocast in (False, True)] for case in CASES}))


@pytest.fixture(scope="module")
def problems():
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    found = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16 autocast"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_left_on_the_cpu(case, autocast, problems):
    assert problems[case][autocast] is None


if __name__ == "__main__":
    main()
