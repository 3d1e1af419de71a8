"""Top-k accuracy from running sums, for `evaluate.load("modeling/evaluation/metrics/top_k_accuracy", k=[1, 5])`."""

from collections.abc import Sequence

import datasets
import torch

from adaperceiver.evaluation.running_sums import RunningSums


class TopKAccuracy(RunningSums):
    """
    Share of samples whose label is among the `k` highest logits, for each of several `k`.

    `state` (len(k) + 1) holds how many labels were found for each `k`, and the number of samples.
    """

    inputs = "predictions: logits (batch, classes); references: labels (batch)."
    features = {"predictions": datasets.Sequence(datasets.Value("float32")), "references": datasets.Value("int64")}

    def __init__(self, k: int | Sequence[int] = (1, 5), **of_load):
        self.k = [k] if isinstance(k, int) else list(k)
        if not self.k or len(set(self.k)) < len(self.k) or min(self.k) < 1:
            raise ValueError(f"`k` must be different numbers from 1 up, got {k}.")
        super().__init__(torch.zeros(len(self.k) + 1, dtype=torch.int64), **of_load)

    def add_batch(self, *, predictions, references) -> None:
        """Adds a batch."""
        logits, labels = torch.as_tensor(predictions), torch.as_tensor(references)
        labels = labels.to(logits.device)
        if logits.ndim != 2 or not logits.is_floating_point():
            got = f"{logits.dtype} {tuple(logits.shape)}"
            raise ValueError(f"`predictions` must be logits (batch, classes), got {got}.")
        if labels.shape != logits.shape[:1] or labels.is_floating_point():
            got = f"{labels.dtype} {tuple(labels.shape)}"
            raise ValueError(f"`references` must be integers ({len(logits)},), one for each prediction, got {got}.")
        classes = logits.shape[1]
        if max(self.k) > classes:
            raise ValueError(f"`k` must be at most the number of classes, {classes}, got {max(self.k)}.")
        if (wrong := (labels < 0) | (labels >= classes)).any():
            sample = wrong.nonzero()[0].item()
            got = f"{labels[sample]} in sample {sample}"
            raise ValueError(f"`references` must be from 0 to {classes - 1}, got {got}.")
        if (wrong := logits.isnan().any(dim=1)).any():
            raise ValueError(f"`predictions` must be numbers, got NaN in sample {wrong.nonzero()[0].item()}.")
        labels = labels.long()[:, None]
        own = logits.gather(1, labels)
        before = torch.arange(classes, device=logits.device) < labels
        rank = ((logits > own) | (logits == own) & before).sum(dim=1)  # of two equal ones the first wins, as in argmax
        found = (rank[:, None] < torch.tensor(self.k, device=rank.device)).sum(dim=0)
        self.state += torch.cat([found.cpu(), torch.tensor([len(labels)])])

    def scores(self, state: torch.Tensor) -> dict[str, float]:
        """`top1`, `top5`, ..."""
        *found, samples = state.tolist()
        if samples == 0:
            raise ValueError("`compute` needs samples: none was added since the last call.")
        return {f"top{k}": count / samples for k, count in zip(self.k, found)}
