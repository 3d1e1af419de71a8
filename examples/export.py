"""
A checkpoint for runtimes other than PyTorch: one operating point as one network, or a bundle that stays adaptive.

    python examples/export.py MODEL --format onnx --tokens 64 --width 416 --depth 12 --output runs/small
    python examples/export.py MODEL --format openvino --int8 --calibration path/to/images --dataset path/to/labelled
    python examples/export.py MODEL --bundle --output runs/bundle

MODEL is a hub id or a folder, with any head. What is left out of tokens, width and depth is taken from the checkpoint's
`adaptive_config`, or else the full model's. The output appears when it has been run and gives what PyTorch gives, or not at
all; beside it are the preprocessing, and how large the differences were. `--dataset` scores it beside PyTorch.

Needs `pip install -e ".[onnx]"` for ONNX and for bundles, `".[openvino]"` for OpenVINO and for `--int8`.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from evaluate_model import AnyDataArguments, EvaluationArguments, load_batches
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoImageProcessor

import adaperceiver
from adaperceiver.evaluation.grid import SCORES, task_of
from adaperceiver.training.arguments import Parser, command_line
from adaperceiver.training.checks import at_least


@dataclass
class ExportArguments:
    model: str = field(metadata={"help": "A hub id or folder of an AdaPerceiver checkpoint; the first argument."})
    output: str = field(default="runs/export", metadata={"help": "Folder for the export; an older one is replaced."})
    format: str = field(default="onnx", metadata={"help": "Of one network.", "choices": ["onnx", "openvino", "torch"]})
    bundle: bool = field(default=False, metadata={"help": "All operating points, over one copy of the weights."})
    tokens: int | None = field(default=None, metadata={"help": "Number of latents of one network."})
    width: int | None = field(default=None, metadata={"help": "Width of the FFNs of one network."})
    depth: int | None = field(default=None, metadata={"help": "Number of blocks of one network."})
    depths: list[int] = field(
        default_factory=list, metadata={"help": "Depths of a bundle beside the last one and those of --exit_every."}
    )
    exit_after: int | None = field(
        default=None, metadata={"help": "First depth (and probe) of a bundle; the checkpoint's, or 1."}
    )
    exit_every: int | None = field(default=None, metadata={"help": "Blocks between them; the checkpoint's, or 1."})
    dynamic_size: bool = field(default=False, metadata={"help": "Leave the image size of one ONNX network open."})
    int8: bool = field(default=False, metadata={"help": "Products with weights in int8; needs --calibration."})
    calibration: str | None = field(default=None, metadata={"help": "Images to calibrate on: as --dataset."})
    calibration_split: str | None = field(
        default="train", metadata={"help": "Of --calibration; its images need labels, as those of --dataset."}
    )
    calibration_images: int = 256
    max_drop: float = field(
        default=0.005, metadata={"help": "Share of images that early exit of an int8 bundle may lose."}
    )
    runtime: str = field(
        default="onnxruntime", metadata={"help": "That checks a bundle.", "choices": ["onnxruntime", "openvino"]}
    )
    split: str | None = field(default=None, metadata={"help": "Of --dataset; the first of test, validation and val."})
    max_loss: float = field(default=0.5, metadata={"help": "Points of the score that int8 may lose on --dataset."})
    batch_size: int = 16
    threads: int | None = field(default=None, metadata={"help": "Of the runtime, while it is compared."})

    def __post_init__(self):
        at_least(self, 1, "calibration_images", "batch_size")
        if self.int8 != (self.calibration is not None):
            raise ValueError("--int8 and --calibration go together: int8 needs images to calibrate on.")
        if self.bundle and any(value is not None for value in (self.tokens, self.width, self.depth)):
            raise ValueError("--tokens, --width and --depth are of one network; a --bundle has all operating points.")
        if not self.bundle and (self.depths or self.exit_after or self.exit_every):
            raise ValueError("--depths, --exit_after and --exit_every are of a --bundle.")
        if self.bundle and self.dynamic_size:
            raise ValueError("--dynamic_size is for one network; a --bundle has the image size of its preprocessing.")


@dataclass
class ExportDataArguments(AnyDataArguments):
    dataset: str | None = field(
        default=None, metadata={"help": "Labelled data to score the export on, beside PyTorch."}
    )


def main(arguments: list[str]) -> None:
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    args, data = Parser([ExportArguments, ExportDataArguments]).parse(arguments)
    deployment = load_deployment()
    torch.manual_seed(0)
    model = load_model(args.model)
    processor = AutoImageProcessor.from_pretrained(args.model)
    folder = Path(args.output)
    if args.bundle:
        model.adaptive_config = model.adaptive_config.update(exit_after=args.exit_after, exit_every=args.exit_every)

    def load_data(dataset: str, split: str | None) -> Callable[[], Iterator[tuple[torch.Tensor, Any]]]:
        names = [model.config.id2label[index] for index in range(model.config.num_labels)]
        evaluation = EvaluationArguments(model=args.model, split=split, batch_size=args.batch_size)
        task = task_of(model.config, args.model)
        batches = load_batches(task, replace(data, dataset=dataset), evaluation, names, Accelerator(cpu=True))
        return lambda: tqdm(batches(processor), Path(dataset).name, unit="batch")

    # Read before anything takes long.
    scored = None if data.dataset is None else load_data(data.dataset, args.split)
    images = None
    if args.calibration is not None:
        count = -(-args.calibration_images // args.batch_size)
        images = list(islice(load_data(args.calibration, args.calibration_split)(), count))
    with deployment.export.whole_folder(folder, deployment.export.REPORT) as incomplete:
        write = write_bundle if args.bundle else write_network
        report, score = write(args, deployment, model, processor, incomplete, images)
        if scored is not None:
            task = task_of(model.config, args.model)
            options = {"crop": data.crop} if task == "depth-estimation" else {}
            report["scores"] = score(scored(), task, **options)
            print_scores(report["scores"], SCORES[task].name)
            check_scores(report["scores"], task, args)
        deployment.export.write_report(incomplete, report, processor)
    size = sum(path.stat().st_size for path in folder.rglob("*"))
    print(
        f"{folder}: {size / 1e6:.1f} MB, differs from PyTorch by {report['largest_difference']:.1e} at most "
        f"({report['relative_difference']:.2%} of the outputs' deviation)"
    )


def load_deployment() -> Any:
    """The package, with what it needs beside PyTorch."""
    try:
        for name in ("export", "bundle", "scores", "session"):
            importlib.import_module(f"adaperceiver.deployment.{name}")
        return adaperceiver.deployment
    except ImportError as error:
        raise ValueError(
            f'{error}. Run: pip install -e ".[onnx]", for OpenVINO and int8 ".[onnx,openvino]".'
        ) from error


def load_model(name: str) -> adaperceiver.AdaPerceiverPreTrainedModel:
    """The checkpoint in the class that it was saved with, in float32."""
    architecture = (AutoConfig.from_pretrained(name).architectures or [""])[0]
    model_class = getattr(adaperceiver, architecture, None)
    if model_class is None:
        raise ValueError(
            f"--model {name} must be a checkpoint of AdaPerceiver, it is of {architecture or 'no class'}."
        )
    return model_class.from_pretrained(name, dtype=torch.float32).eval()


def write_network(
    args: ExportArguments, deployment: Any, model: Any, processor: Any, folder: Path, images: list | None
) -> tuple[dict[str, Any], Callable]:
    """Export one operating point: what there is to report of it, and a function that scores it."""
    point = model.operating_point(tokens=args.tokens, width=args.width, depth=args.depth)
    network = model.extract(tokens=args.tokens, width=args.width, depth=args.depth)
    image_size = deployment.export.size_of(processor, model.config.image_size)
    print(f"{args.format} of {point.tokens} tokens, width {point.width}, depth {point.depth}", flush=True)
    *calibration, held_out = (None, None) if images is None else [pixel_values for pixel_values, _ in images]
    calibration = calibration or [held_out]
    samples = None if images is None else calibration
    deployment.export.export(network, folder, args.format, image_size, args.dynamic_size, samples)
    predict = deployment.export.load(folder, args.threads)
    compared = deployment.export.verify(network, predict, image_size, args.dynamic_size, held_out)
    report = {
        **describe(args, model),
        "format": args.format,
        **{axis: getattr(point, axis) for axis in ("tokens", "width", "depth")},
        "gflops": model.flops_at(point, image_size, 1)["total"] / 1e9,
        "image_size": None if args.dynamic_size else list(image_size),
        **compared,
    }
    return report, lambda *data, **options: deployment.scores.score_network(network, predict, *data, **options)


def write_bundle(
    args: ExportArguments, deployment: Any, model: Any, processor: Any, folder: Path, images: list | None
) -> tuple[dict[str, Any], Callable]:
    """Export all operating points: what there is to report of them, and a function that scores them."""
    samples, held_out = None, None
    if images is not None:
        samples, held_out = [pixel_values for pixel_values, _ in images], images[-1][0]
    deployment.bundle.write_bundle(
        model, processor, folder, args.depths, samples, lambda text: print(text, flush=True)
    )
    session = deployment.session.AdaptiveSession(folder, args.runtime, args.threads)
    report = {**describe(args, model), "format": "bundle", **deployment.bundle.verify_bundle(model, session, held_out)}
    if images is not None and model.exits_early:
        report["early_exit"] = deployment.scores.recalibrate(model, session, images, args.max_drop)
        deployment.bundle.write_manifest(session.manifest, folder)

    def score(*data: Any, **options: Any) -> list[dict[str, Any]]:
        session.manifest["scores"] = deployment.scores.score_bundle(model, session, *data, **options)
        deployment.bundle.write_manifest(session.manifest, folder)
        return session.manifest["scores"]

    return report, score


def describe(args: ExportArguments, model: Any) -> dict[str, Any]:
    return {
        "model": args.model,
        "model_class": type(model).__name__,
        "int8": args.int8,
        "calibration": args.calibration,
        "labels": [model.config.id2label[index] for index in range(model.config.num_labels)],
    }


def print_scores(rows: list[dict[str, Any]], name: str) -> None:
    print(f"{name:48} {'PyTorch':>9} {'exported':>9}")
    for row in rows:
        where = ", ".join(
            f"{key} {value}" for key, value in row.items() if key not in ("pytorch", "exported") and value
        )
        print(f"{where or 'the network':48} {row['pytorch']:9.4f} {row['exported']:9.4f}")


def check_scores(rows: list[dict[str, Any]], task: str, args: ExportArguments) -> None:
    """Scores of fixed points must not lose more than --max_loss points (hundredths; of depth, per cent of the error)."""
    higher = SCORES[task].higher_is_better
    for row in rows:
        lost = row["pytorch"] - row["exported"] if higher else row["exported"] / row["pytorch"] - 1
        if not row.get("exit_threshold") and not 100 * lost <= args.max_loss:
            raise ValueError(
                f"The export loses {100 * lost:.2f} points, more than --max_loss {args.max_loss:g}: {row}."
            )


if __name__ == "__main__":
    command_line(main)
