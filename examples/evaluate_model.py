"""
What a checkpoint scores at its operating points: a table, CSV, JSON and plots.

    python examples/evaluate_model.py --model checkpoints/adaperceiver-tiny-cifar10 --dataset path/to/cifar10
    python examples/evaluate_model.py --model MODEL --dataset path/to/ade20k --encoding ade20k --depths 21
    accelerate launch --multi_gpu --num_processes 8 examples/evaluate_model.py --model MODEL --dataset timm/imagenet-1k-wds

The task is that of the checkpoint. One encoding at each width serves all trained token counts and depths, so the whole grid
costs little more than one pass at each width. `--help` lists all options.
"""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, HfArgumentParser

from adaperceiver import AccuracyTable, AdaptiveConfig
from adaperceiver.adaptive_adaperceiver import interleaved
from adaperceiver.evaluation.grid import TASKS, evaluate_grid, metrics_for, table_points
from adaperceiver.training.data import DataArguments, check_classes, load_scored, validation_batches
from adaperceiver.training.dense_data import (
    DenseDataArguments,
    check_samples,
    dense_validation_batches,
    load_dense_scored,
    mask_names,
)


@dataclass
class EvaluationArguments:
    model: str = field(metadata={"help": "A hub id or folder of an AdaPerceiver checkpoint with a head."})
    split: str | None = field(
        default=None,
        metadata={
            "help": 'By default the first of test, validation and val; "validation" are the images that training scripts '
            "validate on."
        },
    )
    output: str = field(default="runs/evaluation", metadata={"help": "Folder for the table and the plots."})
    tokens: list[int] | None = field(
        default=None,
        metadata={"help": "Token counts, all trained ones by default; others are encoded for themselves."},
    )
    widths: list[int] | None = field(default=None, metadata={"help": "All trained ones by default."})
    depths: list[int] | None = field(default=None, metadata={"help": "All by default."})
    exit_thresholds: list[float] = field(
        default_factory=list, metadata={"help": "Add early exit at these confidences (classification)."}
    )
    baselines: list[str] = field(
        default_factory=list, metadata={"help": "Hub ids or folders of image classifiers, for rows of their own."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with a baseline."})
    batch_size: int = 64
    latency_batch_size: int = field(
        default=0, metadata={"help": "Measure milliseconds an image for batches of this size; 0 leaves them out."}
    )
    save_table: bool = field(
        default=False,
        metadata={
            "help": "Save the scores into the checkpoint, where budgets are spent by them; needs --split validation."
        },
    )


@dataclass
class DataChoice(DenseDataArguments):
    """Classification has `label` columns, the dense tasks masks or depth maps; the rest is the same."""

    label_column: str | None = field(default=None, metadata={"help": "By default label, labels, cls or fine_label."})
    streaming: bool = field(default=False, metadata={"help": "Fetch what is evaluated alone (classification)."})
    crop: str = field(
        default="eigen", metadata={"help": "The part of depth maps that is scored.", "choices": ["eigen", "none"]}
    )

    def for_classification(self) -> DataArguments:
        return DataArguments(**{name: getattr(self, name) for name in vars(DataArguments()) if hasattr(self, name)})


def task_of(config: Any, name: str) -> str:
    classes = {getattr(transformers, task.auto_class): key for key, task in TASKS.items()}
    for auto_class, key in classes.items():
        head = auto_class._model_mapping.get(type(config), None)
        if head is not None and head.__name__ in (config.architectures or []):
            return key
    raise SystemExit(
        f"--model {name} must be a checkpoint with a head for {', '.join(TASKS)}, it is {config.architectures}."
    )


def load_data(
    task: str, data: DataChoice, args: EvaluationArguments, names: Sequence[str], accelerator: Accelerator
) -> Callable[[Any], Iterator[tuple[torch.Tensor, Any]]]:
    """A function from an image processor to batches of the data that are scored."""
    if task == "image-classification":
        classification = data.for_classification()
        dataset = load_scored(classification, args.split)
        check_classes(dataset, classification, args.model, len(names))
        return lambda processor: validation_batches(dataset, processor, args.batch_size, accelerator)
    kind = "segmentation" if task == "image-segmentation" else "depth"
    dataset = load_dense_scored(data, kind, args.split)
    if accelerator.is_main_process:
        check_samples(dataset, kind, len(names) if kind == "segmentation" else None)
    if kind == "segmentation" and mask_names(dataset) != list(names):
        raise SystemExit(
            f"--dataset {data.dataset} and --model {args.model} must have the same classes in the same order."
        )
    return lambda processor: dense_validation_batches(dataset, processor, args.batch_size, accelerator, kind)


def add_latency(
    model: torch.nn.Module, rows: list[dict[str, Any]], batch_size: int, image_size: tuple[int, int]
) -> None:
    """
    Milliseconds an image. Every block costs the same, so two depths are measured and the others lie on a line. Those of early
    exit depend on the images: they get none.
    """
    rows = [row for row in rows if row["exit_threshold"] is None]
    pixel_values = torch.randn(batch_size, 3, *image_size, device=model.device, dtype=model.dtype)
    last = max(row["depth"] for row in rows)
    points = {(row["tokens"], row["width"], depth) for row in rows for depth in (1, last)}
    runs = {
        (tokens, width, depth): lambda at=(tokens, width, depth): model(
            pixel_values, tokens=at[0], width=at[1], depth=at[2]
        )
        for tokens, width, depth in sorted(points)
    }
    times = interleaved(runs, repeats=5, name="milliseconds")
    for row in rows:
        first, whole = (times[row["tokens"], row["width"], depth] for depth in (1, last))
        row["ms"] = (first + (whole - first) * (row["depth"] - 1) / max(last - 1, 1)) / batch_size


@torch.no_grad()
def evaluate_baseline(
    name: str, args: EvaluationArguments, batches_of: Callable, new_metric: Callable, accelerator: Accelerator
) -> dict[str, Any]:
    """A row for any image classifier of transformers, with its own preprocessing."""
    with accelerator.main_process_first():
        options = {"trust_remote_code": args.trust_remote_code}
        model = AutoModelForImageClassification.from_pretrained(name, attn_implementation="eager", **options)
        processor = AutoImageProcessor.from_pretrained(name, **options)
    model, metric, image = model.eval().to(accelerator.device), new_metric(), None
    for pixel_values, labels in tqdm(batches_of(processor), Path(name).name, disable=not accelerator.is_main_process):
        metric.add_batch(predictions=model(pixel_values).logits.float(), references=labels)
        image = pixel_values[:1]
    row = {"model": Path(name).name, **metric.compute(accelerator=accelerator)}
    if image is not None:
        with FlopCounterMode(display=False) as counter:  # counts eager attention, not torch's fused one on CPUs
            model(image)
        row["gflops"] = counter.get_total_flops() / 1e9
        if args.latency_batch_size:
            batch = image.expand(args.latency_batch_size, -1, -1, -1).contiguous()
            row["ms"] = interleaved({name: lambda: model(batch)}, repeats=5)[name] / args.latency_batch_size
    return row


def pareto(rows: Sequence[dict[str, Any]], cost: str, score: str, higher_is_better: bool) -> list[dict[str, Any]]:
    """The rows that no cheaper one equals, from the cheapest to the dearest."""
    front, sign = [], 1 if higher_is_better else -1
    for row in sorted(rows, key=lambda row: (row[cost], -sign * row[score])):
        if not front or sign * row[score] > sign * front[-1][score]:
            front.append(row)
    return front


def name_of(row: dict[str, Any]) -> str:
    threshold = row.get("exit_threshold")
    point = f"{row['tokens']} tokens, width {row['width']}, depth {row['depth']}" if "tokens" in row else row["model"]
    return point if threshold is None else f"{point}, exit at {threshold}"


def print_rows(rows: Sequence[dict[str, Any]], score: str) -> None:
    print(f"{'':48} {score:>9} {'GFLOPs':>9} {'ms':>8}")
    for row in rows:
        time = f"{row['ms']:8.2f}" if "ms" in row else f"{'':8}"
        print(f"{name_of(row):48} {row[score]:9.4f} {row['gflops']:9.4g} {time}")


def draw(
    rows: Sequence[dict[str, Any]],
    baselines: Sequence[dict[str, Any]],
    trained: Sequence[int],
    task: str,
    folder: Path,
) -> list[str]:
    """The plots that the rows allow; their names."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    score, higher = TASKS[task].score, TASKS[task].higher_is_better
    fixed, early = ([row for row in rows if (row["exit_threshold"] is not None) == exits] for exits in (False, True))
    largest = {axis: max(row[axis] for row in fixed) for axis in ("tokens", "width", "depth")}
    largest["tokens"] = max(count for count in trained if count <= largest["tokens"]) if trained else largest["tokens"]
    drawn = []

    def save(figure: Any, name: str) -> None:
        figure.tight_layout()
        figure.savefig(folder / name, dpi=120)
        plt.close(figure)
        drawn.append(name)

    costs = [cost for cost in ("gflops", "ms") if all(cost in row for row in fixed)]
    figure, panels = plt.subplots(1, len(costs), figsize=(6 * len(costs), 4.5), squeeze=False)
    for cost, axes in zip(costs, panels[0]):
        measured = [row for row in rows if cost in row]
        for part, color, label in ((fixed, "#9fb6d6", "all points"), (early, "#c0504d", "early exit")):
            part = [row for row in part if cost in row]
            if part:
                axes.scatter([row[cost] for row in part], [row[score] for row in part], s=12, color=color, label=label)
        front = pareto(measured, cost, score, higher)
        axes.plot([row[cost] for row in front], [row[score] for row in front], color="#1f3f77", label="Pareto front")
        for row in baselines:
            if cost in row:
                axes.scatter(row[cost], row[score], marker="*", s=90, label=row["model"])
        axes.set_xlabel("GFLOPs an image" if cost == "gflops" else "ms an image")
        axes.set_ylabel(score)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    save(figure, "pareto.png")

    def lines(x: str, by: str, fixed_axis: str, name: str, rows: Sequence[dict[str, Any]]) -> None:
        """One line for each value of `by`, over `x`, where the third axis is at its largest."""
        rows = [row for row in rows if row[fixed_axis] == largest[fixed_axis]]
        if len({row[x] for row in rows}) < 2:
            return
        figure, axes = plt.subplots(figsize=(6, 4.5))
        for value in sorted({row[by] for row in rows}):
            line = sorted((row for row in rows if row[by] == value), key=lambda row: row[x])
            axes.plot([row[x] for row in line], [row[score] for row in line], marker="o", ms=4, label=f"{by} {value}")
        axes.set_xlabel(x)
        axes.set_ylabel(score)
        axes.set_title(f"{fixed_axis} {largest[fixed_axis]}")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
        save(figure, name)

    on_grid = [row for row in fixed if row["tokens"] in trained]
    lines("tokens", "width", "depth", "tokens_width.png", on_grid)
    lines("depth", "tokens", "width", "tokens_depth.png", on_grid)

    between = sorted(
        (row for row in fixed if all(row[axis] == largest[axis] for axis in ("width", "depth"))),
        key=lambda r: r["tokens"],
    )
    if any(row["tokens"] not in trained for row in between):
        figure, axes = plt.subplots(figsize=(6, 4.5))
        axes.plot([row["tokens"] for row in between], [row[score] for row in between], color="#9fb6d6")
        for known, label, color in ((True, "trained", "#1f3f77"), (False, "not trained", "#c0504d")):
            part = [row for row in between if (row["tokens"] in trained) == known]
            axes.scatter(
                [row["tokens"] for row in part], [row[score] for row in part], label=label, color=color, zorder=3
            )
        axes.set_xlabel("tokens")
        axes.set_ylabel(score)
        axes.set_title("interpolation and extrapolation")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
        save(figure, "extrapolation.png")
    return drawn


def write(rows: Sequence[dict[str, Any]], description: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps({**description, "rows": rows}, indent=1) + "\n")
    columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list)))
    with open(folder / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def main(arguments: Sequence[str]) -> None:
    args, data = HfArgumentParser([EvaluationArguments, DataChoice], allow_abbrev=False).parse_args_into_dataclasses(
        list(arguments)
    )
    if args.save_table and args.split != "validation":
        raise SystemExit(
            "--save_table needs --split validation: calls choose by the table, so it must not be of test images."
        )
    accelerator = Accelerator()
    config = AutoConfig.from_pretrained(args.model)
    task = task_of(config, args.model)
    if args.exit_thresholds and task != "image-classification":
        raise SystemExit(f"--exit_thresholds need a classifier, --model {args.model} is for {task}.")
    if args.baselines and task != "image-classification":
        raise SystemExit(f"--baselines are image classifiers, --model {args.model} is for {task}.")
    model = getattr(transformers, TASKS[task].auto_class).from_pretrained(args.model).eval().to(accelerator.device)
    # What the checkpoint would do by default, early exit say, has no part in the grid.
    model.adaptive_config = AdaptiveConfig(attention=model.adaptive_config.attention)
    for name, values in (("tokens", args.tokens), ("width", args.widths), ("depth", args.depths)):
        for value in values or ():
            model.operating_point(**{name: value})  # an error says what is allowed
    names = [config.id2label[index] for index in range(config.num_labels)]
    batches_of = load_data(task, data, args, names, accelerator)
    processor = AutoImageProcessor.from_pretrained(args.model)
    options = {"crop": data.crop} if task == "depth-estimation" else {}
    new_metric = metrics_for(task, config.num_labels, **options)
    seen = []

    def batches() -> Iterator[tuple[torch.Tensor, Any]]:
        bar = tqdm(batches_of(processor), Path(args.model).name, unit="batch", disable=not accelerator.is_main_process)
        for pixel_values, targets in bar:
            seen[:] = [tuple(pixel_values.shape[-2:])]
            yield pixel_values, targets

    rows = evaluate_grid(
        model, batches(), new_metric, accelerator, args.tokens, args.widths, args.depths, args.exit_thresholds
    )
    baselines = [evaluate_baseline(name, args, batches_of, new_metric, accelerator) for name in args.baselines]
    if not accelerator.is_main_process:
        return
    if args.latency_batch_size:
        add_latency(model, rows, args.latency_batch_size, seen[0])
    score, higher = TASKS[task].score, TASKS[task].higher_is_better
    folder, dataset = Path(args.output), Path(data.dataset).name
    write([*rows, *baselines], {"model": args.model, "dataset": dataset, "task": task}, folder)
    drawn = draw(rows, baselines, config.token_granularities, task, folder)
    front = pareto(rows, "gflops", score, higher)
    print(
        f"{len(rows)} operating points on {dataset}; those that no cheaper one equals:" if len(rows) > 40 else dataset
    )
    print_rows([*(front if len(rows) > 40 else rows), *baselines], score)
    if args.save_table:
        table = AccuracyTable(f"{score} on the validation data of {dataset}", table_points(rows, score), higher)
        table.save_pretrained(args.model)
        print(f"The table is in {args.model}: calls with max_gflops or max_latency_ms are chosen by it.")
    print(f"results.csv, results.json, {', '.join(drawn)} are in {folder}.")


if __name__ == "__main__":
    main(sys.argv[1:])
