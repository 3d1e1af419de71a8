"""A teacher for distillation: any image classifier of transformers, asked about the student's own view of the images."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from tqdm.auto import tqdm
from training import Augment, MicroBatches, write_whole
from transformers import AutoImageProcessor, AutoModelForImageClassification


class Teacher:
    """
    The teacher sees what the student sees, at its own size and with its own normalisation. Its weights are frozen.

    Features are its last hidden states as a map: tokens that are not patches (class, registers) are dropped.
    """

    def __init__(self, name: str, accelerator: Accelerator, trust_remote_code: bool = False):
        with accelerator.main_process_first():  # several processes that fetch remote code at once would race
            self.model = AutoModelForImageClassification.from_pretrained(name, trust_remote_code=trust_remote_code)
            processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
        self.name, self.id2label = name, dict(self.model.config.id2label)
        self.model = self.model.eval().requires_grad_(False).to(accelerator.device)
        self.size = input_size(processor)
        self.mean = torch.tensor(processor.image_mean, device=accelerator.device)[:, None, None]
        self.std = torch.tensor(processor.image_std, device=accelerator.device)[:, None, None]

    def check_labels(self, names: Sequence[str] | None, whose: str) -> None:
        """The student learns the teacher's logits, so the classes and their order must be the same."""
        ours = [self.id2label[index] for index in range(len(self.id2label))]
        if names is None or list(names) == ours:
            return
        different = [i for i, (a, b) in enumerate(zip(names, ours)) if a != b]
        first = f"; number {different[0]} is {names[different[0]]!r} there and {ours[different[0]]!r} here" * bool(
            different
        )
        raise SystemExit(
            f"--teacher {self.name} and {whose} must have the same labels, got {len(ours)} and {len(names)}{first}."
        )

    def pixel_values(self, images: torch.Tensor) -> torch.Tensor:
        if images.shape[-2:] != self.size:
            images = nn.functional.interpolate(images, self.size, mode="bicubic", antialias=True).clamp(0, 1)
        return (images - self.mean) / self.std

    @torch.no_grad()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 3, height, width) in values from 0 to 1 -> (batch, labels)"""
        return self.model(pixel_values=self.pixel_values(images)).logits

    @torch.no_grad()
    def features(self, images: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """(batch, 3, height, width) in values from 0 to 1 -> (batch, positions of the student's grid, channels)"""
        pixel_values = self.pixel_values(images)
        states = self.model(pixel_values=pixel_values, output_hidden_states=True).hidden_states[-1]
        if states.ndim == 3:  # tokens of a transformer, the patches last
            patch = self.patch_size()
            height, width = pixel_values.shape[-2] // patch, pixel_values.shape[-1] // patch
            states = states[:, -height * width :].transpose(1, 2).unflatten(2, (height, width))
        if states.shape[-2:] != grid:
            states = nn.functional.interpolate(states.float(), grid, mode="bilinear", antialias=True)
        return states.flatten(2).transpose(1, 2)

    def patch_size(self) -> int:
        size = getattr(self.model.config, "patch_size", None)
        if size is None:  # timm's wrapper keeps it in the model
            kernels = [m.kernel_size[0] for m in self.model.modules() if isinstance(m, nn.Conv2d)]
            size = kernels[0] if kernels else None
        if not isinstance(size, int):
            raise SystemExit(f"--teacher {self.name} gives tokens but does not say its patch size.")
        return size

    def feature_size(self) -> int:
        return self.features(torch.zeros(1, 3, *self.size, device=self.mean.device), (1, 1)).shape[-1]


def input_size(processor) -> tuple[int, int]:
    """What the teacher is fed, after its processor's resizing and cropping."""
    size = processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size
    size = dict(size) if not isinstance(size, int) else {"height": size, "width": size}
    if size.get("height"):
        return size["height"], size["width"]
    return size["shortest_edge"], size["shortest_edge"]


# -------------------------------------------------------------------------------------------------------- cached views


class CachedMicroBatches(MicroBatches):
    """Micro-batches of views that were made before, with the teacher's logits: epoch e shows view e modulo their number."""

    def __init__(self, folder: Path, views: int, images: int, size: int, seed: int):
        super().__init__(range(images), size, None, seed)
        self.files = [
            [np.load(folder / f"view{v}" / f"{name}.npy", mmap_mode="r") for name in NAMES] for v in range(views)
        ]

    def __getitem__(self, micro: int) -> dict[str, torch.Tensor]:
        positions = range(micro * self.size, (micro + 1) * self.size)
        places, rows = [], []
        for place, position in enumerate(positions):
            images, *others = self.files[position // len(self.dataset) % len(self.files)]
            index = self.index_at(position)
            if not np.isnan(others[1][index, 0]):  # else the image could not be read
                places.append(place)
                rows.append((images[index], *(other[index] for other in others)))
        images, labels, logits = (torch.from_numpy(np.stack(column)) for column in zip(*rows))
        return {
            "images": images / 255,
            "labels": labels,
            "teacher_logits": logits,
            "places": torch.tensor(places),
            "micro": torch.tensor(micro),
        }


NAMES = ("images", "labels", "logits")


def cache_views(
    dataset: Dataset,
    augment: Augment,
    teacher: Teacher,
    views: int,
    folder: Path,
    seed: int,
    workers: int,
    accelerator: Accelerator,
) -> Path:
    """
    Make `views` augmented views of every image, with the teacher's logits, once: processes share the work, and a view
    that is complete is kept. The folder's name tells teacher, data and augmentation apart.
    """
    description = [teacher.name, dataset._fingerprint, asdict(augment.args), augment.size, seed]
    folder = folder / f"views-{hashlib.sha256(json.dumps(description).encode()).hexdigest()[:12]}"
    size = 64
    for view in range(accelerator.process_index, views, accelerator.num_processes):
        if (folder / f"view{view}").exists():
            continue
        batches = MicroBatches(dataset, size, augment, seed + 1 + view, shuffle=False)
        loader = torch.utils.data.DataLoader(
            batches, sampler=range(-(-len(dataset) // size)), batch_size=None, num_workers=workers
        )
        images = np.zeros((len(dataset), 3, augment.size, augment.size), dtype=np.uint8)
        labels = np.zeros(len(dataset), dtype=np.int64)
        logits = np.full((len(dataset), len(teacher.id2label)), np.nan, dtype=np.float32)
        for batch in tqdm(loader, desc=f"view {view + 1} of {views}", disable=not accelerator.is_local_main_process):
            rows = batch["indices"].numpy()
            stored = (batch["images"] * 255).round()
            images[rows] = stored.byte().numpy()
            labels[rows] = batch["labels"].numpy()
            logits[rows] = teacher.logits((stored / 255).to(teacher.mean.device)).float().cpu().numpy()

        def write(part: Path, arrays=(images, labels, logits)) -> None:
            part.mkdir(parents=True)
            for name, array in zip(NAMES, arrays):
                np.save(part / f"{name}.npy", array)

        write_whole(folder / f"view{view}", write)
    accelerator.wait_for_everyone()
    return folder
