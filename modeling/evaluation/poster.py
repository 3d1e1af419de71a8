"""One picture that tells what a checkpoint buys with compute: a curve, and rows of photographs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn

from .pictures import dense_predictions, embedded, shown, to_colors
from .style import BLUE, GREEN, MARKERS, RED, new_figure, styled


SIDE = 160  # pixels of a square photograph
COLORS = (BLUE, RED, GREEN)


class Strip(NamedTuple):
    """A row of photographs."""

    title: str
    photographs: Sequence[Image.Image]
    captions: Sequence[str]


def square(photograph: Image.Image) -> Image.Image:
    return ImageOps.fit(photograph.convert("RGB"), (SIDE, SIDE))


@torch.no_grad()
def map_strip(model: nn.Module, processor: Any, photograph: Image.Image, tokens: Sequence[int]) -> Strip:
    """The photograph, and its mask (over it) or its depth map at rising token counts."""
    masks = "Segmentation" in type(model).__name__
    alpha = 0.55 if masks else 1.0
    pixel_values = embedded(processor, [photograph], model)
    maps = dense_predictions(model, pixel_values, [{"tokens": count} for count in tokens])[:, 0].astype(float)
    picture: np.ndarray = 255 * shown(pixel_values[0], processor)
    pictures = [picture, *(1 - alpha) * picture + alpha * to_colors(maps, maps.min(), maps.max())]
    images = [square(Image.fromarray(one.round().astype(np.uint8))) for one in pictures]
    captions = ["photograph", *(f"{count} token{'s' * (count > 1)}" for count in tokens)]
    return Strip(f"{'mask' if masks else 'depth'} at rising token counts", images, captions)


def exit_strips(
    photographs: Sequence[Image.Image],
    labels: Sequence[str],
    exit_depths: Sequence[int],
    blocks: int,
    columns: int = 6,
) -> list[Strip]:
    """Photographs that exit first, and those that exit last; `exit_depths` are those of the given photographs."""
    order = sorted(range(len(photographs)), key=lambda index: (exit_depths[index], index))
    strips = []
    for title, chosen in (("exit first", order[:columns]), ("exit last, or never", order[::-1][:columns])):
        captions = [f"{labels[index]}\n{exit_depths[index]} of {blocks} blocks" for index in chosen]
        strips.append(Strip(title, [photographs[index] for index in chosen], captions))
    return strips


def draw_poster(
    curves: Mapping[str, Sequence[Mapping[str, float]]], images: int, strips: Sequence[Strip], title: str
) -> Any:
    """
    Accuracy against GFLOPs of named series of operating points (`gflops`, `accuracy`), with a band of one standard error of
    an accuracy on `images` images around the first; beside it the strips, one below the other.
    """
    columns = max((len(strip.photographs) for strip in strips), default=1)
    with styled():
        figure = new_figure(5.2 + 1.15 * columns, max(1.55 * len(strips), 4.4))
        left, right = figure.subfigures(1, 2, width_ratios=[5.2, 1.15 * columns])
        axes = left.subplots()
        for (name, rows), color, marker in zip(curves.items(), COLORS, MARKERS):
            rows = sorted(rows, key=lambda row: row["gflops"])
            gflops, accuracy = (np.array([row[column] for row in rows]) for column in ("gflops", "accuracy"))
            axes.plot(gflops, 100 * accuracy, color=color, marker=marker, label=name)
            if color is COLORS[0]:
                error = 100 * np.sqrt(accuracy * (1 - accuracy) / images)
                axes.fill_between(
                    gflops, 100 * accuracy - error, 100 * accuracy + error, color=color, alpha=0.12, lw=0
                )
        axes.set(xlabel="GFLOPs per image (mean)", ylabel=f"accuracy on {images} photographs, %")
        axes.set_xlim(left=0)
        axes.legend(loc="lower right")
        axes.set_title(title)
        grid = right.subplots(max(len(strips), 1), columns, squeeze=False)
        for place in grid.flat:
            place.axis("off")
        for row, strip in zip(grid, strips):
            row[0].set_title(strip.title, loc="left", fontsize=9, pad=4)
            for place, photograph, caption in zip(row, strip.photographs, strip.captions):
                place.imshow(square(photograph))
                place.text(0.5, -0.05, caption, transform=place.transAxes, ha="center", va="top", fontsize=6.5)
    return figure
