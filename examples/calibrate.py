"""
Find the exit threshold that keeps the accuracy of the full model, and write it into the checkpoint.

    python examples/calibrate.py --model MODEL --dataset path/to/images --max_drop 0.005

It reads the validation images; give the `--holdout` of the training, so that the model was not trained on them. One fifth of
them finds a temperature for each depth. Two fifths find the lowest threshold at which early exit loses at most `--max_drop` of
the images, right with the full model and wrong without, with probability `--confidence`: the bound holds since they had no part
in the temperatures. The other two say what that gives. The result goes into `adaptive_config.json`, where every call finds it.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoImageProcessor, HfArgumentParser

from adaperceiver import AdaPerceiverForImageClassification, AdaptiveConfig
from adaperceiver.evaluation.grid import Point, gflops, leave
from adaperceiver.training.data import DataArguments, load_splits, validation_batches


THRESHOLDS = [1 - 0.005 * step for step in range(1, 141)]  # from 0.995 down to 0.3


@dataclass
class CalibrationArguments:
    model: str = field(metadata={"help": "Folder of an image classifier of AdaPerceiver."})
    max_drop: float = field(
        default=0.005, metadata={"help": "Share of images that may be lost against the full model, 0 to 1."}
    )
    confidence: float = field(default=0.95, metadata={"help": "Probability with which that holds."})
    tokens: int | None = field(default=None, metadata={"help": "By default all."})
    width: int | None = field(default=None, metadata={"help": "By default all."})
    temperatures: bool = field(default=True, metadata={"help": "Fit a temperature for each depth first."})
    batch_size: int = 64
    seed: int = 0
    save: bool = field(default=True, metadata={"help": "Write adaptive_config.json into the checkpoint."})


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor, rounds: int = 60) -> float:
    """The temperature with the least cross-entropy, by golden-section search over its logarithm. logits: (images, labels)"""

    def loss(log: float) -> float:
        return nn.functional.cross_entropy(logits / math.exp(log), labels).item()

    ratio, low, high = (math.sqrt(5) - 1) / 2, math.log(0.05), math.log(20)
    for _ in range(rounds):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return math.exp((low + high) / 2)


def upper_bound(events: int, trials: int, confidence: float) -> float:
    """Clopper and Pearson: with this confidence, a probability that gave `events` in `trials` is not larger than this."""
    if events >= trials:
        return 1.0

    def at_most(probability: float) -> float:
        """The chance of so few events or fewer."""
        terms = (
            math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
            + k * math.log(probability) + (trials - k) * math.log1p(-probability)
            for k in range(events + 1)
        )  # fmt: skip
        return math.fsum(math.exp(term) for term in terms)

    low, high = events / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(middle) > 1 - confidence else (low, middle)
    return high


def lost(logits: torch.Tensor, labels: torch.Tensor, threshold: float) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Images that the full model gets right and early exit does not; what is right with early exit; where images leave."""
    left, depth = leave(logits, threshold)
    right, full = left.argmax(dim=-1) == labels, logits[-1].argmax(dim=-1) == labels
    return int((full & ~right).sum()), right, depth


def find_threshold(logits: torch.Tensor, labels: torch.Tensor, max_drop: float, confidence: float) -> float | None:
    """
    The lowest threshold whose bound keeps within `max_drop`. From the top down, up to the first that does not: tests in a fixed
    order, so that the one that is chosen holds with the same confidence. None if not even the highest does.
    """
    found = None
    for threshold in THRESHOLDS:
        events, _, _ = lost(logits, labels, threshold)
        if upper_bound(events, len(labels), confidence) > max_drop:
            return found
        found = threshold
    return found


@torch.no_grad()
def collect(
    model: AdaPerceiverForImageClassification, batches: Sequence, **point: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (depths, images, labels) and labels."""
    logits, labels = [], []
    for pixel_values, of_batch in tqdm(batches, "logits", unit="batch"):
        tokens = model.operating_point(**point).tokens
        logits.append(model.logits_grid(pixel_values, [tokens], width=point["width"])[:, 0].float().cpu())
        labels.append(of_batch.cpu())
    if not labels:
        raise SystemExit("There is nothing to calibrate on: the data set has no image that can be read.")
    return torch.cat(logits, dim=1), torch.cat(labels)


def main(arguments: Sequence[str]) -> None:
    parser = HfArgumentParser([CalibrationArguments, DataArguments], allow_abbrev=False)
    args, data = parser.parse_args_into_dataclasses(list(arguments))
    for name in ("max_drop", "confidence"):
        if not 0 < getattr(args, name) < 1:
            raise SystemExit(f"--{name} must be between 0 and 1, got {getattr(args, name)}.")
    accelerator = Accelerator()
    model = AdaPerceiverForImageClassification.from_pretrained(args.model).eval().to(accelerator.device)
    saved, model.adaptive_config = model.adaptive_config, AdaptiveConfig()
    processor = AutoImageProcessor.from_pretrained(args.model)
    _, dataset = load_splits(data)
    point = {"tokens": args.tokens, "width": args.width}
    logits, labels = collect(model, validation_batches(dataset, processor, args.batch_size, accelerator), **point)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(args.seed))
    fifth = len(order) // 5
    fit, find, check = order[:fifth], order[fifth : 3 * fifth], order[3 * fifth :]
    temperatures = [1.0] * len(logits)
    if args.temperatures:
        temperatures = [round(fit_temperature(of_depth[fit], labels[fit]), 4) for of_depth in logits]
    scaled = logits / torch.tensor(temperatures)[:, None, None]
    threshold = find_threshold(scaled[:, find], labels[find], args.max_drop, args.confidence)
    if threshold is None:
        least = upper_bound(0, len(find), args.confidence)
        raise SystemExit(
            f"No threshold keeps within --max_drop {args.max_drop}. With {len(find)} images the bound is at least {least:.4f}, "
            "whatever they show: allow more, or give more images."
        )
    events, right, depth = lost(scaled[:, check], labels[check], threshold)
    full = (logits[-1, check].argmax(dim=-1) == labels[check]).float().mean().item()
    settled = model.operating_point(**point)
    whole = Point(settled.tokens, settled.width, settled.depth)
    size = (model.config.image_size, model.config.image_size)
    early = whole._replace(exit_threshold=threshold)
    spent = sum(gflops(model, early, size, at) for at in depth.tolist()) / len(check) / gflops(model, whole, size)
    print(
        f"exit_threshold {threshold:.3f}, temperatures {temperatures[0]:.2f} (depth 1) to {temperatures[-1]:.2f}\n"
        f"On {len(check)} other images: {right.float().mean().item():.2%} right with early exit, {full:.2%} without; "
        f"{events / len(check):.2%} are lost; {spent:.1%} of the FLOPs, probes included; {depth.float().mean():.1f} of "
        f"{settled.depth} blocks."
    )
    if args.save:
        found = {
            "exit_threshold": round(threshold, 4),
            "exit_temperatures": temperatures if args.temperatures else None,
        }
        saved.update(**found, **point).save_pretrained(args.model)
        print(f"Written to {args.model}/adaptive_config.json: every call exits early now, unless it says otherwise.")


if __name__ == "__main__":
    main(sys.argv[1:])
