"""
    python examples/quantize_int8.py --model FOLDER_OR_HUB_ID --tokens 64 --width 416 --depth 12 --data FOLDER
    python examples/quantize_int8.py    # a small model with random weights, on random images

Dynamic int8 quantisation of the linear layers of one operating point, on CPU: weights are stored in int8, activations are
rounded to it on the fly, everything between the layers stays in float32. Prints what that saves and what it changes. Images
come from `--data`: a folder of images (one subfolder per class, if they have labels) or a parquet file with a column `image`
(and perhaps `label`). With labels, the accuracy of both is printed as well.

`--output` saves the result to a folder. To load it:

    config = AdaPerceiverConfig.from_pretrained(folder)
    model = AdaPerceiverForImageClassification(config).eval()
    model.adaptive_config = AdaptiveConfig.from_pretrained(folder)
    model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    model.load_state_dict(torch.load(f"{folder}/int8.pt"))

Why `torch.ao.quantization`, though torch has deprecated it in favour of torchao: on a CPU with AVX2 it beats float32, where
torchao 0.18 was fifteen times slower than float32, compiled or not (torch 2.13, two cores, one image, hidden size 384).
"""

import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import torch
from export_onnx import OUTPUTS, load_sub_network
from torch import nn
from tqdm import tqdm
from transformers import AutoImageProcessor, HfArgumentParser

from adaperceiver import AdaPerceiverConfig, AdaPerceiverPreTrainedModel, image_processor_for


@dataclass
class Arguments:
    model: str | None = field(
        default=None, metadata={"help": "Checkpoint: a folder or a hub id. A random model by default."}
    )
    tokens: int | None = field(default=None, metadata={"help": "Number of latents."})
    width: int | None = field(default=None, metadata={"help": "Width of the FFNs."})
    depth: int | None = field(default=None, metadata={"help": "Number of blocks."})
    data: str | None = field(
        default=None, metadata={"help": "Folder of images, or parquet file. Random images by default."}
    )
    split: str = field(default="train", metadata={"help": 'Split of `data`; "train" is all of it if it has none.'})
    images: int = field(default=64, metadata={"help": "How many images to run; the first ones of the split."})
    batch_size: int = field(default=8, metadata={"help": "Images per call."})
    output: str | None = field(default=None, metadata={"help": "Folder for the quantised weights and the config."})


def quantize(model: nn.Module) -> nn.Module:
    """A copy of `model` whose linear layers run in int8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations; see the top of this file
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def random_batches(config: AdaPerceiverConfig, images: int, batch_size: int) -> Iterator[tuple[torch.Tensor, None]]:
    for start in range(0, images, batch_size):
        batch = min(batch_size, images - start)
        yield torch.randn(batch, config.num_channels, config.image_size, config.image_size), None


def load_data(data: str, split: str, images: int):
    """The first images of a folder or a parquet file, as a `datasets.Dataset` with `image` and perhaps `label`."""
    from datasets import Image, load_dataset  # not needed for random images

    if Path(data).is_dir():
        dataset = load_dataset("imagefolder", data_dir=data, split=split)
    elif Path(data).is_file():
        dataset = load_dataset("parquet", data_files={split: data}, split=split)
    else:
        raise ValueError(f"`data` must be a folder of images or a parquet file, got {data}.")
    if "image" not in dataset.column_names:
        raise ValueError(f"`data` must have a column `image`, got {data} with {', '.join(dataset.column_names)}.")
    return dataset.cast_column("image", Image()).select(range(min(images, len(dataset))))


def data_batches(dataset, processor, batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    for batch in dataset.iter(batch_size):
        pixel_values = processor(batch["image"], return_tensors="pt").pixel_values
        yield pixel_values, torch.tensor(batch["label"]) if "label" in batch else None


def load_processor(folder_or_hub_id: str | None, config: AdaPerceiverConfig):
    """The checkpoint's own preprocessing, or that of the paper's classifier."""
    try:
        if folder_or_hub_id is not None:
            return AutoImageProcessor.from_pretrained(folder_or_hub_id)
    except OSError:
        print("the checkpoint has no preprocessor_config.json: images are prepared as for the paper's classifier")
    return image_processor_for(config, "image-classification")


def megabytes(model: nn.Module) -> float:
    file = BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell() / 1e6


@torch.no_grad()
def compare(models: dict[str, nn.Module], batches: Iterator, total: int) -> dict[str, float | None]:
    """Run all models on all batches, in turns, so that a busy moment of the machine hits them alike."""
    times, correct = {name: [] for name in models}, dict.fromkeys(models, 0)
    images = predictions = labelled = same = values = 0
    largest = summed = magnitude = 0.0
    for pixel_values, labels in tqdm(batches, total=total, unit="batch"):
        if images == 0:  # the first calls are slower
            for model in models.values():
                model(pixel_values)
        logits = {}
        for name, model in models.items():
            start = time.perf_counter()
            logits[name] = model(pixel_values).logits
            times[name].append(1e3 * (time.perf_counter() - start) / len(pixel_values))
        images += len(pixel_values)
        difference = (logits["fp32"] - logits["int8"]).abs()
        largest = max(largest, difference.max().item())
        summed += difference.sum().item()
        magnitude += logits["fp32"].abs().sum().item()
        values += difference.numel()
        classes = {name: tensor.argmax(1) for name, tensor in logits.items()}  # per image, or per pixel
        same += (classes["fp32"] == classes["int8"]).sum().item()
        predictions += classes["fp32"].numel()
        if labels is not None and labels.shape == classes["fp32"].shape:
            labelled += len(labels)
            for name in models:
                correct[name] += (classes[name] == labels).sum().item()
    return {
        "images": images,
        "milliseconds": {name: statistics.median(measured) for name, measured in times.items()},
        "accuracy": {name: count / labelled for name, count in correct.items()} if labelled else None,
        "largest": largest,
        "mean": summed / values,
        "magnitude": magnitude / values,
        "agreement": same / predictions,
    }


def save(model: AdaPerceiverPreTrainedModel, quantized: nn.Module, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(quantized.state_dict(), folder / "int8.pt")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.adaptive_config.save_pretrained(folder)


def main() -> None:
    arguments = HfArgumentParser(Arguments).parse_args_into_dataclasses()[0]
    try:  # what the user may get wrong, before anything takes long
        for name in ("images", "batch_size"):
            if getattr(arguments, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(arguments, name)}.")
        model = load_sub_network(arguments.model, arguments.tokens, arguments.width, arguments.depth)
        if "logits" not in OUTPUTS[type(model).__name__]:
            allowed = [name for name, outputs in OUTPUTS.items() if "logits" in outputs]
            raise ValueError(f"`model` must be one of {', '.join(allowed)}, got {type(model).__name__}.")
        if arguments.data is None:
            images, source = arguments.images, "RANDOM images (no --data)"
            batches = random_batches(model.config, images, arguments.batch_size)
        else:
            dataset = load_data(arguments.data, arguments.split, arguments.images)
            images, source = len(dataset), f"images of {arguments.data}"
            processor = load_processor(arguments.model, model.config)
            batches = data_batches(dataset, processor, arguments.batch_size)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")

    quantized = quantize(model)
    sizes = {"fp32": megabytes(model), "int8": megabytes(quantized)}
    result = compare({"fp32": model, "int8": quantized}, batches, total=-(-images // arguments.batch_size))

    print(f"\n{images} {source}, batches of {arguments.batch_size}, {torch.get_num_threads()} threads")
    print(f"{'':32}{'fp32':>10}{'int8':>10}{'int8/fp32':>11}")
    rows = {"size on disk, MB": sizes, "ms per image, interleaved median": result["milliseconds"]}
    for name, row in rows.items():
        print(f"{name:32}{row['fp32']:10.2f}{row['int8']:10.2f}{row['int8'] / row['fp32']:11.2f}")
    if result["accuracy"] is not None:
        print(f"{'top-1 accuracy':32}{result['accuracy']['fp32']:10.4f}{result['accuracy']['int8']:10.4f}")
    print(f"{'top-1 agreement':32}{'':10}{result['agreement']:10.4f}")
    print(f"{'max abs logit difference':32}{'':10}{result['largest']:10.4f}")
    print(f"{'mean abs logit difference':32}{'':10}{result['mean']:10.4f}")
    print(f"{'mean abs logit':32}{result['magnitude']:10.4f}")

    if arguments.output is not None:
        save(model, quantized, Path(arguments.output))
        print(f"\nwrote {arguments.output}: int8.pt, config.json, adaptive_config.json")


if __name__ == "__main__":
    main()
