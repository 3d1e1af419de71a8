"""
Rendered scenes and a teacher for them: what the training scripts run on when they are given no data.

A scene is a room with a tiled floor, a wall and a few flat objects that stand on the floor, one in front of another. Its
class is the kind of the nearest object, its mask holds the kind of the object at each pixel, its depth map metres.

```python
scene(7)  # image (32, 32, 3) uint8, label, mask (32, 32) uint8, depth (32, 32) float32
scenes(1000, split="validation")  # the same as a `datasets.Dataset`
teacher("teacher")  # a folder for `AutoModelForImageClassification`, trained if it is not there yet
```
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Array2D, ClassLabel, Dataset, Features, Image
from torch import nn
from tqdm import tqdm
from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessorPil


def _box(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.maximum(abs(x), abs(y))


# What each kind covers of its square: x and y are -1 to 1 from left to right and from top to bottom. Here and below only
# arithmetic that every machine rounds alike, so that a seed means the same pixels everywhere.
KINDS = {
    "disc": lambda x, y: x * x + y * y <= 1,
    "square": lambda x, y: _box(x, y) <= 0.9,
    "triangle": lambda x, y: (abs(x) <= (y + 1) / 2) & (y <= 1),
    "diamond": lambda x, y: abs(x) + abs(y) <= 1,
    "ring": lambda x, y: abs(x * x + y * y - 0.65) <= 0.35,
    "frame": lambda x, y: abs(_box(x, y) - 0.7) <= 0.25,
    "cross": lambda x, y: (np.minimum(abs(x), abs(y)) <= 0.3) & (_box(x, y) <= 1),
    "saltire": lambda x, y: (abs(abs(x) - abs(y)) <= 0.35) & (_box(x, y) <= 0.9),
    "bars": lambda x, y: (np.floor(2.5 * (y + 1)) % 2 == 0) & (_box(x, y) <= 1),
    "columns": lambda x, y: (np.floor(2.5 * (x + 1)) % 2 == 0) & (_box(x, y) <= 1),
}
LABELS = list(KINDS)
MASK_LABELS = ["background", *LABELS]

FIRST_INDEX = {"train": 0, "validation": 2**31}  # the splits are ranges of indices that never meet
MAX_OBJECTS = 8
CAMERA_HEIGHT = (
    0.9  # metres, with a focal length of one image height: depth d is `CAMERA_HEIGHT / d` below the horizon
)


def scene(index: int, seed: int = 0, size: int = 32) -> dict[str, Any]:
    """
    Scene `index` of `seed`: image (size, size, 3) uint8, label, mask (size, size) uint8 and depth (size, size) float32.

    The scene does not depend on `size`, only its resolution does. Masks count from 0 for the background (`MASK_LABELS`),
    labels from 0 for the first kind (`LABELS`).
    """
    rng = np.random.default_rng((seed, index))

    def draw(low: float, high: float, *shape: int) -> np.ndarray:
        return low + (high - low) * rng.random(shape)

    horizon, wall_depth = draw(0.2, 0.4), draw(7.5, 10)
    wall, floor = draw(0.05, 0.35, 3), draw(0.05, 0.35, 3)
    light, slope, shift = draw(0.75, 1), draw(-0.3, 0.3), draw(0, 1)

    # Objects from near to far, the first close to the lower edge; from left to right they take turns at random.
    count = rng.integers(5, MAX_OBJECTS + 1)
    kinds = rng.integers(len(LABELS), size=MAX_OBJECTS)
    distances: np.ndarray = np.append(1, np.sort(draw(1.15, 3.5, MAX_OBJECTS - 1)))  # relative to the nearest
    depths = CAMERA_HEIGHT / (1 - horizon) * draw(1.02, 1.4) * distances
    sizes = draw(0.2, 0.32, MAX_OBJECTS)
    turns = (np.argsort(draw(0, 1, MAX_OBJECTS)) % count + draw(0, 1, MAX_OBJECTS)) / count
    lefts, bottoms = turns * (1 - sizes), horizon + CAMERA_HEIGHT / depths
    colors = draw(0.4, 1, MAX_OBJECTS, 3)

    v, u = np.mgrid[0.5:size, 0.5:size] / size  # centres of the pixels, 0 to 1
    floor_depth = CAMERA_HEIGHT / np.maximum(v - horizon, 0.01)
    depth = np.minimum(floor_depth, wall_depth)
    tiles = (np.floor(floor_depth + shift) + np.floor(2 * (u - 0.5) * floor_depth + shift)) % 2
    shade = np.where(floor_depth < wall_depth, 0.8 + 0.4 * tiles, 0.7 + 0.6 * v)
    image = shade[..., None] * np.where((floor_depth < wall_depth)[..., None], floor, wall)
    mask: np.ndarray = np.zeros((size, size), np.uint8)
    for nth in reversed(range(count)):  # what is nearer covers what is farther
        x, y = 2 * (u - lefts[nth]) / sizes[nth] - 1, 2 * (v - bottoms[nth]) / sizes[nth] + 1
        covered = KINDS[LABELS[kinds[nth]]](x, y)
        image[covered], mask[covered], depth[covered] = colors[nth], kinds[nth] + 1, depths[nth]

    haze = depth[..., None] / 15
    image = (image * (1 - haze) + wall * haze) * (light + slope * (u - 0.5))[..., None]
    image = (image + draw(-0.05, 0.05, size, size, 3)).clip(0, 1)
    return {
        "image": (255 * image).astype(np.uint8),
        "label": int(kinds[0]),
        "mask": mask,
        "depth": depth.astype(np.float32),
    }


def scenes(count: int, seed: int = 0, size: int = 32, split: str = "train") -> Dataset:
    """The first `count` scenes of a split, in memory: columns image, label, mask and depth."""
    features = Features(
        image=Image(), label=ClassLabel(names=LABELS), mask=Image(mode="L"), depth=Array2D((size, size), "float32")
    )
    rendered = [scene(index, seed, size) for index in _indices(count, split)]
    return Dataset.from_dict({name: [one[name] for one in rendered] for name in features}, features=features)


def _indices(count: int, split: str) -> range:
    if split not in FIRST_INDEX:
        raise ValueError(f"`split` must be one of {', '.join(FIRST_INDEX)}, got {split!r}.")
    if not 1 <= count <= FIRST_INDEX["validation"]:
        raise ValueError(f"`count` must be from 1 to {FIRST_INDEX['validation']}, got {count}.")
    return range(FIRST_INDEX[split], FIRST_INDEX[split] + count)


def teacher(
    folder: str | os.PathLike,
    count: int = 12000,
    epochs: int = 3,
    seed: int = 0,
    size: int = 32,
    batch_size: int = 128,
) -> Path:
    """
    A folder with a small ResNet (one feature per 4x4 pixels) and its image processor. If it does not exist, the ResNet is
    trained on the first `count` training scenes of `seed`; the folder appears when it is complete.
    """
    folder = Path(folder)
    if folder.exists():
        return folder
    images, labels = _tensors(count, seed, size, "train")
    mean, std = images.mean((0, 2, 3)), images.std((0, 2, 3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = ResNetConfig(
            embedding_size=32,
            hidden_sizes=[48],
            depths=[2],
            layer_type="basic",
            id2label=dict(enumerate(LABELS)),
            label2id={name: label for label, name in enumerate(LABELS)},
        )
        model = ResNetForImageClassification(config)
        _train(model, (images - mean[:, None, None]) / std[:, None, None], labels, epochs, batch_size)
    images, labels = _tensors(min(count, 1000), seed, size, "validation")
    with torch.no_grad():
        predictions = model((images - mean[:, None, None]) / std[:, None, None]).logits.argmax(-1)
    print(f"teacher: {(predictions == labels).float().mean():.1%} accuracy on {len(labels)} validation scenes")

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        complete = Path(temporary, folder.name)
        model.save_pretrained(complete)
        ViTImageProcessorPil(
            size={"height": size, "width": size}, image_mean=mean.tolist(), image_std=std.tolist()
        ).save_pretrained(complete)
        complete.rename(folder)
    return folder


def _tensors(count: int, seed: int, size: int, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (count, 3, size, size), 0 to 1, and labels (count,)."""
    rendered = [scene(index, seed, size) for index in tqdm(_indices(count, split), f"{split} scenes", leave=False)]
    images = torch.from_numpy(np.stack([one["image"] for one in rendered])).permute(0, 3, 1, 2)
    return images.float() / 255, torch.tensor([one["label"] for one in rendered])


def _train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int, batch_size: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.02)
    batches = [batch for _ in range(epochs) for batch in torch.randperm(len(images)).split(batch_size)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=len(batches), pct_start=0.2)
    model.train()
    with tqdm(batches, "teacher") as progress:
        for batch in progress:
            loss = nn.functional.cross_entropy(model(images[batch]).logits, labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            progress.set_postfix(loss=f"{loss.item():.2f}")
    model.eval()
