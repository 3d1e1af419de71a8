"""A teacher for distillation: any image classifier of transformers, asked about the student's own view of the images."""

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path

import kornia.augmentation as K
import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoImageProcessor, AutoModelForImageClassification

from .augmentation import Augment, seed_of
from .checkpointing import write_whole
from .data import MicroBatches


class Teacher:
    """
    The teacher sees what the student sees, at its own size and with its own normalisation. Its weights are frozen.

    Features are its last hidden states as a map: tokens that are not patches (class, registers) are dropped.
    """

    def __init__(
        self,
        name: str,
        accelerator: Accelerator,
        trust_remote_code: bool = False,
        size: int | None = None,
        compiled: bool = False,
    ):
        with accelerator.main_process_first():  # several processes that fetch remote code at once would race
            self.model = AutoModelForImageClassification.from_pretrained(name, trust_remote_code=trust_remote_code)
            processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
        self.name, self.accelerator, self.id2label = name, accelerator, dict(self.model.config.id2label)
        self.model = self.model.eval().requires_grad_(False).to(accelerator.device)
        # Convolutions over single channels run twice as fast on a CPU with the channels last in memory.
        self.model = self.model.to(memory_format=torch.channels_last)
        # With its weights frozen into the graph, a convolutional teacher runs 2.5 times as fast on a CPU.
        self.predict = torch.compile(self.model, options={"freezing": True}) if compiled else self.model
        self.size, mean, std = preprocessing(processor)
        self.size = self.size if size is None else (size, size)
        self.mean, self.std = (
            torch.tensor(values, device=accelerator.device)[:, None, None] for values in (mean, std)
        )

    def different_labels(self, names: Sequence[str]) -> list[tuple[str | None, str | None]]:
        """Where `names` are other classes than the teacher's, or stand in another order: pairs of theirs and ours."""
        ours = [self.id2label[index] for index in range(len(self.id2label))]
        if all(name == f"LABEL_{index}" for index, name in enumerate(ours)) and len(names) == len(ours):
            return []  # the teacher does not say
        return [pair for pair in zip_longest(names, ours) if pair[0] != pair[1]]

    def check_labels(self, names: Sequence[str] | None, whose: str) -> None:
        """The student learns the teacher's logits, so the classes and their order must be the same."""
        if names is not None and (different := self.different_labels(names)):
            theirs, our = different[0]
            raise ValueError(
                f"--teacher {self.name} and {whose} must have the same labels, got {len(self.id2label)} and {len(names)}; "
                f"{theirs!r} there is {our!r} here."
            )

    def pixel_values(self, images: torch.Tensor) -> torch.Tensor:
        if images.shape[-2:] != self.size:
            images = nn.functional.interpolate(images, self.size, mode="bicubic", antialias=True).clamp(0, 1)
        return ((images - self.mean) / self.std).contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 3, height, width) in values from 0 to 1 -> (batch, labels)"""
        return self.predict(pixel_values=self.pixel_values(images)).logits

    @torch.no_grad()
    def features(self, images: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """(batch, 3, height, width) in values from 0 to 1 -> (batch, positions of the student's grid, channels)"""
        pixel_values = self.pixel_values(images)
        states = self.predict(pixel_values=pixel_values, output_hidden_states=True).hidden_states[-1]
        if states.ndim == 3:  # tokens, the patches last; models with stages halve their grid from one to the next
            patch = self.model.config.patch_size
            height, width = pixel_values.shape[-2] // patch, pixel_values.shape[-1] // patch
            while height * width > states.shape[1]:
                height, width = height // 2, width // 2
            states = states[:, -height * width :].transpose(1, 2).unflatten(2, (height, width))
        if states.shape[-2:] != grid:
            states = nn.functional.interpolate(states.float(), grid, mode="bilinear", antialias=True)
        return states.flatten(2).transpose(1, 2)

    @torch.no_grad()
    def feature_size(self) -> int:
        pixel_values = torch.zeros(1, 3, *self.size, device=self.mean.device)
        states = self.model(pixel_values=pixel_values, output_hidden_states=True).hidden_states[-1]
        return states.shape[-1 if states.ndim == 3 else 1]


def stem_of(network: nn.Module, stages: int) -> list[tuple[list[int], dict[str, torch.Tensor]]]:
    """
    The first convolution and the first `stages` of a MobileNet-like network, as rows of `AdaPerceiverConfig.stem_layers` with
    the weights of each layer; batch norms are folded into the convolutions before them.
    """

    def folded(layer: nn.Module) -> dict[str, torch.Tensor]:
        conv, norm = layer.conv, layer.norm
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        bias = norm.bias - norm.running_mean * scale
        return {"weight": conv.weight * scale[:, None, None, None], "bias": bias}

    try:
        first = network.stem.conv
        layers = [([first.out_channels, first.stride[0], first.kernel_size[0], 0], folded(network.stem))]
        for block in [block for stage in network.stages[:stages] for block in stage]:
            depthwise, project = block.depthwise.conv, block.project.conv
            convolutions = {"depthwise": block.depthwise, "project": block.project}
            expansion = 1
            if hasattr(block.expand, "conv"):
                convolutions["expand"] = block.expand
                expansion = block.expand.conv.out_channels // block.expand.conv.in_channels
            row = [project.out_channels, depthwise.stride[0], depthwise.kernel_size[0], expansion]
            layers.append(
                (row, {f"{key}.{name}": t for key, layer in convolutions.items() for name, t in folded(layer).items()})
            )
    except AttributeError as error:
        raise ValueError(
            f"--stem_from must name a network of inverted residual blocks (`stem`, `stages`), got {type(network).__name__}."
        ) from error
    return layers


def preprocessing(processor) -> tuple[tuple[int, int], Sequence[float], Sequence[float]]:
    """What a model is fed by its image processor: height and width, mean, standard deviation."""
    if hasattr(processor, "data_config"):  # timm's
        data = processor.data_config
        return tuple(data["input_size"][-2:]), data["mean"], data["std"]
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ((0.0,) * 3, (1.0,) * 3)
    size = dict(processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size)
    side = size.get("shortest_edge")
    return (size["height"], size["width"]) if side is None else (side, side), mean, std


# -------------------------------------------------------------------------------------------------------- cached views


ANSWERS = {"logits": np.float32, "features": np.float16}  # of the teacher, as they are kept


class CachedMicroBatches(MicroBatches):
    """
    Micro-batches of views that were made before, with the teacher's `answer` (logits or features): epoch e shows view e modulo
    their number, mirrored at random with `flips` (features with it), and moved by up to `shift` pixels.
    """

    def __init__(
        self,
        folder: Path,
        views: int,
        images: int,
        size: int,
        seed: int,
        flips: bool = False,
        shift: int = 0,
        answer: str = "logits",
    ):
        super().__init__(range(images), size, None, seed)  # type: ignore[arg-type]  # the views are there
        self.flips, self.answer, names = flips, answer, ("images", "labels", answer)
        self.files = [
            [np.load(folder / f"view{v}" / f"{name}.npy", mmap_mode="r") for name in names] for v in range(views)
        ]
        side = self.files[0][0].shape[-1]
        self.move = K.RandomCrop((side, side), padding=shift, cropping_mode="slice") if shift else nn.Identity()

    def __getitem__(self, micro: int) -> dict[str, torch.Tensor]:
        positions = range(micro * self.size, (micro + 1) * self.size)
        places, rows = [], []
        for place, position in enumerate(positions):
            images, labels, answers = self.files[position // len(self.dataset) % len(self.files)]
            index = self.index_at(position)
            if not np.isnan(answers[index].flat[0]):  # else the image could not be read
                places.append(place)
                rows.append((images[index], labels[index], answers[index]))
        if not rows:
            raise OSError(f"None of {self.size} kept images could be read.")
        images, labels, answers = (torch.from_numpy(np.stack(column)) for column in zip(*rows))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self.seed, micro))
            images = self.move(images / 255)
            if self.flips:
                flipped = torch.rand(len(images)) < 0.5
                images[flipped] = images[flipped].flip(-1)
                if self.answer == "features":  # (batch, positions, channels)
                    grid = (math.isqrt(answers.shape[1]),) * 2
                    answers[flipped] = answers[flipped].unflatten(1, grid).flip(2).flatten(1, 2)
        return {
            "images": images,
            "labels": labels,
            f"teacher_{self.answer}": answers,
            "places": torch.tensor(places),
            "micro": torch.tensor(micro),
        }


def cache_views(
    dataset: Dataset,
    augment: Augment,
    teacher: Teacher,
    views: int,
    folder: Path,
    seed: int,
    workers: int,
    accelerator: Accelerator,
    grid: tuple[int, int] | None = None,
) -> Path:
    """
    Make `views` augmented views of every image, with the teacher's logits, or its features on `grid`, once: processes share
    the work, and a view that is complete is kept. The folder's name tells teacher, data and augmentation apart.
    """
    description = [teacher.name, teacher.size, dataset._fingerprint, asdict(augment.args), augment.size, seed]
    description += [] if grid is None else [grid]
    folder = folder / f"views-{hashlib.sha256(json.dumps(description).encode()).hexdigest()[:12]}"
    count, size = len(dataset), 64
    answer = "logits" if grid is None else "features"
    shape = (len(teacher.id2label),) if grid is None else (grid[0] * grid[1], teacher.feature_size())
    arrays = {
        "images": (np.uint8, (count, 3, augment.size, augment.size)),
        "labels": (np.int64, (count,)),
        answer: (ANSWERS[answer], (count, *shape)),
    }
    needed = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in arrays.values())
    missing = [view for view in range(views) if not (folder / f"view{view}").exists()]
    accelerator.wait_for_everyone()
    if missing:
        accelerator.print(
            f"{len(missing)} views of {count:,} images will be kept in {folder}: {needed / 1e9:.2f} GB each."
        )
        folder.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(folder).free) < needed * len(missing):
            raise ValueError(
                f"--cached_views {views} needs {needed * len(missing):,} bytes, {folder} has {free:,} left."
            )

    def write(folder: Path, view: int) -> None:
        folder.mkdir(parents=True)
        batches = MicroBatches(dataset, size, augment, seed + 1 + view, shuffle=False)
        loader = torch.utils.data.DataLoader(
            batches, sampler=range(-(-count // size)), batch_size=None, num_workers=workers
        )
        images, labels, answers = (  # written as they are made: the features of many images fit in no memory
            np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, shape)
            for name, (dtype, shape) in arrays.items()
        )
        unreadable: np.ndarray = np.ones(count, dtype=bool)
        for batch in tqdm(loader, desc=f"view {view + 1} of {views}", disable=not accelerator.is_local_main_process):
            rows = batch["indices"].numpy()
            kept = (batch["images"] * 255).round()
            images[rows] = kept.byte().numpy()
            labels[rows] = batch["labels"].numpy()
            seen = (kept / 255).to(teacher.mean.device)
            found = teacher.logits(seen) if grid is None else teacher.features(seen, grid)
            answers[rows] = found.float().cpu().numpy().astype(ANSWERS[answer])
            if not np.isfinite(answers[rows]).all():
                raise ValueError(
                    f"--teacher {teacher.name} gives {answer} beyond what {ANSWERS[answer].__name__} holds."
                )
            unreadable[rows] = False
        answers[unreadable] = np.nan
        for array in (images, labels, answers):
            array.flush()

    for view in range(accelerator.process_index, views, accelerator.num_processes):
        if view in missing:
            write_whole(folder / f"view{view}", partial(write, view=view))
    accelerator.wait_for_everyone()
    return folder
