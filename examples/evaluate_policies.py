"""
Which policy is right how often, at what cost? The paper's table, for any checkpoint and data set, with all costs counted.

    python examples/evaluate_policies.py --model runs/cifar10-router/final --dataset path/to/cifar10

Rows are fixed token counts, early exit, the router if the checkpoint has one, both together, and the oracle: for each image the
cheapest operating point that is still right. Probes and the router are in the GFLOPs, and times are those of real calls. Beside
each row stands what the best fixed configuration (tokens, width and depth) gets right that costs no more. Early exit is by the
checkpoint's temperatures, if it was calibrated. Prints a table, and writes CSV, JSON and plots to `--output`.
"""

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm.auto import tqdm
from transformers import AutoImageProcessor, HfArgumentParser

from adaperceiver import AdaPerceiverForImageClassification, AdaptiveConfig, OperatingPoint
from adaperceiver.adaptive_adaperceiver import interleaved
from adaperceiver.evaluation.grid import exits
from adaperceiver.policy_adaperceiver import Policy
from adaperceiver.training.data import DataArguments, check_classes, load_scored, validation_batches


@dataclass
class PolicyTableArguments:
    model: str = field(metadata={"help": "A hub id or folder of an image classifier of AdaPerceiver."})
    split: str | None = field(
        default=None,
        metadata={
            "help": 'By default the first of test, validation and val; "validation" are the images that training scripts '
            "validate on."
        },
    )
    output: str = field(default="runs/policies", metadata={"help": "Folder for the table and the plots."})
    tokens: list[int] | None = field(
        default=None, metadata={"help": "Fixed token counts, by default the trained ones."}
    )
    exit_thresholds: list[float] = field(
        default_factory=lambda: [0.8, 0.9, 0.95], metadata={"help": "The checkpoint's own is added, if it has one."}
    )
    batch_size: int = field(default=64, metadata={"help": "Also the larger batch that is timed."})
    timed_images: int = field(default=256, metadata={"help": "Images of each timed run; 0 times nothing."})


class Answers(NamedTuple):
    """What a model says of N images, over the trained grid."""

    right: torch.Tensor  # (widths, depths, granularities, N), bool
    confidence: torch.Tensor  # (depths, granularities, N), at full width
    routed: torch.Tensor | None  # (N,), indices of granularities


class Oracle(NamedTuple):
    """For each image the cheapest operating point that is still right: a policy that no one has who does not know the labels."""

    tokens: tuple[int, ...]
    width: tuple[int, ...]
    depth: tuple[int, ...]

    def policy(self, images: slice) -> Policy:
        """That of a batch of some of the images."""
        of_batch = {name: values[images] for name, values in self._asdict().items()}

        def choose(input_tokens: torch.Tensor, point: OperatingPoint) -> OperatingPoint:
            return point._replace(**of_batch)

        return choose


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
    best_fixed: float | None = None  # accuracy of the best fixed configuration that costs no more, if there is one


@torch.no_grad()
def collect(model: AdaPerceiverForImageClassification, batches: Any, accelerator: Accelerator) -> Answers:
    """One encoding at each width, on all processes."""
    parts = []
    for pixel_values, labels in tqdm(batches, "answers", unit="batch", disable=not accelerator.is_main_process):
        grids = [model.logits_grid(pixel_values, width=width).float() for width in model.config.widths]
        right = torch.stack([grid.argmax(dim=-1) == labels for grid in grids])
        temperatures = torch.tensor(model.adaptive_config.exit_temperatures or 1.0, device=labels.device)
        confidence = (grids[-1] / temperatures.view(-1, 1, 1, 1)).softmax(dim=-1).amax(dim=-1)
        router = model.adaperceiver.router
        routed = (
            None if router is None else router.logits(model.adaperceiver.embeddings(pixel_values)).argmax(dim=-1).cpu()
        )
        parts.append(Answers(right.cpu(), confidence.cpu(), routed))
    if accelerator.num_processes > 1:  # which took turns
        parts = [part for turn in zip_longest(*gather_object([parts])) for part in turn if part is not None]
    if not parts:
        raise SystemExit("There is nothing to evaluate on: the data set has no image that can be read.")
    right, confidence, routed = zip(*parts)
    return Answers(
        torch.cat(right, dim=-1), torch.cat(confidence, dim=-1), None if routed[0] is None else torch.cat(routed)
    )


def shares(values: torch.Tensor, names: Sequence[int]) -> dict[int, float]:
    counts = torch.bincount(values, minlength=len(names))
    return {name: count / len(values) for name, count in zip(names, counts.tolist())}


def policy_rows(
    model: AdaPerceiverForImageClassification,
    answers: Answers,
    tokens: Sequence[int],
    thresholds: Sequence[float],
) -> list[Row]:
    config, images = model.config, torch.arange(answers.right.shape[-1])
    granularities, depths = config.token_granularities, list(range(1, config.num_hidden_layers + 1))
    right, confidence, routed = answers.right[-1], answers.confidence, answers.routed  # at full width

    def gflops(count: int, depth: int, **call: Any) -> float:
        point = model.operating_point(tokens=count, **call)._replace(depth=depth)
        return model.flops_at(point, None, batch_size=1)["total"] / 1e9

    def leaving(choice: torch.Tensor, threshold: float, name: str, call: dict[str, Any]) -> Row:
        """Early exit where image n has granularity `choice[n]`."""
        at = exits(confidence[:, choice, images], threshold)
        costs = torch.tensor([[gflops(count, depth, **call) for count in granularities] for depth in depths])
        return Row(
            name,
            right[at, choice, images].float().mean().item(),
            costs[at, choice].mean().item(),
            call,
            shares(at, depths),
            shares(choice, granularities),
        )

    rows = []
    for count in tokens:
        of_count = right[-1, granularities.index(count)].float().mean().item()
        rows.append(Row(f"fixed (t = {count})", of_count, gflops(count, depths[-1]), {"tokens": count}))
    for count in tokens:
        choice = torch.full_like(images, granularities.index(count))
        for threshold in thresholds:
            call = {"exit_threshold": threshold}
            row = leaving(choice, threshold, f"early exit (t = {count}, τ = {threshold})", call)
            row.call = {"tokens": count, **call}
            rows.append(row)
    if routed is not None:
        costs = torch.tensor([gflops(count, depths[-1], policy="router") for count in granularities])
        of_router = right[-1, routed, images].float().mean().item()
        histogram = shares(routed, granularities)
        rows.append(Row("router", of_router, costs[routed].mean().item(), {"policy": "router"}, tokens=histogram))
        for threshold in thresholds:
            call = {"policy": "router", "exit_threshold": threshold}
            rows.append(leaving(routed, threshold, f"router (τ = {threshold})", call))
    rows.append(oracle_row(model, answers))
    of_grid, costs = answers.right.flatten(0, 2).float().mean(dim=1), grid_gflops(model)
    for row in rows:
        affordable = of_grid[costs <= row.gflops * (1 + 1e-6)]
        row.best_fixed = affordable.max().item() if len(affordable) else None
    return rows


def grid_gflops(model: AdaPerceiverForImageClassification) -> torch.Tensor:
    """(points,): those of one image at each point of the trained grid, in the order of `Answers.right`"""
    config = model.config
    points = product(config.widths, range(1, config.num_hidden_layers + 1), config.token_granularities)
    return torch.tensor(
        [model.flops(width=width, depth=depth, tokens=count)["total"] / 1e9 for width, depth, count in points]
    )


def oracle_row(model: AdaPerceiverForImageClassification, answers: Answers) -> Row:
    """The cheapest of all points where none is right."""
    config, costs = model.config, grid_gflops(model)
    right = answers.right.flatten(0, 2)  # (points, N)
    best = torch.where(right, costs[:, None], float("inf")).argmin(dim=0)
    best = torch.where(right.any(dim=0), best, costs.argmin())
    width, depth, tokens = torch.unravel_index(best, answers.right.shape[:3])
    depths = list(range(1, config.num_hidden_layers + 1))
    oracle = Oracle(
        *(
            tuple(values[index] for index in chosen.tolist())
            for values, chosen in ((config.token_granularities, tokens), (config.widths, width), (depths, depth))
        )
    )
    return Row(
        "oracle",
        right.any(dim=0).float().mean().item(),
        costs[best].mean().item(),
        oracle,
        shares(depth, depths),
        shares(tokens, config.token_granularities),
    )


def add_times(
    model: AdaPerceiverForImageClassification, rows: list[Row], pixel_values: torch.Tensor, size: int
) -> None:
    """Milliseconds an image of real calls on the first images, one at a time and in batches; all rows take turns."""

    def run(call: dict[str, Any] | Oracle, batch: int) -> None:
        for start in range(0, len(pixel_values), batch):
            part = slice(start, min(start + batch, len(pixel_values)))
            model(pixel_values[part], **({"policy": call.policy(part)} if isinstance(call, Oracle) else call))

    runs = {
        (row.policy, batch): lambda call=row.call, batch=batch: run(call, batch) for row in rows for batch in (1, size)
    }
    times = interleaved(runs, repeats=5, name="milliseconds")
    for row in rows:
        row.ms_batch_1 = times[row.policy, 1] / len(pixel_values)
        row.ms_large_batch = times[row.policy, size] / len(pixel_values)


def print_table(rows: Sequence[Row], batch_size: int) -> None:
    print(
        f"{'policy':36} {'right':>8} {'best fixed':>11} {'GFLOPs':>9} {'ms, batch 1':>12} {f'batch {batch_size}':>10}"
    )
    for row in rows:
        times = [f"{value:.3f}" if value is not None else "" for value in (row.ms_batch_1, row.ms_large_batch)]
        fixed = "" if row.best_fixed is None else f"{row.best_fixed:.2%}"
        print(f"{row.policy:36} {row.accuracy:8.2%} {fixed:>11} {row.gflops:9.4g} {times[0]:>12} {times[1]:>10}")


def write(rows: Sequence[Row], folder: Path, description: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    records = [{**vars(row), "call": None if isinstance(row.call, Oracle) else row.call} for row in rows]
    (folder / "policies.json").write_text(json.dumps({**description, "rows": records}, indent=1) + "\n")
    columns = ["policy", "accuracy", "best_fixed", "gflops", "ms_batch_1", "ms_large_batch"]
    with open(folder / "policies.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(records)


def draw(rows: Sequence[Row], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = {"fixed": "#3b6fb6", "early exit": "#c0504d", "router": "#4c9a6a"}
    figure, (left, middle, last) = plt.subplots(1, 3, figsize=(15, 4.5))
    for kind, color in kinds.items():
        part = [row for row in rows if row.policy.startswith(kind)]
        if part:
            left.scatter([row.gflops for row in part], [100 * row.accuracy for row in part], color=color, label=kind)
    oracle = rows[-1]  # so far above that the others would lie on one line
    left.set_title(f"oracle: {oracle.accuracy:.1%} at {oracle.gflops:.3g} GFLOPs", fontsize=10)
    left.set_xlabel("GFLOPs an image (mean)")
    left.set_ylabel("right, %")
    left.legend(fontsize=8)
    left.grid(alpha=0.3)
    for axes, name, label in (
        (middle, "exit_depths", "depth at which images leave"),
        (last, "tokens", "tokens of images"),
    ):
        part = [row for row in rows if getattr(row, name) and len([v for v in getattr(row, name).values() if v]) > 1]
        for row in part[-6:]:
            histogram = getattr(row, name)
            axes.plot(list(map(str, histogram)), list(histogram.values()), marker="o", ms=4, label=row.policy)
        axes.set_xlabel(label)
        axes.set_ylabel("share")
        axes.grid(alpha=0.3)
        if part:
            axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "policies.png", dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str]) -> None:
    parser = HfArgumentParser([PolicyTableArguments, DataArguments], allow_abbrev=False)
    args, data = parser.parse_args_into_dataclasses(list(arguments))
    accelerator = Accelerator()
    model = AdaPerceiverForImageClassification.from_pretrained(args.model).eval().to(accelerator.device)
    own = model.adaptive_config
    model.adaptive_config = AdaptiveConfig(attention=own.attention, exit_temperatures=own.exit_temperatures)
    thresholds = sorted({*args.exit_thresholds, own.exit_threshold} - {None})
    granularities = model.config.token_granularities
    tokens = granularities if args.tokens is None else args.tokens
    if not set(tokens) <= set(granularities):
        raise SystemExit(f"--tokens must be among {granularities}, got {tokens}.")
    processor = AutoImageProcessor.from_pretrained(args.model)
    dataset = load_scored(data, args.split)
    check_classes(dataset, data, args.model, model.config.num_labels)
    answers = collect(model, validation_batches(dataset, processor, args.batch_size, accelerator), accelerator)
    if not accelerator.is_main_process:
        return
    rows = policy_rows(model, answers, tokens, thresholds)
    if args.timed_images:
        first, _ = next(iter(validation_batches(dataset, processor, args.timed_images, Accelerator())))
        add_times(model, rows, first, args.batch_size)
    print_table(rows, args.batch_size)
    folder = Path(args.output)
    write(rows, folder, {"model": Path(args.model).name, "dataset": Path(data.dataset).name})
    draw(rows, folder)
    print(f"policies.csv, policies.json and policies.png are in {folder}.")


if __name__ == "__main__":
    main(sys.argv[1:])
