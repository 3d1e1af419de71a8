"""
What a model scores over a grid of operating points.

One encoding at each width serves all trained token counts and all depths: only what cannot be shared (token counts between
and beyond the trained ones) is encoded separately. Early exit is read off the same logits: `exit_depths` says who exits where.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import evaluate
import torch
import transformers
from accelerate import Accelerator
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..adaptive_adaperceiver import AdaptiveConfig, OperatingPoint, check_field, interleaved
from ..tasks_adaperceiver import TASKS


METRICS = Path(__file__).parent / "metrics"


class Score(NamedTuple):
    """How a task is scored."""

    metric: str  # a folder in metrics/
    name: str  # of the score to choose operating points by
    higher_is_better: bool


SCORES = {
    "image-classification": Score("top_k_accuracy", "top1", True),
    "image-segmentation": Score("mean_iou", "mean_iou", True),
    "depth-estimation": Score("depth_estimation", "rmse", False),
}


def check_grid(
    config: Any,
    tokens: Sequence[int] | None = None,
    widths: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    exit_thresholds: Sequence[float] = (),
) -> None:
    """Raise on what no model of `config` runs at, or where nothing is left to run."""
    for name, values in (("tokens", tokens), ("width", widths), ("depth", depths)):
        if values is not None and not len(values):
            raise ValueError(f"`{name}` must be at least one value, got none.")
        for value in values or ():
            check_field(name, value, config)
    for threshold in exit_thresholds:
        check_field("exit_threshold", threshold, config)


def task_of(config: Any, name: str) -> str:
    """The task of the head that the checkpoint `name` was saved with."""
    for task in SCORES:
        if TASKS[task].model_class in (config.architectures or []):
            return task
    raise ValueError(
        f"--model {name} must be a checkpoint with a head for {', '.join(SCORES)}, it is {config.architectures}."
    )


def metrics_for(task: str, num_labels: int, **options) -> Callable[[], Any]:
    """A function that makes metrics of the task. `options` are those of the metric, such as `crop`."""
    if task == "image-classification":
        options = {"k": [1, 5] if num_labels >= 5 else [1], **options}
    elif task == "image-segmentation":
        options = {"num_labels": num_labels, **options}
    first = evaluate.load(str(METRICS / SCORES[task].metric), **options)
    return lambda: type(first)(**options)


class Point(NamedTuple):
    tokens: int
    width: int
    depth: int
    exit_threshold: float | None = None


def predictions(
    model: nn.Module, pixel_values: torch.Tensor, tokens: Sequence[int], width: int, depths: Sequence[int]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """`(tokens, depth, prediction)` at all of `tokens` and, in ascending order, of `depths`."""
    trained = sorted(set(tokens) & set(model.config.token_granularities))
    apart = [[count] for count in tokens if count not in trained]
    for counts in [trained, *apart] if trained else apart:
        for depth, count, prediction in model.predictions_grid(pixel_values, counts, depths, width=width):
            yield count, depth, prediction


def add(metric: Any, prediction: torch.Tensor, targets: torch.Tensor | Sequence[torch.Tensor]) -> None:
    """Add a batch to `metric`. Maps are compared with targets in their own sizes, image by image where those differ."""
    if isinstance(targets, torch.Tensor):
        return metric.add_batch(predictions=prediction.float(), references=targets)
    sizes = {target.shape for target in targets}
    pairs = zip(prediction.split(1), targets) if len(sizes) > 1 else [(prediction, torch.stack(list(targets)))]
    for maps, references in pairs:
        references = references if references.ndim == 3 else references[None]
        maps = maps.float() if maps.ndim == 4 else maps.float()[:, None]
        if maps.shape[-2:] != references.shape[-2:]:
            maps = nn.functional.interpolate(maps, references.shape[-2:], mode="bilinear", align_corners=False)
        metric.add_batch(predictions=maps, references=references)


@torch.no_grad()
def evaluate_grid(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, Any]],
    new_metric: Callable[[], Any],
    accelerator: Accelerator,
    tokens: Sequence[int] | None = None,
    widths: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    exit_thresholds: Sequence[float] = (),
) -> list[dict[str, Any]]:
    """
    A row for every operating point: tokens, width, depth, exit_threshold, image_size, mean gflops per image, and scores.

    By default at all trained token counts, widths and depths. `exit_thresholds` add rows of early exit at each token count
    and width, up to the largest depth, with the probes and temperatures of `model.adaptive_config`.
    """
    config = model.config
    tokens = config.token_granularities if tokens is None else tokens
    widths = config.widths if widths is None else widths
    depths = range(1, config.num_hidden_layers + 1) if depths is None else depths
    check_grid(config, tokens, widths, depths, exit_thresholds)
    last, depths = max(depths), sorted(depths)
    read_out = range(1, last + 1) if exit_thresholds else depths
    points = [Point(count, width, depth) for count in tokens for width in widths for depth in depths]
    points += [Point(count, width, last, at) for count in tokens for width in widths for at in exit_thresholds]
    metrics = {point: new_metric() for point in points}
    resolved = {point: resolve(model, point) for point in points}
    exits = {
        point: torch.zeros(last, device=accelerator.device) for point in points if point.exit_threshold is not None
    }
    image_size = None
    for pixel_values, targets in batches:
        image_size = tuple(pixel_values.shape[-2:])
        for width in widths:
            by_tokens: dict[int, list[torch.Tensor]] = {}
            for count, depth, prediction in predictions(model, pixel_values, tokens, width, read_out):
                if depth in depths:
                    add(metrics[Point(count, width, depth)], prediction, targets)
                if exit_thresholds:
                    by_tokens.setdefault(count, []).append(prediction)
            for count, of_depth in by_tokens.items():
                for threshold in exit_thresholds:
                    point = Point(count, width, last, threshold)
                    logits, exit_depth = early_exit(torch.stack(of_depth), resolved[point])
                    add(metrics[point], logits, targets)
                    exits[point] += torch.bincount(exit_depth - 1, minlength=last)
    # All images of the last batches may be those of other processes.
    sides = torch.tensor([image_size or (0, 0)], device=accelerator.device)
    image_size = tuple(accelerator.gather(sides).amax(dim=0).tolist())
    if image_size == (0, 0):
        raise ValueError("There is nothing to evaluate on: the data set has no image that can be read.")
    rows = []
    for point, metric in metrics.items():
        scores = metric.compute(accelerator=accelerator)
        row = {**point._asdict(), "image_size": list(image_size), "gflops": gflops(model, resolved[point], image_size)}
        if point in exits:
            share = accelerator.reduce(exits[point], "sum").cpu()
            share = share / share.sum()
            row["gflops"] = sum(
                fraction * gflops(model, resolved[point], image_size, exit_depth)
                for exit_depth, fraction in enumerate(share.tolist(), start=1)
            )
            row["mean_exit_depth"] = (share * torch.arange(1, last + 1)).sum().item()
        rows.append({**row, **scores})
    return rows


# ------------------------------------------------------------------------------------------------------------ early exit


def without_choices(own: AdaptiveConfig) -> AdaptiveConfig:
    """What a checkpoint says of attention, probes and temperatures, without what chooses an operating point."""
    kept = ("attention", "exit_after", "exit_every", "exit_temperatures")
    return AdaptiveConfig(**{name: getattr(own, name) for name in kept})


def resolve(model: nn.Module, point: Point) -> OperatingPoint:
    """`point` as the model runs it, whatever the checkpoint chooses by default."""
    threshold = False if point.exit_threshold is None else point.exit_threshold
    return model.operating_point(policy="fixed", **{**point._asdict(), "exit_threshold": threshold})


def confidences(logits: torch.Tensor, temperatures: Sequence[float] | None) -> torch.Tensor:
    """What the model's probes see, one depth after another from the first: (depths, ..., labels) -> (depths, ...)"""
    logits = logits.float()
    if temperatures:
        scale = torch.tensor(temperatures[: len(logits)], device=logits.device)
        logits = logits / scale.view(-1, *[1] * (logits.ndim - 1))
    return logits.softmax(dim=-1).amax(dim=-1)


def exit_depths(confidence: torch.Tensor, point: OperatingPoint) -> torch.Tensor:
    """
    The depth at which each image exits in a call at `point`: the first probe that reaches its threshold, or the last depth.
    `confidence` (depths, images) is that of `confidences`, at depths 1 to `point.depth`.
    """
    exits = torch.zeros_like(confidence, dtype=torch.bool)
    for depth in point.probe_depths():
        exits[depth - 1] = confidence[depth - 1] >= point.exit_threshold
    exits[-1] = True
    return exits.int().argmax(dim=0) + 1


def early_exit(logits: torch.Tensor, point: OperatingPoint) -> tuple[torch.Tensor, torch.Tensor]:
    """(depths, images, labels) -> each image's logits where it exits in a call at `point`, and these depths"""
    depth = exit_depths(confidences(logits, point.exit_temperatures), point)
    return logits[depth - 1, torch.arange(logits.shape[1], device=logits.device)], depth


# ------------------------------------------------------------------------------------------------------------------ costs


def gflops(
    model: nn.Module, point: OperatingPoint, image_size: tuple[int, int] | None, exit_depth: int | None = None
) -> float:
    """Per image; with early exit, of one that exits after `exit_depth` blocks, the probes before it included."""
    point = point if exit_depth is None else point._replace(depth=exit_depth)
    return model.flops_at(point, image_size, batch_size=1)["total"] / 1e9


def add_latency(model: nn.Module, rows: list[dict[str, Any]], batch_size: int) -> None:
    """
    Add `ms` per image, in batches. Every block takes the same time, so two depths are measured and the others interpolated.
    Rows of early exit get none: their time depends on the images.
    """
    rows = [row for row in rows if row["exit_threshold"] is None]
    sides = rows[0]["image_size"]
    pixel_values = torch.randn(batch_size, 3, *sides, device=model.device, dtype=model.dtype)
    last = max(row["depth"] for row in rows)
    points = {Point(row["tokens"], row["width"], depth) for row in rows for depth in (1, last)}
    runs = {point: partial(model, pixel_values, operating_point=resolve(model, point)) for point in points}
    times = interleaved(runs, repeats=5, name="milliseconds")
    for row in rows:
        first, whole = (times[Point(row["tokens"], row["width"], depth)] for depth in (1, last))
        row["ms"] = (first + (whole - first) * (row["depth"] - 1) / max(last - 1, 1)) / batch_size


# ------------------------------------------------------------------------------------------------------------ other models


@torch.no_grad()
def evaluate_classifier(
    name: str,
    batches_of: Callable[[Any, str], Iterable[tuple[torch.Tensor, torch.Tensor]]],
    metric: Any,
    accelerator: Accelerator,
    latency_batch_size: int = 0,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """
    A row for any image classifier of transformers. `batches_of` gets its image processor, and its name for a progress bar.
    """
    options, label, image = {"trust_remote_code": trust_remote_code}, Path(name).name, None
    with accelerator.main_process_first():  # eager attention, since torch does not count its fused one on CPUs
        auto_class = transformers.AutoModelForImageClassification
        model = auto_class.from_pretrained(name, attn_implementation="eager", **options).eval().to(accelerator.device)
        processor = transformers.AutoImageProcessor.from_pretrained(name, **options)
    for pixel_values, labels in batches_of(processor, label):
        metric.add_batch(predictions=model(pixel_values).logits.float(), references=labels)
        image = pixel_values[:1]
    row = {"model": label, **metric.compute(accelerator=accelerator)}
    if image is not None:
        with FlopCounterMode(display=False) as counter:
            model(image)
        row["gflops"] = counter.get_total_flops() / 1e9
        if latency_batch_size:
            batch = image.expand(latency_batch_size, -1, -1, -1).contiguous()
            row["ms"] = interleaved({name: lambda: model(batch)}, repeats=5)[name] / latency_batch_size
    return row


# ------------------------------------------------------------------------------------------------------------- summaries


def pareto(rows: Sequence[dict[str, Any]], cost: str, score: str, higher_is_better: bool) -> list[dict[str, Any]]:
    """The Pareto-optimal rows, from cheapest to most expensive."""
    front: list[dict[str, Any]] = []
    sign = 1 if higher_is_better else -1
    for row in sorted(rows, key=lambda row: (row[cost], -sign * row[score])):
        if not front or sign * row[score] > sign * front[-1][score]:
            front.append(row)
    return front


def print_rows(rows: Sequence[dict[str, Any]], score: str) -> None:
    print(f"{'':48} {score:>9} {'GFLOPs':>9} {'ms':>8}")
    for row in rows:
        time = f"{row['ms']:8.2f}" if "ms" in row else f"{'':8}"
        print(f"{name_of(row):48} {row[score]:9.4f} {row['gflops']:9.4g} {time}")


def name_of(row: dict[str, Any]) -> str:
    if "tokens" not in row:
        return row["model"]
    point = f"{row['tokens']} tokens, width {row['width']}, depth {row['depth']}"
    return point if row["exit_threshold"] is None else f"{point}, exit at {row['exit_threshold']}"


def along_axes(rows: Sequence[dict[str, Any]], score: str) -> dict[str, Any]:
    """The score of the largest operating point, and along each axis from there."""
    axes = ("tokens", "width", "depth")
    rows = [row for row in rows if row["exit_threshold"] is None]
    largest = {axis: max(row[axis] for row in rows) for axis in axes}

    def line(axis: str) -> dict[str, float]:
        others = [other for other in axes if other != axis]
        on_line = [row for row in rows if all(row[other] == largest[other] for other in others)]
        return {str(row[axis]): row[score] for row in sorted(on_line, key=lambda row: row[axis])}

    lines = {axis: line(axis) for axis in axes}
    found = {score: lines["tokens"][str(largest["tokens"])]}
    return found | {f"{score}_by_{axis}": values for axis, values in lines.items() if len(values) > 1}


def table_points(rows: Sequence[dict[str, Any]], score: str) -> list[dict[str, Any]]:
    """The rows as an `AccuracyTable` takes them: without those of early exit, which have no fixed cost."""
    axes = ("tokens", "width", "depth")
    return [
        {**{axis: row[axis] for axis in axes}, "value": round(row[score], 4)}
        for row in rows
        if row["exit_threshold"] is None
    ]
