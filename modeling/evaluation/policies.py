"""
What policies gain, at what cost: fixed token counts, early exit, the router, both together, and the oracle.

`collect` runs one encoding at each width; the accuracy and the GFLOPs of every row follow from it.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from scipy.stats import binomtest
from tqdm.auto import tqdm

from ..configuration_adaperceiver import AdaPerceiverConfig
from ..modeling_adaperceiver import AdaPerceiverForImageClassification
from ..policy_adaperceiver import Policy
from .grid import confidences, exit_depths, gflops


class Answers(NamedTuple):
    """What a model says of N images, over the trained grid."""

    correct: torch.Tensor  # (widths, depths, granularities, N), bool
    confidence: torch.Tensor  # (depths, granularities, N), at full width
    routed: torch.Tensor | None  # (N,), indices of granularities


class Oracle(NamedTuple):
    """For each image the cheapest operating point with a correct prediction: a policy that needs the labels."""

    tokens: tuple[int, ...]
    width: tuple[int, ...]
    depth: tuple[int, ...]

    def policy(self, images: slice) -> Policy:
        """That of a batch of some of the images."""
        of_batch = {name: values[images] for name, values in self._asdict().items()}
        return lambda input_tokens, point: point._replace(**of_batch)


@dataclass
class Row:
    policy: str
    accuracy: float
    gflops: float
    call: dict[str, Any] | Oracle  # how to ask for it
    exit_depths: dict[int, float] | None = None  # share of the images
    tokens: dict[int, float] | None = None
    ms_batch_1: float | None = None
    ms_large_batch: float | None = None
    best_fixed: float | None = None  # accuracy of the best fixed configuration within the GFLOPs, if there is one
    p_value: float | None = None  # of a paired test against that configuration

    def record(self) -> dict[str, Any]:
        return {**vars(self), "call": None if isinstance(self.call, Oracle) else self.call}


COLUMNS = ("policy", "accuracy", "best_fixed", "p_value", "gflops", "ms_batch_1", "ms_large_batch")  # of the table


@torch.no_grad()
def collect(
    model: AdaPerceiverForImageClassification,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    accelerator: Accelerator,
) -> Answers:
    """One encoding at each width, on all processes; confidences by the model's own temperatures."""
    answers, router = [], model.adaperceiver.router
    temperatures = model.operating_point(exit_threshold=1.0).exit_temperatures
    for pixel_values, labels in tqdm(batches, "accuracies", unit="batch", disable=not accelerator.is_main_process):
        grids = [model.logits_grid(pixel_values, width=width) for width in model.config.widths]
        correct = torch.stack([grid.argmax(dim=-1) == labels for grid in grids])
        routed = None
        if router is not None:
            routed = router.logits(model.adaperceiver.embeddings(pixel_values)).argmax(dim=-1).cpu()
        answers.append(Answers(correct.cpu(), confidences(grids[-1], temperatures).cpu(), routed))
    if accelerator.num_processes > 1:  # which took turns
        turns = zip_longest(*gather_object([answers]))
        answers = [one for turn in turns for one in turn if one is not None]
    if not answers:
        raise ValueError("There is nothing to evaluate on: the data set has no image that can be read.")
    correct, confidence, routed = zip(*answers)
    return Answers(
        torch.cat(correct, dim=-1), torch.cat(confidence, dim=-1), None if router is None else torch.cat(routed)
    )


def check_tokens(tokens: Sequence[int], config: AdaPerceiverConfig) -> None:
    if not set(tokens) <= set(config.token_granularities):
        raise ValueError(f"--tokens must be among {config.token_granularities}, got {tokens}.")


def shares(values: torch.Tensor, names: Sequence[int]) -> dict[int, float]:
    counts = torch.bincount(values, minlength=len(names))
    return {name: count / len(values) for name, count in zip(names, counts.tolist())}


def policy_rows(
    model: AdaPerceiverForImageClassification, answers: Answers, tokens: Sequence[int], thresholds: Sequence[float]
) -> list[Row]:
    """Fixed `tokens`, early exit at `thresholds` from each of them, the router, both together, and the oracle at the end."""
    granularities, last = model.config.token_granularities, model.config.num_hidden_layers
    check_tokens(tokens, model.config)
    images = torch.arange(answers.correct.shape[-1])
    on_grid, costs_on_grid = answers.correct.flatten(0, 2), grid_gflops(model)
    accuracies = on_grid.float().mean(dim=1)

    def against_fixed(correct: torch.Tensor, spent: float) -> dict[str, float]:
        affordable = torch.where(costs_on_grid <= spent * (1 + 1e-6), accuracies, -1.0)
        best = int(affordable.argmax())
        if affordable[best] < 0:
            return {}
        return {"best_fixed": accuracies[best].item(), "p_value": paired_p_value(correct, on_grid[best])}

    def row(name: str, choice: torch.Tensor, **call: Any) -> Row:
        """That of a call where image n gets granularity `choice[n]`."""
        point = model.operating_point(**call)
        depth = exit_depths(answers.confidence[:, choice, images], point)
        ran = Counter(zip(choice.tolist(), depth.tolist()))
        costs = (
            gflops(model, point._replace(tokens=granularities[index]), None, at) * n for (index, at), n in ran.items()
        )
        correct, spent = answers.correct[-1, depth - 1, choice, images], sum(costs) / len(images)
        return Row(
            name,
            correct.float().mean().item(),
            spent,
            call,
            shares(depth - 1, range(1, last + 1)) if point.exit_threshold is not None else None,
            shares(choice, granularities) if point.policy else None,
            **against_fixed(correct, spent),
        )

    choices = {count: torch.full_like(images, granularities.index(count)) for count in tokens}
    rows = [row(f"fixed (t = {count})", choices[count], tokens=count) for count in tokens]
    rows += [
        row(f"early exit (t = {count}, τ = {threshold})", choices[count], tokens=count, exit_threshold=threshold)
        for count, threshold in product(tokens, thresholds)
    ]
    if answers.routed is not None:
        rows.append(row("router", answers.routed, policy="router"))
        rows += [
            row(f"router (τ = {threshold})", answers.routed, policy="router", exit_threshold=threshold)
            for threshold in thresholds
        ]
    oracle = oracle_row(model, answers)
    for name, value in against_fixed(on_grid.any(dim=0), oracle.gflops).items():
        setattr(oracle, name, value)
    return [*rows, oracle]


def paired_p_value(first: torch.Tensor, second: torch.Tensor) -> float:
    """
    McNemar's exact test, two-sided: how likely so unequal a split of the images on which only one of two is correct would
    be if both were equally good. (images,) bool each
    """
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    if only_first + only_second == 0:
        return 1.0
    return float(binomtest(only_first, only_first + only_second).pvalue)


def axis_rows(config: AdaPerceiverConfig, answers: Answers) -> list[dict[str, Any]]:
    """
    What each axis buys with the other two at their largest: every step up, and from the smallest to the largest, in points
    of accuracy, with the p-value of a paired test.
    """
    depths, rows = answers.correct.shape[1], []
    for axis, values, along in (
        ("tokens", config.token_granularities, answers.correct[-1, -1]),
        ("width", config.widths, answers.correct[:, -1, -1]),
        ("depth", range(1, depths + 1), answers.correct[-1, :, -1]),
    ):
        steps = [(index, index + 1) for index in range(len(values) - 1)]
        for low, high in [*steps, (0, len(values) - 1)] if len(steps) > 1 else steps:
            less, more = along[low], along[high]
            accuracies = [100 * one.float().mean().item() for one in (less, more)]
            row = {"axis": axis, "from": values[low], "to": values[high]}
            row |= {"accuracy_from": accuracies[0], "accuracy_to": accuracies[1]}
            rows.append({**row, "points": accuracies[1] - accuracies[0], "p_value": paired_p_value(more, less)})
    return rows


def grid_points(model: AdaPerceiverForImageClassification) -> list[tuple[int, int, int]]:
    """(width, depth, tokens) of the trained grid, in the order of `Answers.correct`."""
    config = model.config
    return list(product(config.widths, range(1, config.num_hidden_layers + 1), config.token_granularities))


def grid_gflops(model: AdaPerceiverForImageClassification) -> torch.Tensor:
    """(points,): GFLOPs per image of each of `grid_points`"""
    points = grid_points(model)
    return torch.tensor([model.flops(width=w, depth=d, tokens=t)["total"] / 1e9 for w, d, t in points])


def oracle_row(model: AdaPerceiverForImageClassification, answers: Answers) -> Row:
    """The oracle; an image that no point classifies correctly gets the cheapest one."""
    points, costs = grid_points(model), grid_gflops(model)
    correct = answers.correct.flatten(0, 2)  # (points, N)
    best = torch.where(correct, costs[:, None], float("inf")).argmin(dim=0)
    best = torch.where(correct.any(dim=0), best, costs.argmin())
    width, depth, tokens = zip(*(points[index] for index in best.tolist()))
    counts, last = model.config.token_granularities, model.config.num_hidden_layers
    return Row(
        "oracle",
        correct.any(dim=0).float().mean().item(),
        costs[best].mean().item(),
        Oracle(tokens, width, depth),
        shares(torch.tensor(depth) - 1, range(1, last + 1)),
        shares(torch.tensor([counts.index(count) for count in tokens]), counts),
    )


@torch.no_grad()
def time_rows(
    model: AdaPerceiverForImageClassification,
    rows: Sequence[Row],
    pixel_values: torch.Tensor,
    batch_size: int,
    repeats: int = 5,
) -> Iterator[int]:
    """
    Milliseconds per image of real calls, one image at a time and in batches. All rows take turns, so that a busy moment of
    the machine slows all of them; after every turn the rows hold the medians so far, and the number of turns is yielded.
    """

    def run(call: dict[str, Any] | Oracle, batch: int) -> None:
        for start in range(0, len(pixel_values), batch):
            images = slice(start, min(start + batch, len(pixel_values)))
            model(pixel_values[images], **({"policy": call.policy(images)} if isinstance(call, Oracle) else call))

    sizes = {"ms_batch_1": 1, "ms_large_batch": batch_size}
    times: dict[tuple[str, str], list[float]] = {(row.policy, name): [] for row in rows for name in sizes}
    with tqdm(total=repeats * len(rows), desc="times", unit="row") as bar:
        for turn in range(1, repeats + 1):
            for row in rows:
                for name, batch in sizes.items():
                    if turn == 1:  # the first call is slower
                        run(row.call, batch)
                    times[row.policy, name].append(milliseconds(lambda: run(row.call, batch)))  # noqa: B023
                    setattr(row, name, statistics.median(times[row.policy, name]) / len(pixel_values))
                bar.update()
            yield turn


def milliseconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return 1e3 * (time.perf_counter() - start)


def print_rows(rows: Sequence[Row], batch_size: int) -> None:
    batches = ("ms, batch 1", f"batch {batch_size}")
    print(
        f"{'policy':36} {'accuracy':>8} {'best fixed':>11} {'p-value':>8} {'GFLOPs':>9} {batches[0]:>12} {batches[1]:>10}"
    )
    for row in rows:
        times = [f"{value:.3f}" if value is not None else "" for value in (row.ms_batch_1, row.ms_large_batch)]
        fixed = "" if row.best_fixed is None else f"{row.best_fixed:.2%}"
        p_value = "" if row.p_value is None else f"{row.p_value:.1g}"
        print(
            f"{row.policy:36} {row.accuracy:8.2%} {fixed:>11} {p_value:>8} {row.gflops:9.4g} {times[0]:>12} {times[1]:>10}"
        )


def print_axes(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'axis':8} {'from':>5} {'to':>5} {'accuracy, %':>16} {'points':>8} {'p-value':>8}")
    for row in rows:
        accuracies = f"{row['accuracy_from']:.2f} to {row['accuracy_to']:.2f}"
        print(
            f"{row['axis']:8} {row['from']:5} {row['to']:5} {accuracies:>16} {row['points']:+8.2f} {row['p_value']:8.1g}"
        )
