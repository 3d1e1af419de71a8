"""
What a model scores over a grid of operating points.

One encoding at each width serves all trained token counts and all depths: only what cannot be shared (token counts between
and beyond the trained ones) is encoded for itself. Early exit is read off the same logits.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import evaluate
import torch
from accelerate import Accelerator
from torch import nn


METRICS = Path(__file__).parent / "metrics"


class Task(NamedTuple):
    """How a task is scored."""

    auto_class: str
    metric: str  # a folder in metrics/
    score: str  # the one to choose operating points by
    higher_is_better: bool


TASKS = {
    "image-classification": Task("AutoModelForImageClassification", "top_k_accuracy", "top1", True),
    "image-segmentation": Task("AutoModelForSemanticSegmentation", "mean_iou", "mean_iou", True),
    "depth-estimation": Task("AutoModelForDepthEstimation", "depth_estimation", "rmse", False),
}


def metrics_for(task: str, num_labels: int, **options) -> Callable[[], Any]:
    """Makes metrics of the task, as many as are wanted. `options` are those of the metric, such as `crop`."""
    if task == "image-classification":
        options = {"k": [1, 5] if num_labels >= 5 else [1], **options}
    elif task == "image-segmentation":
        options = {"num_labels": num_labels, **options}
    first = evaluate.load(str(METRICS / TASKS[task].metric), **options)
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
        if hasattr(model, "predictions_grid"):
            for at, count, prediction in model.predictions_grid(pixel_values, counts, depths, width=width):
                yield count, at, prediction
        else:
            logits = model.logits_grid(pixel_values, counts, width=width, depth=max(depths))
            for at in depths:
                for count, of_count in zip(counts, logits[at - 1]):
                    yield count, at, of_count


def add(metric: Any, prediction: torch.Tensor, targets: torch.Tensor | Sequence[torch.Tensor]) -> None:
    """Add a batch to `metric`. Maps are held against targets in their own sizes, image by image where those differ."""
    if isinstance(targets, torch.Tensor):
        return metric.add_batch(predictions=prediction.float(), references=targets)
    sizes = {target.shape for target in targets}
    parts = zip(prediction.split(1), targets) if len(sizes) > 1 else [(prediction, torch.stack(list(targets)))]
    for maps, references in parts:
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
    A row for every operating point: tokens, width, depth, exit_threshold, mean gflops of an image, and its scores.

    By default at all trained token counts, widths and depths. `exit_thresholds` add rows of early exit at each token count
    and width, up to the largest depth.
    """
    config = model.config
    tokens = config.token_granularities if tokens is None else tokens
    widths = config.widths if widths is None else widths
    depths = range(1, config.num_hidden_layers + 1) if depths is None else depths
    last, depths = max(depths), sorted(depths)
    read_out = range(1, last + 1) if exit_thresholds else depths
    points = [Point(count, width, depth) for count in tokens for width in widths for depth in depths]
    points += [Point(count, width, last, at) for count in tokens for width in widths for at in exit_thresholds]
    metrics = {point: new_metric() for point in points}
    left = {
        point: torch.zeros(last, device=accelerator.device) for point in points if point.exit_threshold is not None
    }
    image_size = None
    for pixel_values, targets in batches:
        image_size = tuple(pixel_values.shape[-2:])
        for width in widths:
            by_tokens = {}
            for count, depth, prediction in predictions(model, pixel_values, tokens, width, read_out):
                if depth in depths:
                    add(metrics[Point(count, width, depth)], prediction, targets)
                if exit_thresholds:
                    by_tokens.setdefault(count, []).append(prediction)
            for count, of_depth in by_tokens.items():
                for threshold in exit_thresholds:
                    point = Point(count, width, last, threshold)
                    logits, exit_depth = leave(torch.stack(of_depth), threshold)
                    add(metrics[point], logits, targets)
                    left[point] += torch.bincount(exit_depth - 1, minlength=last)
    # The last batches may all be other processes' ones.
    sides = torch.tensor([image_size or (0, 0)], device=accelerator.device)
    image_size = tuple(accelerator.gather(sides).amax(dim=0).tolist())
    if image_size == (0, 0):
        raise SystemExit("There is nothing to evaluate on: the data set has no image that can be read.")
    rows = []
    for point, metric in metrics.items():
        scores = metric.compute(accelerator=accelerator)
        row = {**point._asdict(), "gflops": gflops(model, point, image_size)}
        if point in left:
            share = accelerator.reduce(left[point], "sum").cpu()
            share = share / share.sum()
            row["gflops"] = sum(
                part * gflops(model, point, image_size, exit_depth)
                for exit_depth, part in enumerate(share.tolist(), start=1)
            )
            row["mean_exit_depth"] = (share * torch.arange(1, last + 1)).sum().item()
        rows.append({**row, **scores})
    return rows


def exits(confidence: torch.Tensor, threshold: float) -> torch.Tensor:
    """(depths, batch) -> (batch,): the index of the first depth at which each image is sure enough, or of the last."""
    sure = confidence >= threshold
    sure[-1] = True
    return sure.int().argmax(dim=0)


def leave(logits: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(depths, batch, labels) -> the logits where each image's confidence first reaches the threshold, and these depths"""
    index = exits(logits.float().softmax(dim=-1).amax(dim=-1), threshold)
    return logits[index, torch.arange(logits.shape[1], device=logits.device)], index + 1


def gflops(model: nn.Module, point: Point, image_size: tuple[int, int], exit_depth: int | None = None) -> float:
    """Of one image; with early exit, of one that leaves after `exit_depth` blocks, the probes before it included."""
    settled = model.operating_point(**{name: value for name, value in point._asdict().items() if value is not None})
    settled = settled if exit_depth is None else settled._replace(depth=exit_depth)
    return model.flops_at(settled, image_size, batch_size=1)["total"] / 1e9


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
