"""
What a checkpoint scores at its operating points: a table, CSV, JSON and plots.

    python examples/evaluate_model.py --model checkpoints/adaperceiver-tiny-cifar10 --dataset path/to/cifar10
    python examples/evaluate_model.py --model MODEL --dataset path/to/ade20k --encoding ade20k --depths 21
    accelerate launch --multi_gpu --num_processes 8 examples/evaluate_model.py --model MODEL --dataset timm/imagenet-1k-wds

The task is that of the checkpoint. One encoding at each width serves all trained token counts and depths, so the whole grid
costs little more than one pass at each width. `--help` lists all options.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate import Accelerator
from tqdm.auto import tqdm
from transformers import AutoImageProcessor
from transformers.hf_argparser import HfArg

from adaperceiver.evaluation.grid import (
    SCORES,
    add_latency,
    check_grid,
    evaluate_classifier,
    evaluate_grid,
    metrics_for,
    pareto,
    print_rows,
    table_points,
    task_of,
)
from adaperceiver.evaluation.plots import draw_grid
from adaperceiver.evaluation.tables import write_table
from adaperceiver.tasks_adaperceiver import TASKS
from adaperceiver.training.arguments import Parser, command_line
from adaperceiver.training.cards import accuracy_table
from adaperceiver.training.checks import at_least, check_checkpoint, check_config, check_output
from adaperceiver.training.data import DataArguments, check_classes, load_scored, validation_batches
from adaperceiver.training.dense_data import (
    DenseDataArguments,
    check_samples,
    dense_validation_batches,
    load_dense_scored,
    mask_names,
)
from adaperceiver.training.devices import DeviceArguments


@dataclass
class EvaluationArguments:
    model: str = HfArg(help="A hub id or folder of an AdaPerceiver checkpoint with a head.")
    split: str | None = HfArg(
        default=None, help='By default the first of test, validation and val; "validation" is the one of the training.'
    )
    output: str = HfArg(default="runs/evaluation", help="Folder for the table and the plots.")
    tokens: list[int] | None = HfArg(
        default=None, help="Token counts, all trained ones by default; others need an encoding each."
    )
    widths: list[int] | None = HfArg(default=None, help="All trained ones by default.")
    depths: list[int] | None = HfArg(default=None, help="All by default.")
    exit_thresholds: list[float] = HfArg(
        default_factory=list, help="Add early exit at these confidences (classification)."
    )
    baselines: list[str] = HfArg(
        default_factory=list, help="Hub ids or folders of image classifiers, for rows of their own."
    )
    trust_remote_code: bool = HfArg(default=False, help="Run code that comes with a baseline.")
    batch_size: int = 64
    latency_batch_size: int = HfArg(
        default=0, help="Measure milliseconds per image in batches of this size; 0 measures nothing."
    )
    save_table: bool = HfArg(
        default=False, help="Save the scores into the checkpoint, for calls with a budget; needs --split validation."
    )

    def __post_init__(self):
        at_least(self, 1, "batch_size")
        at_least(self, 0, "latency_batch_size")
        check_output(self, "output")


@dataclass
class AnyDataArguments(DenseDataArguments, DataArguments):
    """Of data with labels, or with masks or depth maps."""

    crop: Literal["eigen", "none"] = HfArg(default="eigen", help="The part of depth maps that is scored.")


def load_batches(
    task: str, data: AnyDataArguments, args: EvaluationArguments, names: Sequence[str], accelerator: Accelerator
) -> Callable[[Any], Iterator[tuple[torch.Tensor, Any]]]:
    """A function from an image processor to batches of the data that are scored."""
    if task == "image-classification":
        dataset = load_scored(data, args.split)
        check_classes(dataset, data, args.model, len(names))
        return lambda processor: validation_batches(dataset, processor, args.batch_size, accelerator)
    dataset = load_dense_scored(data, task, args.split)
    if accelerator.is_main_process:
        check_samples(dataset, task, len(names) if task == "image-segmentation" else None)
    if task == "image-segmentation" and mask_names(dataset) != list(names):
        raise ValueError(
            f"--dataset {data.dataset} and --model {args.model} must have the same classes in this order."
        )
    return lambda processor: dense_validation_batches(dataset, processor, args.batch_size, accelerator, task)


def main(arguments: list[str]) -> None:
    args, data, devices = Parser([EvaluationArguments, AnyDataArguments, DeviceArguments]).parse(arguments)
    if args.save_table and args.split != "validation":
        raise ValueError(
            "--save_table needs --split validation: calls choose by the table, so it must not be of test images."
        )
    check_checkpoint("model", args.model, adaperceiver=True)
    config = check_config("model", {}, args.model)
    task = task_of(config, args.model)
    check_grid(config, args.tokens, args.widths, args.depths, args.exit_thresholds)
    for name in ("exit_thresholds", "baselines"):
        if getattr(args, name) and task != "image-classification":
            raise ValueError(f"--{name} are for classifiers, --model {args.model} is for {task}.")
    for name in args.baselines:
        check_checkpoint("baselines", name)
    accelerator, device = devices.accelerator()
    names = [config.id2label[index] for index in range(config.num_labels)]
    batches_of = load_batches(task, data, args, names, accelerator)
    model = getattr(transformers, TASKS[task].auto_class).from_pretrained(args.model).eval().to(accelerator.device)
    new_metric = metrics_for(task, config.num_labels, **({"crop": data.crop} if task == "depth-estimation" else {}))

    def batches(processor: Any, name: str) -> tqdm:
        return tqdm(batches_of(processor), name, unit="batch", disable=not accelerator.is_main_process)

    own = batches(AutoImageProcessor.from_pretrained(args.model), Path(args.model).name)
    options = (args.latency_batch_size, args.trust_remote_code)
    with device.autocast():
        rows = evaluate_grid(
            model, own, new_metric, accelerator, args.tokens, args.widths, args.depths, args.exit_thresholds
        )
        baselines = [
            evaluate_classifier(name, batches, new_metric(), accelerator, *options) for name in args.baselines
        ]
        if not accelerator.is_main_process:
            return
        if args.latency_batch_size:
            add_latency(model, rows, args.latency_batch_size)

    score, higher = SCORES[task].name, SCORES[task].higher_is_better
    folder, dataset = Path(args.output), Path(data.dataset).name
    write_table([*rows, *baselines], {"model": args.model, "dataset": dataset, "task": task}, folder, "results")
    drawn = draw_grid(rows, baselines, config.token_granularities, score, higher, folder)
    many = len(rows) > 40
    print(f"{len(rows)} operating points on {dataset}{'; the Pareto-optimal ones:' if many else ':'}")
    print_rows([*(pareto(rows, "gflops", score, higher) if many else rows), *baselines], score)
    if args.save_table:
        table = accuracy_table(score, table_points(rows, score), data.dataset, higher_is_better=higher)
        table.save_pretrained(args.model)
        print(f"The table is in {args.model}: calls with max_gflops or max_latency_ms are chosen by it.")
    print(f"results.csv, results.json, {', '.join(drawn)} are in {folder}.")


if __name__ == "__main__":
    command_line(main)
