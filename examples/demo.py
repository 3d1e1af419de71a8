"""
    make demo

One checkpoint, 200 photographs, many budgets: the accuracy of AdaPerceiver at several operating points, what that costs, and how
long it takes on this machine. Nothing is downloaded. The picture goes to `--output`.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import transformers
from PIL import Image
from tqdm import tqdm
from transformers import AutoConfig, AutoImageProcessor, pipeline
from transformers.hf_argparser import HfArg

import adaperceiver
from adaperceiver import AdaPerceiverForImageClassification, AdaPerceiverImageClassificationPipeline
from adaperceiver.adaptive_adaperceiver import interleaved
from adaperceiver.evaluation.grid import without_choices
from adaperceiver.evaluation.poster import Strip, draw_poster, exit_strips, map_strip
from adaperceiver.evaluation.style import save
from adaperceiver.training.arguments import Parser, command_line
from adaperceiver.training.checks import check_classifier, check_output, require
from adaperceiver.training.devices import DeviceArguments


ROOT = Path(__file__).parents[1]
BATCH = 64
SHARES = (0.15, 0.25, 0.35, 0.5, 0.7)  # of the full model's FLOPs
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95)


@dataclass
class Arguments:
    checkpoint: str = HfArg(
        default=str(ROOT / "checkpoints" / "adaperceiver-tiny-cifar10"), help="An image classifier."
    )
    samples: str = HfArg(default=str(ROOT / "examples" / "cifar10_samples.parquet"), help="Columns image and label.")
    maps: list[str] = HfArg(
        default_factory=list, help="Checkpoints for segmentation or depth, whose maps are shown as well."
    )
    output: str = HfArg(default="runs/demo", help="Folder for the picture.")

    def __post_init__(self):
        require(self, "a parquet file that exists", os.path.isfile, "samples")
        check_output(self, "output")


@dataclass
class Result:
    """What the pipeline said at one operating point."""

    call: dict[str, Any]
    answers: list[dict[str, Any]]  # one per photograph: result and report
    accuracy: float
    milliseconds: float = float("nan")  # per image, in batches

    @property
    def name(self) -> str:
        return name_of(self.call)

    @property
    def gflops(self) -> float:
        return sum(one["report"]["gflops"] for one in self.answers) / len(self.answers)


def name_of(call: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in call.items()) or "the full model"


def calls_for(model: AdaPerceiverForImageClassification) -> dict[str, list[dict[str, Any]]]:
    """Named series of calls: budgets up to the full model, early exit, and the router if there is one."""
    config, full = model.config, model.flops()["total"] / 1e9
    cheapest = model.flops(tokens=config.token_granularities[0], width=config.widths[0], depth=1)["total"] / 1e9
    budgets = [1.01 * cheapest, *(share * full for share in SHARES if share * full > cheapest)]
    series = {"best fixed point within a budget": [*({"max_gflops": float(f"{one:.3g}")} for one in budgets), {}]}
    series["early exit"] = [{"exit_threshold": threshold} for threshold in THRESHOLDS]
    if model.adaperceiver.router is not None:
        series["router"] = [{"policy": "router"}, {"policy": "router", "exit_threshold": 0.9}]
    return series


def classify(classifier: pipeline, images: list[Image.Image], labels: list[str], call: dict[str, Any]) -> Result:
    answers = classifier(images, **call, top_k=1, report=True, batch_size=BATCH)
    correct = [one["result"][0]["label"] == label for one, label in zip(answers, labels)]
    return Result(call, answers, sum(correct) / len(correct))


def measure(classifier: pipeline, images: list[Image.Image], results: Sequence[Result]) -> None:
    """Milliseconds per image of the model alone, in batches; the operating points take turns."""
    pixel_values = classifier.image_processor(images[: 2 * BATCH], return_tensors="pt").pixel_values.to(
        classifier.device
    )
    runs = {
        result.name: lambda call=result.call: [classifier.model(batch, **call) for batch in pixel_values.split(BATCH)]
        for result in results
    }
    times = interleaved(runs, repeats=5, name="milliseconds" if sys.stderr.isatty() else None)
    for result in results:
        result.milliseconds = times[result.name] / len(pixel_values)


def print_table(series: dict[str, list[Result]]) -> None:
    print(f"{'classify(photographs, ...)':38} {'accuracy':>8} {'GFLOPs':>8} {'ms per image':>13}")
    for result in chain(*series.values()):
        print(f"{result.name:38} {result.accuracy:8.1%} {result.gflops:8.3f} {result.milliseconds:13.2f}")


def print_photographs(labels: list[str], results: Sequence[Result], count: int = 6) -> None:
    """What some photographs are taken for at several operating points."""
    print(f"\n{'photograph':26}" + "".join(f"{result.name:>28}" for result in results))
    for index in range(0, len(labels), len(labels) // count):
        best = [result.answers[index]["result"][0] for result in results]
        row = "".join(f"{one['label'][:21] + ' ' + format(one['score'], '.0%'):>28}" for one in best)
        print(f"{labels[index]:26}{row}")


def maps_of(folder: str, photograph: Image.Image) -> Strip:
    config = AutoConfig.from_pretrained(folder)
    model = getattr(adaperceiver, config.architectures[0]).from_pretrained(folder).eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    return map_strip(model, processor, photograph, config.token_granularities[-5:])


def main(arguments: list[str]) -> None:
    args, devices = Parser([Arguments, DeviceArguments]).parse(arguments)
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    check_classifier("checkpoint", args.checkpoint)
    samples = datasets.Dataset.from_parquet(args.samples)
    columns = {name: type(samples.features.get(name)) for name in ("image", "label")}
    if columns != {"image": datasets.Image, "label": datasets.ClassLabel} or not len(samples):
        raise ValueError(f"--samples {args.samples} must have images and their classes, got {samples.features}.")
    images = [image.convert("RGB") for image in samples["image"]]
    labels = [samples.features["label"].int2str(label) for label in samples["label"]]
    device = devices.start()
    classifier = pipeline(
        "image-classification",
        model=args.checkpoint,
        pipeline_class=AdaPerceiverImageClassificationPipeline,
        device=device.device,
    )
    model, name = classifier.model, Path(args.checkpoint).name
    model.adaptive_config = without_choices(model.adaptive_config)  # so that no argument means the full model
    config = model.config
    print(
        f"{name}: {model.num_parameters() / 1e6:.1f} M parameters, trained for tokens {config.token_granularities}, widths "
        f"{config.widths}, depths 1 to {config.num_hidden_layers}.\n{len(images)} photographs that it was not trained on:\n"
    )
    calls = calls_for(model)
    bar = tqdm(total=sum(map(len, calls.values())), desc="operating points", leave=False, disable=None)
    series: dict[str, list[Result]] = {}
    with device.autocast():
        for kind, of_kind in calls.items():
            for call in of_kind:
                series.setdefault(kind, []).append(classify(classifier, images, labels, call))
                bar.update()
        bar.close()
        measure(classifier, images, [*chain(*series.values())])
    print_table(series)
    budgets, early = series["best fixed point within a budget"], series["early exit"]
    full = budgets[-1]
    noise = 100 * (full.accuracy * (1 - full.accuracy) / len(images)) ** 0.5
    print(f"\nWith {len(images)} photographs, the standard error of an accuracy is about {noise:.1f} points.")
    print_photographs(labels, [budgets[0], budgets[len(budgets) // 2], full])

    correct = [index for index, one in enumerate(early[-1].answers) if one["result"][0]["label"] == labels[index]]
    strips = exit_strips(
        [images[index] for index in correct],
        [labels[index] for index in correct],
        [early[-1].answers[index]["report"]["exit_depth"] for index in correct],
        config.num_hidden_layers,
    )
    strips += [maps_of(folder, images[0]) for folder in args.maps]
    curves = {
        kind: [{"gflops": one.gflops, "accuracy": one.accuracy} for one in results] for kind, results in series.items()
    }
    picture = Path(args.output) / "demo.png"
    save(draw_poster(curves, len(images), strips, f"{name}: one checkpoint, many budgets"), picture)
    print(f"\nThe picture is {picture}.")


if __name__ == "__main__":
    command_line(main)
