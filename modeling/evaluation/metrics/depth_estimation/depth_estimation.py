"""Errors of depth maps from running sums, for `evaluate.load("modeling/evaluation/metrics/depth_estimation", crop="eigen")`."""

import math

import torch
from datasets import Sequence, Value

from adaperceiver.evaluation.running_sums import RunningSums


SCORES = ("rmse", "abs_rel", "log10", "delta1", "delta2", "delta3", "silog")


class DepthEstimation(RunningSums):
    """
    RMSE, AbsRel, log10, the shares δ1 to δ3 and SILog of each image over its valid pixels, averaged over images.

    `state` (9) holds the sums of the scores in the order of `SCORES`, the images they are of, and the images left out because
    they have no valid pixel. Pixels are valid where `min_depth < reference < max_depth`, within the crop; predictions are
    clamped to that range. `crop` is "eigen", the part of NYUv2's frames that the literature evaluates, or "none".
    """

    inputs = (
        "predictions and references: metres (batch, height, width) or (batch, 1, height, width); predictions of another size "
        "are resized to the references."
    )
    features = dict.fromkeys(("predictions", "references"), Sequence(Sequence(Value("float32"))))

    def __init__(self, min_depth: float = 0.001, max_depth: float = 10.0, crop: str = "eigen", **of_load):
        if not 0 < min_depth < max_depth:
            raise ValueError(f"`min_depth` must be between 0 and `max_depth`, {max_depth}, got {min_depth}.")
        if crop not in ("eigen", "none"):
            raise ValueError(f"`crop` must be 'eigen' or 'none', got {crop!r}.")
        self.min_depth, self.max_depth, self.crop = min_depth, max_depth, crop
        super().__init__(torch.zeros(len(SCORES) + 2, dtype=torch.float64), **of_load)

    def add_batch(self, *, predictions, references) -> None:
        """Adds a batch."""
        predicted, depth = depth_maps("predictions", predictions), depth_maps("references", references)
        if len(predicted) != len(depth):
            raise ValueError(f"`references` must be {len(predicted)} maps, as `predictions`, got {len(depth)}.")
        if (wrong := ~predicted.isfinite().flatten(1).all(dim=1)).any():
            sample = wrong.nonzero()[0].item()
            raise ValueError(f"`predictions` must be finite, got NaN or infinity in sample {sample}.")
        depth, size = depth.to(predicted.device), depth.shape[1:]
        if predicted.shape[1:] != size:
            predicted = torch.nn.functional.interpolate(predicted[:, None], size, mode="bilinear")[:, 0]
        if self.crop == "eigen":
            height, width = size
            rows = slice(45 * height // 480, 471 * height // 480)
            columns = slice(41 * width // 640, 601 * width // 640)
            predicted, depth = predicted[:, rows, columns], depth[:, rows, columns]

        predicted, depth = predicted.flatten(1).clamp(self.min_depth, self.max_depth), depth.flatten(1)
        valid = (depth > self.min_depth) & (depth < self.max_depth)  # false for NaN, too
        scores = image_scores(predicted, depth, valid)[valid.any(dim=1)]
        counts = torch.tensor([len(scores), len(depth) - len(scores)])
        self.state += torch.cat([scores.cpu().double().sum(dim=0), counts])

    def scores(self, state: torch.Tensor) -> dict[str, float]:
        """
        Means over images, how many they are (`images`), and how many were left out because they have no valid pixel
        (`skipped_images`).
        """
        *sums, images, skipped = state.tolist()
        if images == 0:
            got = f"none of the {skipped:.0f} added since the last call"
            raise ValueError(f"`compute` needs images with valid pixels: {got} has one.")
        means = {name: total / images for name, total in zip(SCORES, sums)}
        return {**means, "images": int(images), "skipped_images": int(skipped)}


def depth_maps(name: str, values) -> torch.Tensor:
    """(batch, height, width) or (batch, 1, height, width) -> (batch, height, width) in float32, without gradient"""
    maps = torch.as_tensor(values).detach()
    maps = maps[:, 0] if maps.ndim == 4 and maps.shape[1] == 1 else maps
    if maps.ndim != 3 or not maps.is_floating_point():
        got = f"{maps.dtype} {tuple(maps.shape)}"
        raise ValueError(
            f"`{name}` must be metres, floats (batch, height, width) or (batch, 1, height, width), got {got}."
        )
    return maps.float()


def image_scores(predicted: torch.Tensor, depth: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """(batch, pixels) each -> (batch, scores) in the order of `SCORES`"""
    pixels = valid.sum(dim=1).clamp(min=1)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return values.sum(dim=1) / pixels

    predicted, depth = torch.where(valid, predicted, 1), torch.where(valid, depth, 1)  # no error where not valid
    error, log_error = predicted - depth, predicted.log() - depth.log()
    # equal to mean(e²) - mean(e)², which in float32 loses its digits where all depths are wrong by one factor
    variance = mean((log_error - mean(log_error)[:, None]) ** 2 * valid)
    ratio = torch.maximum(predicted / depth, depth / predicted)
    return torch.stack(
        [
            mean(error**2).sqrt(),
            mean(error.abs() / depth),
            mean(log_error.abs()) / math.log(10),
            *[mean((ratio < 1.25**power) & valid) for power in (1, 2, 3)],
            100 * variance.sqrt(),
        ],
        dim=1,
    )
