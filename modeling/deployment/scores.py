"""What an export scores beside PyTorch, on the same images."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from ..adaptive_adaperceiver import OperatingPoint
from ..evaluation.calibration import calibrate
from ..evaluation.grid import SCORES, add, metrics_for
from ..modeling_adaperceiver import AdaPerceiverPreTrainedModel
from ..tasks_adaperceiver import TASKS
from .session import AdaptiveSession


THRESHOLDS = (0.8, 0.9, 0.95, 0.99)  # at which early exit is scored

Prediction = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def score_pairs(
    pairs: Sequence[tuple[dict[str, Any], Prediction, Prediction]],
    batches: Iterable[tuple[torch.Tensor, Any]],
    task: str,
    num_labels: int,
    **options: Any,
) -> list[dict[str, Any]]:
    """A row for each of `pairs` (what it is, PyTorch's prediction, the export's) with the score of both, from one pass."""
    new_metric, name = metrics_for(task, num_labels, **options), SCORES[task].name
    metrics = [(new_metric(), new_metric()) for _ in pairs]
    for pixel_values, targets in batches:
        for (_, *sides), of_pair in zip(pairs, metrics):
            for predict, metric in zip(sides, of_pair):
                add(metric, predict(pixel_values), targets)
    scores = [[metric.compute()[name] for metric in of_pair] for of_pair in metrics]
    return [{**what, "pytorch": ours, "exported": theirs} for (what, _, _), (ours, theirs) in zip(pairs, scores)]


def score_network(
    network: AdaPerceiverPreTrainedModel, predict: Callable, batches: Iterable, task: str, **options: Any
) -> list[dict[str, Any]]:
    """One row: an export of one network."""
    field = TASKS[task].prediction

    def exported(pixel_values: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(predict(pixel_values.numpy())[field])

    pair: tuple[dict, Callable, Callable] = ({}, lambda pixel_values: network(pixel_values)[field], exported)
    return score_pairs([pair], batches, task, network.config.num_labels, **options)


def score_bundle(
    model: AdaPerceiverPreTrainedModel, session: AdaptiveSession, batches: Iterable, task: str, **options: Any
) -> list[dict[str, Any]]:
    """A row for every token count and every width, the other axes being full, and for thresholds of early exit."""
    config, field = model.config, TASKS[task].prediction
    full = {"tokens": config.max_latent_tokens, "width": config.max_width, "depth": config.num_hidden_layers}
    points: list[dict[str, Any]] = [{**full, "tokens": tokens} for tokens in config.token_granularities]
    points += [{**full, "width": width} for width in config.widths[:-1]]
    points += [{**full, "exit_threshold": threshold} for threshold in (THRESHOLDS if model.exits_early else ())]

    def pair(point: dict[str, Any]) -> tuple[dict[str, Any], Prediction, Prediction]:
        point = {"exit_threshold": False, **point} if model.exits_early else point

        def exported(pixel_values: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(session(pixel_values.numpy(), **point).outputs[field])

        return point, lambda pixel_values: model(pixel_values, policy="fixed", **point)[field], exported

    return score_pairs([pair(point) for point in points], batches, task, config.num_labels, **options)


def recalibrate(
    model: AdaPerceiverPreTrainedModel, session: AdaptiveSession, batches: Iterable, max_drop: float = 0.005
) -> dict[str, Any]:
    """
    Temperatures and threshold of early exit by what `session` gives, as `examples/calibrate.py` finds them for a model: rounded
    weights may be sure of other things. They take the place of the model's in the session's manifest.
    """
    config, manifest = model.config, session.manifest
    by_depth: dict[int, list[np.ndarray]] = {depth: [] for depth in manifest["depths"]}
    labels = []
    for pixel_values, of_batch in batches:
        for depth, outputs in session.every_depth(pixel_values.numpy()):
            by_depth[depth].append(outputs["logits"])
        labels.append(of_batch)
    # Depths without a probe take the logits of the next one that has: nothing reads them.
    nearest = [
        next(stop for stop in manifest["depths"] if stop >= depth) for depth in range(1, config.num_hidden_layers + 1)
    ]
    logits = torch.stack([torch.from_numpy(np.concatenate(by_depth[depth])) for depth in nearest])
    exits = manifest["exit"]
    point = OperatingPoint(
        config.max_latent_tokens,
        config.max_width,
        config.num_hidden_layers,
        manifest["network"]["attention"],
        exit_after=exits["after"],
        exit_every=exits["every"],
    )
    found = asdict(calibrate(model, logits, torch.cat(labels), point, max_drop))
    exits["temperatures"] = found["exit_temperatures"]
    if "exit_threshold" in manifest["defaults"]:
        manifest["defaults"]["exit_threshold"] = found["exit_threshold"]
    return found
