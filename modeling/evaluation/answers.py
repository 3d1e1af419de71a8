"""
What a checkpoint says of one photograph at one operating point, and what that costs.

Checkpoints load as anyone's would, by transformers with `trust_remote_code=True`: this file, `pictures.py` and `style.py` need
nothing else of the package, and a Space gets copies of them.
"""

import time
from collections.abc import Callable, Hashable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL.Image import Image
from transformers import AutoImageProcessor

from .pictures import dense_predictions, feature_colors, shown, to_colors


AXES = ("tokens", "width", "depth")


class Answer(NamedTuple):
    """A classification, where it ran, and its cost beside the full model's."""

    probabilities: dict[str, float]
    confidences: list[float]  # after every block up to `depth`, by which images exit early
    tokens: int
    width: int
    depth: int
    exit_depth: int  # the block after which it stopped: `depth`, or an earlier one
    gflops: tuple[float, float]  # here, and of the full model
    milliseconds: tuple[float, float]


class Checkpoint:
    """A model with its image processor. Without arguments it runs in full, whatever the checkpoint chooses by default."""

    def __init__(self, folder: str, auto_class: Any):
        self.name = Path(folder).name
        self.processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)
        self.model = auto_class.from_pretrained(folder, trust_remote_code=True).eval()
        config, saved = self.model.config, self.model.adaptive_config
        kept = ("attention", "exit_after", "exit_every", "exit_temperatures")
        self.model.adaptive_config = type(saved)(**{name: getattr(saved, name) for name in kept})
        self.full = dict(zip(AXES, (config.max_latent_tokens, config.max_width, config.num_hidden_layers)))

    def pixels(self, photograph: Image) -> torch.Tensor:
        """(1, channels, height, width)"""
        return self.processor(photograph, return_tensors="pt").pixel_values

    def costs(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The smallest and the largest cost among the points that a budget chooses from: GFLOPs, and milliseconds by profile."""
        model, config, profile = self.model, self.model.config, self.model.latency_profile
        trained = product(config.token_granularities, config.widths, range(1, config.num_hidden_layers + 1))
        table = model.accuracy_table
        points = [dict(zip(AXES, values)) for values in trained] if table is None else table.best_first()
        gflops = [model.flops(profile.image_size, **point)["total"] / 1e9 for point in points]
        times = [profile.milliseconds(**point) for point in points if profile.covers(**point)]
        return (min(gflops), max(gflops)), (min(times), max(times))

    def in_proportion(self, point: dict[str, int], full: dict[str, int]) -> dict[str, int]:
        """The operating point of another model, whose full size is `full`, in proportion to the size of this one."""
        return {axis: max(round(point[axis] * self.full[axis] / full[axis]), 1) for axis in AXES}


def milliseconds(runs: Mapping[Hashable, Callable], rounds: int = 5) -> dict[Any, float]:
    """The shortest of a few times of each; they take turns, so that a busy moment hits all."""
    times: dict[Hashable, list[float]] = {name: [] for name in runs}
    for name in [*runs] * rounds:
        start = time.perf_counter()
        runs[name]()
        times[name].append(1e3 * (time.perf_counter() - start))
    return {name: min(taken) for name, taken in times.items()}


@torch.inference_mode()
def classify(checkpoint: Checkpoint, photograph: Image, **call: Any) -> Answer:
    model, pixel_values = checkpoint.model, checkpoint.pixels(photograph)
    size = tuple(pixel_values.shape[-2:])
    outputs = model(pixel_values, **call)
    (ran,), full = outputs.operating_points, model.operating_point()
    point = {axis: getattr(outputs.operating_point, axis) for axis in AXES}
    temperatures = model.adaptive_config.exit_temperatures or [1.0] * point["depth"]
    temperatures = [*temperatures[: point["depth"] - 1], 1.0]  # the last block decides nothing
    steps = model.anytime(pixel_values, **point)
    probabilities = outputs.logits[0].softmax(dim=-1).tolist()
    # One time, where both are the same.
    times = milliseconds({full: lambda: model(pixel_values), ran: lambda: model(pixel_values, **call)})
    gflops = {one: model.flops_at(one, size, batch_size=1)["total"] / 1e9 for one in times}
    return Answer(
        {model.config.id2label[index]: value for index, value in enumerate(probabilities)},
        [(step.logits / one).softmax(dim=-1).max().item() for step, one in zip(steps, temperatures)],
        **point,
        exit_depth=ran.depth,
        gflops=(gflops[ran], gflops[full]),
        milliseconds=(times[ran], times[full]),
    )


@torch.inference_mode()
def mask(checkpoint: Checkpoint, photograph: Image, **point: int) -> tuple[np.ndarray, list[tuple[np.ndarray, str]]]:
    """What the model sees, (height, width, 3) from 0 to 255, and each class that was found: its veil (height, width), its name"""
    pixel_values, names = checkpoint.pixels(photograph), checkpoint.model.config.id2label
    classes = dense_predictions(checkpoint.model, pixel_values, [point])[0, 0]
    picture: np.ndarray = (255 * shown(pixel_values[0], checkpoint.processor)).astype(np.uint8)
    return picture, [(0.6 * (classes == label), names[label]) for label in np.unique(classes).tolist()]


@torch.inference_mode()
def depth_map(checkpoint: Checkpoint, photograph: Image, **point: int) -> np.ndarray:
    """(height, width, 3) from 0 to 255, on the scale of the full model's map, so that pictures compare"""
    here, full = dense_predictions(checkpoint.model, checkpoint.pixels(photograph), [point, checkpoint.full])[:, 0]
    return to_colors(here, full.min(), full.max())


@torch.inference_mode()
def features(checkpoint: Checkpoint, photograph: Image, **point: int) -> np.ndarray:
    """(height, width, 3) from 0 to 255; the colours are those of the full model's first principal components"""
    patch = checkpoint.model.config.patch_size
    _, colors = feature_colors(checkpoint.model, checkpoint.pixels(photograph), [checkpoint.full, point])
    return (255 * colors[0]).astype(np.uint8).repeat(patch, axis=0).repeat(patch, axis=1)
