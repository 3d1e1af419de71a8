"""
    make demo

One checkpoint, 200 photographs, many budgets: the accuracy of AdaPerceiver at several operating points, what that costs, and how
long it takes on this machine. Nothing is downloaded. The figure goes to `--output`.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import transformers
from PIL import Image
from tqdm import tqdm
from transformers import pipeline
from transformers.hf_argparser import HfArg

from adaperceiver import AdaPerceiverForImageClassification, AdaPerceiverImageClassificationPipeline
from adaperceiver.adaptive_adaperceiver import interleaved
from adaperceiver.evaluation.grid import without_choices
from adaperceiver.evaluation.plots import draw_calls
from adaperceiver.training.arguments import Parser, command_line
from adaperceiver.training.checks import check_classifier, check_output, require


ROOT = Path(__file__).parents[1]
BATCH = 50


@dataclass
class Arguments:
    checkpoint: str = HfArg(
        default=str(ROOT / "checkpoints" / "adaperceiver-tiny-cifar10"), help="An image classifier."
    )
    samples: str = HfArg(default=str(ROOT / "examples" / "cifar10_samples.parquet"), help="Columns image and label.")
    output: str = HfArg(default="runs/demo", help="Folder for the figure.")

    def __post_init__(self):
        require(self, "a parquet file that exists", os.path.isfile, "samples")
        check_output(self, "output")


@dataclass
class Result:
    """What the pipeline said at one operating point."""

    call: dict[str, Any]
    accuracy: float
    gflops: float  # mean over the images: with early exit each has its own
    milliseconds: float = float("nan")  # per image, in batches

    @property
    def name(self) -> str:
        return name_of(self.call)


def name_of(call: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in call.items()) or "the full model"


def calls_for(model: AdaPerceiverForImageClassification) -> list[dict[str, Any]]:
    """Each axis by itself, two and all of them, early exit, and a budget."""
    tokens, widths = model.config.token_granularities, model.config.widths
    last, full = model.config.num_hidden_layers, model.flops()["total"] / 1e9
    fewer = [{"tokens": count} for count in tokens[-2::-1][:3]]
    narrower = [{"width": width} for width in widths[-2::-1][:2]]
    shallower = [{"depth": depth} for depth in (2 * last // 3, last // 3)]
    together = [{"tokens": tokens[0], "depth": last // 2}, {"tokens": tokens[0], "width": widths[0], "depth": 1}]
    early = [{"exit_threshold": threshold} for threshold in (0.95, 0.8)]
    return [{}, *fewer, *narrower, *shallower, *together, *early, {"max_gflops": float(f"{0.75 * full:.1g}")}]


def classify(classifier: pipeline, images: list[Image.Image], labels: list[str], call: dict[str, Any]) -> Result:
    found = classifier(images, **call, top_k=1, report=True, batch_size=BATCH)
    correct = [one["result"][0]["label"] == label for one, label in zip(found, labels)]
    gflops = [one["report"]["gflops"] for one in found]
    return Result(call, sum(correct) / len(correct), sum(gflops) / len(gflops))


def measure(classifier: pipeline, images: list[Image.Image], results: Sequence[Result]) -> None:
    """Milliseconds per image of the model alone, in batches; the operating points take turns."""
    pixel_values = classifier.image_processor(images, return_tensors="pt").pixel_values
    runs = {
        result.name: lambda call=result.call: [classifier.model(batch, **call) for batch in pixel_values.split(BATCH)]
        for result in results
    }
    times = interleaved(runs, repeats=5, name="milliseconds" if sys.stderr.isatty() else None)
    for result in results:
        result.milliseconds = times[result.name] / len(images)


def print_table(results: Sequence[Result]) -> None:
    print(f"{'classify(images, ...)':34} {'accuracy':>8} {'GFLOPs':>8} {'ms per image':>13}")
    for result in results:
        print(f"{result.name:34} {result.accuracy:8.1%} {result.gflops:8.3f} {result.milliseconds:13.2f}")


def print_images(
    classifier: pipeline, images: list[Image.Image], labels: list[str], calls: Sequence[dict[str, Any]]
) -> None:
    """One image at a time, as a user would ask."""
    print(f"\n{'image':12}" + "".join(f"{name_of(call):>22}" for call in calls))
    for image, label in zip(images, labels):
        best = [classifier(image, **call, top_k=1)[0] for call in calls]
        print(f"{label:12}" + "".join(f"{one['label'] + ' ' + format(one['score'], '.0%'):>22}" for one in best))


def main(arguments: list[str]) -> None:
    (args,) = Parser([Arguments]).parse(arguments)
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    check_classifier("checkpoint", args.checkpoint)
    samples = datasets.Dataset.from_parquet(args.samples)
    columns = {name: type(samples.features.get(name)) for name in ("image", "label")}
    if columns != {"image": datasets.Image, "label": datasets.ClassLabel} or not len(samples):
        raise ValueError(f"--samples {args.samples} must have images and their classes, got {samples.features}.")
    images = [image.convert("RGB") for image in samples["image"]]
    labels = [samples.features["label"].int2str(label) for label in samples["label"]]
    classifier = pipeline(
        "image-classification",
        model=args.checkpoint,
        pipeline_class=AdaPerceiverImageClassificationPipeline,
        device="cpu",
    )
    model = classifier.model
    model.adaptive_config = without_choices(model.adaptive_config)  # so that no argument means the full model
    config = model.config
    print(
        f"{Path(args.checkpoint).name}: {model.num_parameters() / 1e6:.1f} M parameters, trained for tokens "
        f"{config.token_granularities}, widths {config.widths}, depths 1 to {config.num_hidden_layers}.\n"
        f"{len(images)} images that it was not trained on:\n"
    )
    calls = tqdm(calls_for(model), "operating points", leave=False, disable=None)  # no bar without a terminal
    results = [classify(classifier, images, labels, call) for call in calls]
    measure(classifier, images, results)
    print_table(results)
    noise = 100 * (results[0].accuracy * (1 - results[0].accuracy) / len(images)) ** 0.5
    print(f"\nWith {len(images)} images, the standard error of an accuracy is about {noise:.1f} points.")
    step = max(len(images) // 6, 1)
    few = [{}, {"tokens": config.token_granularities[0]}, {"depth": 1}, {"exit_threshold": 0.8}]
    print_images(classifier, images[::step], labels[::step], few)
    figure = Path(args.output) / "accuracy.png"
    rows = [{"name": result.name, "gflops": result.gflops, "accuracy": result.accuracy} for result in results]
    draw_calls(rows, len(images), figure)
    print(f"\nAccuracy against compute is drawn in {figure}.")


if __name__ == "__main__":
    command_line(main)
