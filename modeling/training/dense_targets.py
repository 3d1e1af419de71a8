"""How data sets store masks and depth maps, and what they mean: classes from 0 with 255 for ignored pixels, or metres."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .data import UNREADABLE, open_stored


IGNORED = 255  # the class of ignored pixels
TARGETS = {"image-segmentation": "mask", "depth-estimation": "depth"}  # the column of each task
DTYPES = {"image-segmentation": torch.int64, "depth-estimation": torch.float32}


@dataclass(frozen=True)
class Encoding:
    """How a data set stores its targets. As the transform of a `Dataset` it undoes that on access."""

    task: str
    names: tuple[str, ...] = ()  # of the classes
    reduce_labels: bool = False
    mask_values: tuple[
        int, ...
    ] = ()  # stored values of the classes; () for 0, 1, ..., or 1, 2, ... with `reduce_labels`
    ignored_class: int = IGNORED
    depth_scale: float | None = None
    depth_offset: float = 0.0

    def __call__(self, columns: dict[str, list]) -> dict[str, list]:
        target, names = TARGETS[self.task], [str(name) for name in columns["id"]]
        return {**columns, "id": names, target: [self.decode(*pair) for pair in zip(columns[target], names)]}

    def decode(self, stored: Any, name: str) -> torch.Tensor | None:
        """(height, width) uint8 or float32, or None if the file cannot be read; an error says what is wrong with `name`."""
        values = read_array(stored)
        if values is None:
            return None
        if values.ndim != 2:
            raise ValueError(f"{name}: the {TARGETS[self.task]} must be of shape (height, width), got {values.shape}.")
        return torch.from_numpy(
            self.classes(values, name) if self.task == "image-segmentation" else self.metres(values, name)
        )

    def classes(self, stored: np.ndarray, name: str) -> np.ndarray:
        first = int(self.reduce_labels)
        values = list(self.mask_values or range(first, first + len(self.names)))
        table = np.full(256, -1)
        table[values] = range(len(values))
        table[[self.ignored_class, IGNORED] + [0] * first] = IGNORED
        classes = table[stored.clip(0, 255).astype(np.uint8)]
        bad = (classes < 0) | (stored < 0) | (stored > 255)
        if bad.any():
            others = " and ".join(str(other) for other in sorted({self.ignored_class, IGNORED, *range(first)}))
            allowed = ", ".join(map(str, self.mask_values)) or f"{first} to {values[-1]}"
            raise ValueError(
                f"{name}: the mask has class {stored[bad][0]} ({bad.sum()} pixels), allowed are {allowed}, and {others} for "
                "ignored pixels."
            )
        return classes.astype(np.uint8)

    def metres(self, stored: np.ndarray, name: str) -> np.ndarray:
        if self.depth_scale is not None:
            depth = (stored + np.float64(self.depth_offset)) * self.depth_scale
        elif np.issubdtype(stored.dtype, np.floating):
            depth = stored
        else:
            raise ValueError(
                f"{name}: depth is stored in whole numbers ({stored.dtype}), which could be any unit. --depth_scale and "
                "--depth_offset must say: metres = (stored + depth_offset) x depth_scale, 0.001 for millimetres."
            )
        depth = depth.astype(np.float32)
        if not (depth >= 0).all() or np.isinf(depth).any():  # the first is False for NaN, too
            bad = depth[~((depth >= 0) & (depth < np.inf))]
            raise ValueError(
                f"{name}: depth must be 0 (not measured) or above and finite, got {bad[0]} {bad.size} times."
            )
        return depth


def read_array(stored: Any) -> np.ndarray | None:
    """An image that `datasets` has not decoded, as it is stored (no palette, no 8 bits), or an array in lists."""
    if not isinstance(stored, dict):
        return None if stored is None else np.asarray(stored)
    if stored["bytes"] is None and stored["path"] is None:
        return None
    try:
        return np.asarray(open_stored(stored))
    except UNREADABLE:
        return None
