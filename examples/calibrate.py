"""
Find the exit threshold that keeps the accuracy of the full model, and save a checkpoint that exits early by it.

    python examples/calibrate.py --model MODEL --dataset path/to/images --max_drop 0.005 --output runs/calibrated

It reads the validation images; give the `--holdout` of the training, so that the model was not trained on them. One fifth of
them fits a temperature for each depth. Two fifths find the lowest threshold at which early exit loses at most `--max_drop` of
the images (the full model is correct, early exit is not), with probability `--confidence`. The last two fifths, which had no
part in this, say what it gives. `--output` gets the checkpoint with an `adaptive_config.json` by which every call exits early;
with `--no_save_threshold` the threshold is only printed.

`--scale_classifier` first divides the classifier by the temperature of the full model, so that its scores mean what they say.
"""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoImageProcessor
from transformers.hf_argparser import HfArg

from adaperceiver import AdaPerceiverForImageClassification
from adaperceiver.evaluation.calibration import calibrate, collect, scale_classifier
from adaperceiver.evaluation.grid import check_grid, without_choices
from adaperceiver.training.arguments import Parser, command_line
from adaperceiver.training.checks import at_least, check_classifier, check_output, require
from adaperceiver.training.data import DataArguments, check_classes, load_splits, validation_batches
from adaperceiver.training.devices import DeviceArguments


@dataclass
class CalibrationArguments:
    model: str = HfArg(help="A hub id or folder of an image classifier of AdaPerceiver.")
    output: str = HfArg(
        default="runs/calibrated",
        help="Folder for the calibrated checkpoint; the folder of --model to write into that one.",
    )
    max_drop: float = HfArg(default=0.005, help="Share of images that may be lost against the full model, 0 to 1.")
    confidence: float = HfArg(default=0.95, help="Probability with which that holds.")
    tokens: int | None = HfArg(default=None, help="By default all.")
    width: int | None = HfArg(default=None, help="By default all.")
    temperatures: bool = HfArg(default=True, help="Fit a temperature for each depth first.")
    scale_classifier: bool = HfArg(
        default=False, help="Divide the classifier by the temperature of the full model first."
    )
    save_threshold: bool = HfArg(default=True, help="Save threshold and temperatures, so that every call exits early.")
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self):
        require(self, "between 0 and 1", lambda value: 0 < value < 1, "max_drop", "confidence")
        at_least(self, 1, "batch_size", "tokens", "width")
        at_least(self, 0, "seed")
        check_output(self, "output")


def main(arguments: list[str]) -> None:
    args, data, devices = Parser([CalibrationArguments, DataArguments, DeviceArguments]).parse(arguments)
    config = check_classifier("model", args.model)
    check_grid(config, None if args.tokens is None else [args.tokens], None if args.width is None else [args.width])
    _, dataset = load_splits(data)
    check_classes(dataset, data, args.model, config.num_labels)
    accelerator, device = devices.accelerator()
    model = AdaPerceiverForImageClassification.from_pretrained(args.model).eval().to(accelerator.device)
    processor = AutoImageProcessor.from_pretrained(args.model)
    own = model.adaptive_config
    model.adaptive_config = without_choices(own)
    point = model.operating_point(tokens=args.tokens, width=args.width)
    batches = validation_batches(dataset, processor, args.batch_size, accelerator)
    with device.autocast():
        logits, labels = collect(model, batches, point.tokens, point.width)
    if args.scale_classifier:
        temperature, before, after = scale_classifier(model, logits[-1], labels, args.seed)
        logits = logits / temperature
        print(f"Classifier divided by {temperature:.3f}: expected calibration error {before:.2%}, now {after:.2%}.")
    found = calibrate(model, logits, labels, point, args.max_drop, args.confidence, args.temperatures, args.seed)
    print(found)

    early = {"exit_threshold": found.exit_threshold, "exit_temperatures": found.exit_temperatures or False}
    chosen = {"tokens": args.tokens, "width": args.width, **early}
    model.adaptive_config = own.update(**chosen) if args.save_threshold else own
    if Path(args.output).resolve() == Path(args.model).resolve() and not args.scale_classifier:
        model.adaptive_config.save_pretrained(args.output)  # the only file that changes
    else:
        model.save_pretrained(args.output)
        processor.save_pretrained(args.output)
    exits = (
        "every call exits early, unless it says otherwise" if args.save_threshold else "no call exits early by default"
    )
    print(f"The calibrated checkpoint is in {args.output}: {exits}.")


if __name__ == "__main__":
    command_line(main)
