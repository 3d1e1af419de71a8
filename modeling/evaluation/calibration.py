"""
The exit threshold that keeps the accuracy of the full model.

An image is *lost* if the full model is correct and early exit is not. Temperatures, the threshold and the check each have images
of their own, so the bound on the share of lost images holds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from scipy.optimize import minimize_scalar
from scipy.stats import beta
from torch import nn
from tqdm.auto import tqdm

from ..adaptive_adaperceiver import OperatingPoint
from ..modeling_adaperceiver import AdaPerceiverForImageClassification
from .grid import early_exit, gflops


THRESHOLDS = [1 - 0.005 * step for step in range(1, 141)]  # from 0.995 down to 0.3


@dataclass
class Calibration:
    """What was found, and what it gives on images that had no part in it."""

    exit_threshold: float
    exit_temperatures: list[float] | None
    images: int
    accuracy: float
    full_accuracy: float  # without early exit
    lost: float  # share of the images
    flops: float  # probes included, as a share of those of the full model
    mean_exit_depth: float

    def __str__(self) -> str:
        temperatures = self.exit_temperatures or [1.0]
        return (
            f"exit_threshold {self.exit_threshold:.3f}, temperatures {temperatures[0]:.2f} (depth 1) to {temperatures[-1]:.2f}\n"
            f"On {self.images} other images: {self.accuracy:.2%} accuracy with early exit, {self.full_accuracy:.2%} without; "
            f"{self.lost:.2%} are lost; {self.flops:.1%} of the FLOPs, probes included; mean exit depth "
            f"{self.mean_exit_depth:.1f}."
        )


@torch.no_grad()
def collect(
    model: AdaPerceiverForImageClassification,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    tokens: int,
    width: int,
    progress: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (depths, images, labels) and labels."""
    logits, labels = [], []
    for pixel_values, of_batch in tqdm(batches, "logits", unit="batch", disable=not progress):
        logits.append(model.logits_grid(pixel_values, [tokens], width=width)[:, 0].float().cpu())
        labels.append(of_batch.cpu())
    if not labels:
        raise ValueError("There is nothing to calibrate on: the data set has no image that can be read.")
    return torch.cat(logits, dim=1), torch.cat(labels)


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The temperature, 0.05 to 20, with the least cross-entropy. logits: (images, labels)"""

    def loss(log_temperature: float) -> float:
        return nn.functional.cross_entropy(logits.double() / math.exp(log_temperature), labels).item()

    return math.exp(minimize_scalar(loss, bounds=(math.log(0.05), math.log(20)), method="bounded").x)


def expected_calibration_error(logits: torch.Tensor, labels: torch.Tensor, bins: int = 15) -> float:
    """Mean gap between confidence and accuracy over `bins` of equal width. logits: (images, labels)"""
    confidence, predicted = logits.double().softmax(dim=-1).max(dim=-1)
    gap = (predicted == labels).double() - confidence  # summed within a bin: its images times its gap
    bin_of_image = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64, device=logits.device).index_add_(0, bin_of_image, gap)
    return gaps.abs().sum().item() / len(labels)


@torch.no_grad()
def scale_classifier(
    model: AdaPerceiverForImageClassification, logits: torch.Tensor, labels: torch.Tensor, seed: int = 0
) -> tuple[float, float, float]:
    """
    Divide the classifier by the temperature of the full model, so that its scores mean what they say; predictions stay the
    same. The temperature, and its calibration error on other images before and after. logits: (images, labels)
    """
    fit, find, check = parts(len(labels), seed)
    others = torch.cat([find, check])
    temperature = fit_temperature(logits[fit], labels[fit])
    for parameter in model.classifier.parameters():
        parameter.div_(temperature)
    before, after = (
        expected_calibration_error(logits[others] / scale, labels[others]) for scale in (1.0, temperature)
    )
    return temperature, before, after


def parts(images: int, seed: int) -> tuple[torch.Tensor, ...]:
    """One fifth of the images for temperatures, two fifths for the threshold, the others to check it."""
    if images < 5:
        raise ValueError(f"Calibration needs at least 5 images, got {images}.")
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    return order.tensor_split([images // 5, 3 * (images // 5)])


def upper_bound(events: int, trials: int, confidence: float) -> float:
    """Clopper and Pearson: with this confidence, a probability that gave `events` in `trials` is not larger than this."""
    return float(beta.ppf(confidence, events + 1, trials - events)) if events < trials else 1.0


def lost(
    logits: torch.Tensor, labels: torch.Tensor, point: OperatingPoint
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each image: whether early exit loses it, whether it is correct with early exit, and its exit depth."""
    exited, depth = early_exit(logits, point)
    correct, full = exited.argmax(dim=-1) == labels, logits[-1].argmax(dim=-1) == labels
    return full & ~correct, correct, depth


def find_threshold(
    logits: torch.Tensor, labels: torch.Tensor, point: OperatingPoint, max_drop: float, confidence: float
) -> float | None:
    """
    The lowest threshold whose bound keeps within `max_drop`; None if not even the highest does. Thresholds are tested in a
    fixed order, from the top down to the first that fails, so the confidence holds for the one that is chosen.
    """
    found = None
    for threshold in THRESHOLDS:
        events = int(lost(logits, labels, point._replace(exit_threshold=threshold))[0].sum())
        if upper_bound(events, len(labels), confidence) > max_drop:
            return found
        found = threshold
    return found


def calibrate(
    model: AdaPerceiverForImageClassification,
    logits: torch.Tensor,
    labels: torch.Tensor,
    point: OperatingPoint,
    max_drop: float = 0.005,
    confidence: float = 0.95,
    temperatures: bool = True,
    seed: int = 0,
) -> Calibration:
    """
    Fit temperatures on one fifth of the images, find the threshold on two fifths, and check it on the others.

    `logits` (depths, images, labels) are those of `collect` at the tokens and the width of `point`, the full model.
    """
    for name, value in (("max_drop", max_drop), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ValueError(f"--{name} must be between 0 and 1, got {value}.")
    fit, find, check = parts(len(labels), seed)
    fitted = fit_temperatures(logits[:, fit], labels[fit]) if temperatures else None
    whole = point._replace(exit_threshold=None, exit_temperatures=None if fitted is None else tuple(fitted))
    threshold = find_threshold(logits[:, find], labels[find], whole, max_drop, confidence)
    if threshold is None:
        least = upper_bound(0, len(find), confidence)
        raise ValueError(
            f"No threshold keeps within --max_drop {max_drop}. With {len(find)} images the bound is at least {least:.4f}, "
            "whatever they show: allow more, or give more images."
        )
    early = whole._replace(exit_threshold=threshold)
    is_lost, correct, depth = lost(logits[:, check], labels[check], early)
    spent = sum(gflops(model, early, None, at) for at in depth.tolist()) / len(check)
    return Calibration(
        round(threshold, 4),
        fitted,
        len(check),
        correct.float().mean().item(),
        (logits[-1, check].argmax(dim=-1) == labels[check]).float().mean().item(),
        is_lost.float().mean().item(),
        spent / gflops(model, whole, None),
        depth.float().mean().item(),
    )


def fit_temperatures(logits: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """One for each depth. logits: (depths, images, labels)"""
    return [round(fit_temperature(of_depth, labels), 4) for of_depth in logits]
