"""
Pictures of what happens inside: what latents read, what output tokens say, what more tokens change, who exits when.

Every function takes a model in evaluation mode, its image processor and photographs, and returns a matplotlib figure; the
numbers behind a picture come from a function of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import ImageOps
from PIL.Image import Image
from torch import nn

from .style import BLUE, LIGHT, RED, SEQUENCE, new_figure, picture_grid, styled


Point = Mapping[str, Any]  # adaptive arguments of a call


def embedded(processor: Callable, photographs: Sequence[Image], model: nn.Module) -> torch.Tensor:
    """(photographs, channels, height, width), as the model takes them"""
    pixel_values = processor(list(photographs), return_tensors="pt").pixel_values
    return pixel_values.to(model.device, model.dtype)


def shown(pixel_values: torch.Tensor, processor: Any) -> np.ndarray:
    """What the model sees, as colours: (channels, height, width) -> (height, width, channels) from 0 to 1"""
    mean, std = (torch.tensor(values)[:, None, None] for values in (processor.image_mean, processor.image_std))
    return (pixel_values.float().cpu() * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()


# ------------------------------------------------------------------------------------------------------ what latents read


@torch.no_grad()
def read_attention(model: nn.Module, pixel_values: torch.Tensor, tokens: int) -> torch.Tensor:
    """How much of each patch each latent reads, mean over the heads: (batch, tokens, rows, columns), of sum 1 per latent"""
    base = model.base_model
    point = model.operating_point(tokens=tokens, policy="fixed")
    input_tokens, _ = base.embed(pixel_values, point, {})
    _, rope = base.read_latents(input_tokens, point)
    attention = base.read.cross_attention
    query = attention.query(base.read.latent_token, rope)
    key, _ = attention.key_value(input_tokens)
    weights = (query @ key.transpose(2, 3) * attention.scaling).float().softmax(dim=-1).mean(dim=1)
    return weights.unflatten(2, patch_grid(model, pixel_values))


def patch_grid(model: nn.Module, pixel_values: torch.Tensor) -> tuple[int, int]:
    patch = model.config.patch_size
    return pixel_values.shape[-2] // patch, pixel_values.shape[-1] // patch


def draw_read(
    model: nn.Module, processor: Any, photographs: Sequence[Image], tokens: int, latents: Sequence[int] | None = None
) -> Any:
    """The attention of some latents (by default the first and the last three of `tokens`) over each photograph."""
    count = min(3, tokens // 2)
    chosen = [*range(count), *range(tokens - count, tokens)] if latents is None else list(latents)
    pixel_values = embedded(processor, photographs, model)
    attention = read_attention(model, pixel_values, tokens).float().cpu().numpy()
    with styled():
        figure, axes = picture_grid(len(photographs), 1 + len(chosen))
        for row, image, maps in zip(axes, pixel_values, attention):
            picture = shown(image, processor)
            row[0].imshow(picture)
            for place, latent in zip(row[1:], chosen):
                extent = (0, picture.shape[1], picture.shape[0], 0)
                place.imshow(picture.mean(axis=-1), cmap="gray", extent=extent)
                place.imshow(maps[latent], cmap=SEQUENCE, alpha=0.6, extent=extent, interpolation="bilinear")
        for place, latent in zip(axes[0, 1:], chosen):
            place.set_title(f"latent {latent + 1}")
    return figure


# ------------------------------------------------------------------------------------------------- what output tokens say


@torch.no_grad()
def feature_colors(model: nn.Module, pixel_values: torch.Tensor, points: Sequence[Point]) -> np.ndarray:
    """
    The first three principal components of the output tokens as colours, (points, batch, rows, columns, 3), from 0 to 1.

    Directions and scale are those of the first point, of all images together, so that colours compare.
    """
    if model.base_model.dense_readout is None:
        raise ValueError(
            f"{type(model).__name__} writes no dense output tokens: use a model for features or dense tasks."
        )
    tokens = torch.stack([model.base_model(pixel_values, **point).output_tokens.float() for point in points])
    reference = tokens[0].flatten(0, 1)
    mean = reference.mean(dim=0)
    _, _, directions = torch.linalg.svd(reference - mean, full_matrices=False)
    components = ((tokens - mean) @ directions[:3].T).float()  # not so under autocast
    low, high = (torch.quantile(components[0].flatten(0, 1), q, dim=0) for q in (0.02, 0.98))
    return ((components - low) / (high - low)).clamp(0, 1).unflatten(2, patch_grid(model, pixel_values)).cpu().numpy()


def draw_features(model: nn.Module, processor: Any, photographs: Sequence[Image], points: Mapping[str, Point]) -> Any:
    """The features of each photograph at named operating points, the first of which sets the colours."""
    pixel_values = embedded(processor, photographs, model)
    colors = feature_colors(model, pixel_values, list(points.values()))
    with styled():
        figure, axes = picture_grid(len(photographs), 1 + len(points))
        for index, (row, image) in enumerate(zip(axes, pixel_values)):
            row[0].imshow(shown(image, processor))
            for place, of_point in zip(row[1:], colors):
                place.imshow(of_point[index])
        for place, name in zip(axes[0, 1:], points):
            place.set_title(name)
    return figure


# ------------------------------------------------------------------------------------------------ what more tokens change


@torch.no_grad()
def dense_predictions(model: nn.Module, pixel_values: torch.Tensor, points: Sequence[Point]) -> np.ndarray:
    """(points, batch, height, width): the class of each pixel, or its depth in metres"""
    predictions = []
    for point in points:
        outputs = model(pixel_values, **point)
        depth = getattr(outputs, "predicted_depth", None)
        predictions.append(outputs.logits.argmax(dim=1) if depth is None else depth.float())
    return torch.stack(predictions).cpu().numpy()


def to_colors(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Quantities from `low` to `high` as colours: (...) -> (..., 3) from 0 to 255"""
    from matplotlib import colormaps

    return colormaps[SEQUENCE]((values - low) / max(high - low, 1e-6), bytes=True)[..., :3]


def draw_changes(model: nn.Module, processor: Any, photographs: Sequence[Image], tokens: Sequence[int]) -> Any:
    """
    Masks or depth maps at rising token counts, and below each what changed since the count before: pixels of another class,
    or metres.
    """
    pixel_values = embedded(processor, photographs, model)
    maps = dense_predictions(model, pixel_values, [{"tokens": count} for count in tokens])
    classes = maps.dtype.kind == "i"
    low, high = (0, max(model.config.num_labels - 1, 1)) if classes else (maps.min().item(), maps.max().item())
    changes = (maps[1:] != maps[:-1]).astype(float) if classes else abs(maps[1:] - maps[:-1])
    most = max(changes.max().item(), 1e-6) if len(changes) else 1.0
    with styled():
        figure, axes = picture_grid(2 * len(photographs), 1 + len(tokens))
        for index, image in enumerate(pixel_values):
            above, below = axes[2 * index], axes[2 * index + 1]
            picture = shown(image, processor)
            above[0].imshow(picture)
            for number, place in enumerate(above[1:]):
                if classes:
                    place.imshow(picture)
                place.imshow(maps[number, index], cmap=SEQUENCE, vmin=low, vmax=high, alpha=0.55 if classes else 1.0)
            for number, place in enumerate(below[2:]):
                place.imshow(changes[number, index], cmap="magma", vmin=0, vmax=most)
            below[1].text(0.5, 0.5, "change", ha="center", va="center", transform=below[1].transAxes)
        for place, count in zip(axes[0, 1:], tokens):
            place.set_title(f"{count} token{'s' * (count > 1)}")
    return figure


# --------------------------------------------------------------------------------------------------------- who exits when


def draw_confidence(
    confidences: Sequence[float], threshold: float | None = None, exit_depth: int | None = None
) -> Any:
    """The confidence of one image after every block; the blocks after its early exit, which do not run, are pale."""
    blocks = range(1, len(confidences) + 1)
    with styled():
        figure = new_figure(5.5, 1.9)
        axes = figure.subplots()
        ran = len(confidences) if exit_depth is None else exit_depth
        axes.bar(blocks, confidences, color=[BLUE if block <= ran else LIGHT for block in blocks], width=0.8)
        title = "confidence after every block"
        if threshold is not None:
            axes.axhline(threshold, color=RED, linewidth=1.2)
            title += f", exit threshold {threshold:.2g}"
        axes.set(xlim=(0.4, len(confidences) + 0.6), ylim=(0, 1), xlabel="blocks", ylabel="confidence")
        axes.set_title(title, loc="left", fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.grid(axis="x", visible=False)
    return figure


def draw_exits(
    model: nn.Module, processor: Any, photographs: Sequence[Image], threshold: float, columns: int = 6, **call: Any
) -> Any:
    """A row for each exit depth, from first to last, with photographs that exit there, their labels and confidences."""
    with torch.no_grad():
        outputs = model(embedded(processor, photographs, model), exit_threshold=threshold, **call)
    confidence, labels = outputs.logits.float().softmax(dim=-1).max(dim=-1)
    depths = outputs.exit_depth.tolist()
    reached = sorted(set(depths))
    columns = min(columns, max(depths.count(depth) for depth in reached))
    with styled():
        figure, axes = picture_grid(len(reached), columns)
        for row, depth in zip(axes, reached):
            here = [index for index, one in enumerate(depths) if one == depth]
            row[0].set_ylabel(f"{depth} block{'s' * (depth > 1)}\n{len(here)} of {len(depths)}")
            for place, index in zip(row, here):
                place.imshow(ImageOps.fit(photographs[index], (128, 128)))
                name = model.config.id2label[labels[index].item()]
                place.set_title(f"{name}, {confidence[index]:.0%}", fontsize=7)
    return figure
