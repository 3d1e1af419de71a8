"""
A checkpoint's labels, masks or depth maps for a data set of any size, as parquet files.

    python examples/predict.py MODEL --dataset path/to/images --output predictions --max_gflops 0.5
    accelerate launch --multi_gpu --num_processes 8 examples/predict.py MODEL --dataset path/to/parquet --output predictions
    accelerate launch examples/predict.py MODEL --dataset timm/imagenet-1k-wds --split validation --streaming --exit_threshold 0.9

Each row says which image it is of, what was predicted, and where the model ran. The same command again goes on after a kill,
with any number of processes. Images that cannot be read get a row with an `error`, and are listed in `unreadable.csv`.
`--help` lists all options.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import transformers
from accelerate import InitProcessGroupKwargs
from datasets import Dataset, Image, IterableDataset
from transformers import AutoImageProcessor
from transformers.hf_argparser import HfArg

from adaperceiver.adaptive_adaperceiver import check_field
from adaperceiver.deployment.export import size_of
from adaperceiver.deployment.predict import Predictor, fingerprint, on_main_process, predict, record_call, summarize
from adaperceiver.evaluation.grid import task_of, without_choices
from adaperceiver.tasks_adaperceiver import TASKS
from adaperceiver.training.arguments import Parser, check_processes, command_line
from adaperceiver.training.checkpointing import lock
from adaperceiver.training.checks import at_least, check_checkpoint, check_config, check_output
from adaperceiver.training.data import load_any
from adaperceiver.training.devices import DeviceArguments


ADAPTIVE = ("tokens", "width", "depth", "attention", "exit_threshold", "policy", "max_gflops")


@dataclass
class PredictionArguments:
    model: str = HfArg(help="A hub id or folder of an AdaPerceiver checkpoint with a head; the first argument.")
    dataset: str = HfArg(help="A hub id, an image folder, a parquet file or folder, or *.tar shards.")
    output: str = HfArg(default="runs/predictions", help="Folder for the predictions; all nodes must share it.")
    dataset_config: str | None = HfArg(default=None, help="Configuration name of a hub data set.")
    split: str | None = HfArg(default=None, help="Needed where the data set has several.")
    image_column: str | None = HfArg(default=None, help="By default the first column of images.")
    id_column: str | None = HfArg(
        default=None, help="Names of the images; by default id, image_id or __key__, if any."
    )
    streaming: bool = HfArg(default=False, help="Read the data as a stream; nothing is stored but the predictions.")
    shard_size: int = HfArg(
        default=1024, help="Images of one file of predictions: at most so many are lost by a kill."
    )
    batch_size: int | None = HfArg(default=None, help="Of one process: 64 for classifiers, else 8.")
    workers: int = HfArg(default=2, help="Threads of each process that decode images.")
    tokens: int | None = HfArg(default=None, help="These and the next are what a call takes; see AdaptiveConfig.")
    width: int | None = None
    depth: int | None = None
    attention: str | None = None
    exit_threshold: float | None = None
    policy: str | None = None
    max_gflops: float | None = HfArg(default=None, help="Per image: the best configuration within this budget.")
    checkpoint_choices: bool = HfArg(
        default=True,
        help="Start from the checkpoint's adaptive_config.json; --no_checkpoint_choices from the full model.",
    )

    def __post_init__(self):
        at_least(self, 1, "shard_size", "batch_size", "workers")
        check_output(self, "output")


def load_images(args: PredictionArguments) -> Dataset | IterableDataset:
    """The columns `image` (not decoded) and, if there is one, `id`."""
    splits = load_any(args.dataset, args.dataset_config, streaming=args.streaming)
    name = args.split or (next(iter(splits)) if len(splits) == 1 else None)
    if name not in splits:
        raise ValueError(f"--split must be one of {list(splits)} of --dataset {args.dataset}, got {args.split}.")
    features = splits[name].features or {}
    image = args.image_column or next((one for one, kind in features.items() if isinstance(kind, Image)), None)
    known = args.id_column or next((one for one in ("id", "image_id", "__key__") if one in features), None)
    for option, column in (("image_column", image), *([("id_column", known)] if known else [])):
        if column not in features:
            raise ValueError(f"--{option} must be one of the columns {list(features)}, got {column}.")
    names = {old: new for old, new in ((image, "image"), (known, "id")) if old}
    # In this order: a stream decodes what it renames.
    rows = splits[name].cast_column(image, Image(decode=False)).select_columns(list(names))
    if isinstance(rows, Dataset) and len(rows) == 0:
        raise ValueError(f"--dataset {args.dataset} has no images in its {name} split.")
    return rows.rename_columns({old: new for old, new in names.items() if old != new})


def main(arguments: list[str]) -> None:
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    args, devices = Parser([PredictionArguments, DeviceArguments]).parse(arguments)
    check_checkpoint("model", args.model, adaperceiver=True)
    config = check_config("model", {}, args.model)
    task = task_of(config, args.model)
    adaptive = {name: getattr(args, name) for name in ADAPTIVE}
    for name, value in adaptive.items():
        if value is not None:
            check_field(name, value, config, f"--{name}")
    if args.exit_threshold is not None and task != "image-classification":
        raise ValueError(f"--exit_threshold is for classifiers, --model {args.model} is for {task}.")
    wait = InitProcessGroupKwargs(timeout=timedelta(days=30))  # of the processes that finish first
    accelerator, device = devices.accelerator(kwargs_handlers=[wait])
    check_processes(accelerator)
    folder = Path(args.output)
    rows = load_images(args)
    model = getattr(transformers, TASKS[task].auto_class).from_pretrained(args.model).eval().to(accelerator.device)
    processor = AutoImageProcessor.from_pretrained(args.model)
    if not args.checkpoint_choices:
        model.adaptive_config = without_choices(model.adaptive_config)
    predictor = Predictor(model, processor, task, adaptive, device.autocast)
    predictor.point(size_of(processor, config.image_size))  # a budget that is too small is refused here

    def begin() -> None:
        data = {
            name: getattr(args, name) for name in ("dataset_config", "split", "image_column", "id_column", "streaming")
        }
        call = {
            "model": f"{args.model.rstrip('/').split('/')[-1]} ({fingerprint(model, processor)})",
            "dataset": os.path.abspath(args.dataset) if os.path.exists(args.dataset) else args.dataset,
            **data,
            "images": len(rows) if isinstance(rows, Dataset) else None,
            "stream_shards": None if isinstance(rows, Dataset) else rows.num_shards,
            "shard_size": args.shard_size,
            "dtype": str(device.dtype).removeprefix("torch."),
            "task": task,
            "depth_scale": predictor.depth_scale,
            **adaptive,
            "checkpoint_choices": model.adaptive_config.to_dict(),
        }
        lock(folder, "output")
        record_call(folder, call)

    on_main_process(accelerator, begin)
    if not (folder / "manifest.json").is_file():
        raise ValueError(f"--output {folder} must be a folder that all nodes share.")
    batch_size = args.batch_size or (64 if task == "image-classification" else 8)
    predict(predictor, rows, folder, accelerator, args.shard_size, batch_size, args.workers)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        found = summarize(folder)
        print(
            f"{found.images} images, {found.gflops:.3g} GFLOPs per image; {found.unreadable} could not be read and are "
            f"listed in unreadable.csv. The predictions are in {folder}."
        )


if __name__ == "__main__":
    command_line(main)
