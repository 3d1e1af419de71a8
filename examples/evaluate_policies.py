"""
How accurate is each policy, at what cost? The paper's table, for any checkpoint and data set, with all costs counted.

    python examples/evaluate_policies.py --model runs/cifar10-router/final --dataset path/to/cifar10

Rows are fixed token counts, early exit, the router if the checkpoint has one, both together, and the oracle: for each image the
cheapest operating point with a correct prediction. Probes and the router are in the GFLOPs, and times are those of real calls.
*Best fixed* is the accuracy of the best fixed configuration (tokens, width and depth) within the GFLOPs of the row. Early exit
follows the checkpoint's probes and temperatures. A second table says what tokens, width and depth buy, step by step. P-values are those of
McNemar's paired test: against the best fixed configuration, and of a step up. Accuracies are written to `--output` first, times as they are measured.
"""

from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from transformers import AutoImageProcessor
from transformers.hf_argparser import HfArg

from adaperceiver import AdaPerceiverForImageClassification
from adaperceiver.evaluation.grid import without_choices
from adaperceiver.evaluation.plots import draw_policies
from adaperceiver.evaluation.policies import (
    COLUMNS,
    axis_rows,
    check_tokens,
    collect,
    policy_rows,
    print_axes,
    print_rows,
    time_rows,
)
from adaperceiver.evaluation.tables import write_table
from adaperceiver.training.arguments import Parser, command_line
from adaperceiver.training.checks import at_least, check_classifier, check_output, require
from adaperceiver.training.data import DataArguments, check_classes, load_scored, validation_batches
from adaperceiver.training.devices import DeviceArguments


@dataclass
class PolicyTableArguments:
    model: str = HfArg(help="A hub id or folder of an image classifier of AdaPerceiver.")
    split: str | None = HfArg(
        default=None, help='By default the first of test, validation and val; "validation" is the one of the training.'
    )
    output: str = HfArg(default="runs/policies", help="Folder for the table and the plots.")
    tokens: list[int] | None = HfArg(default=None, help="Fixed token counts, by default the trained ones.")
    exit_thresholds: list[float] = HfArg(
        default_factory=lambda: [0.8, 0.9, 0.95], help="The checkpoint's own is added, if it has one."
    )
    batch_size: int = HfArg(default=64, help="Also the size of the larger batch that is timed.")
    timed_images: int = HfArg(default=256, help="Images of each timed run; 0 times nothing.")

    def __post_init__(self):
        at_least(self, 1, "batch_size")
        at_least(self, 0, "timed_images")
        require(self, "from 0 to 1", lambda values: all(0 <= one <= 1 for one in values), "exit_thresholds")
        require(self, "at least one", len, "tokens")
        check_output(self, "output")


def main(arguments: list[str]) -> None:
    args, data, devices = Parser([PolicyTableArguments, DataArguments, DeviceArguments]).parse(arguments)
    config = check_classifier("model", args.model)
    tokens = config.token_granularities if args.tokens is None else args.tokens
    check_tokens(tokens, config)
    dataset = load_scored(data, args.split)
    check_classes(dataset, data, args.model, config.num_labels)
    accelerator, device = devices.accelerator()
    model = AdaPerceiverForImageClassification.from_pretrained(args.model).eval().to(accelerator.device)
    own = model.adaptive_config
    model.adaptive_config = without_choices(own)
    thresholds = sorted({*args.exit_thresholds, *([own.exit_threshold] if own.exit_threshold else [])})
    processor = AutoImageProcessor.from_pretrained(args.model)
    with device.autocast():
        answers = collect(model, validation_batches(dataset, processor, args.batch_size, accelerator), accelerator)
    if not accelerator.is_main_process:
        return

    rows = policy_rows(model, answers, tokens, thresholds)
    folder, description = Path(args.output), {"model": Path(args.model).name, "dataset": Path(data.dataset).name}

    def write(turns: int) -> None:
        records = [row.record() for row in rows]
        write_table(records, {**description, "timed_turns": turns}, folder, "policies", COLUMNS)

    write(0)
    axes = axis_rows(model.config, answers)
    write_table(axes, description, folder, "axes")
    draw_policies([row.record() for row in rows], folder / "policies.png")
    print_rows(rows, args.batch_size)
    print()
    print_axes(axes)
    print(f"policies.csv, axes.csv (both as .json, too) and policies.png are in {folder}.", flush=True)
    if args.timed_images:
        first, _ = next(iter(validation_batches(dataset, processor, args.timed_images, Accelerator())))
        with device.autocast():
            for turns in time_rows(model, rows, first, args.batch_size):
                write(turns)
        print()
        print_rows(rows, args.batch_size)


if __name__ == "__main__":
    command_line(main)
