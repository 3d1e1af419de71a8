"""Mean IoU from one histogram, for `evaluate.load("modeling/evaluation/metrics/mean_iou", num_labels=150)`."""

from typing import Any

import numpy as np
import torch
from datasets import Sequence, Value

from adaperceiver.evaluation.running_sums import RunningSums


class MeanIou(RunningSums):
    """
    Intersection over union of each class over all pixels of all images, and its mean over classes.

    `state` (num_labels, num_labels) counts pixels: a row for each class of the reference, a column for each predicted one.
    Pixels whose reference is `ignore_index` are ignored. `reduce_labels` is for references in which 0 means nothing
    and classes start at 1: 0 is ignored too, and the rest moves down by one.
    """

    inputs = (
        "predictions: classes (batch, height, width) or logits (batch, num_labels, height, width); references: classes "
        "(batch, height, width). Lists may hold maps of different sizes."
    )
    features = dict.fromkeys(("predictions", "references"), Sequence(Sequence(Value("int64"))))

    def __init__(self, num_labels: int, ignore_index: int = 255, reduce_labels: bool = False, **of_load):
        if num_labels < 1:
            raise ValueError(f"`num_labels` must be from 1 up, got {num_labels}.")
        self.num_labels, self.ignore_index, self.reduce_labels = num_labels, ignore_index, reduce_labels
        super().__init__(torch.zeros(num_labels, num_labels, dtype=torch.int64), **of_load)

    def add_batch(self, *, predictions, references) -> None:
        """Adds a batch."""
        if len(predictions) != len(references):
            raise ValueError(f"`references` must be {len(predictions)}, as `predictions`, got {len(references)}.")
        # one by one: maps may differ in size, and those of one image stay in the cache
        for sample, (prediction, reference) in enumerate(zip(predictions, references)):
            self.state += self.histogram(torch.as_tensor(prediction), torch.as_tensor(reference), sample)

    def histogram(self, prediction: torch.Tensor, reference: torch.Tensor, sample: int) -> torch.Tensor:
        """(height, width) or (num_labels, height, width), and (height, width) -> (num_labels, num_labels)"""
        if prediction.ndim == 3 and len(prediction) == self.num_labels:
            highest, prediction = prediction.max(dim=0)
            if highest.isnan().any():
                raise ValueError(f"`predictions` must be numbers, got NaN in sample {sample}.")
        for name, classes in (("predictions", prediction), ("references", reference)):
            if classes.is_floating_point() or classes.shape != reference.shape or classes.ndim != 2:
                size = "(height, width)" if reference.ndim != 2 else tuple(reference.shape)
                or_logits = f" or logits of {self.num_labels} labels" if name == "predictions" else ""
                got = f"{classes.dtype} {tuple(classes.shape)} in sample {sample}"
                raise ValueError(f"`{name}` must be integers {size}{or_logits}, got {got}.")
        predicted, labels = prediction.cpu().numpy(), reference.cpu().numpy()  # bincount is faster than torch's

        counted, first = labels != self.ignore_index, int(self.reduce_labels)
        if self.reduce_labels:
            counted &= labels != 0
        predicted, labels = predicted[counted], labels[counted]
        for name, classes, low in (("predictions", predicted, 0), ("references", labels, first)):
            high = low + self.num_labels - 1
            if classes.size and (classes.min() < low or classes.max() > high):
                got = f"{classes[(classes < low) | (classes > high)][0]} in sample {sample}"
                raise ValueError(f"`{name}` must be from {low} to {high} where they are not ignored, got {got}.")
        cell = labels.astype(np.int64)  # in place from here: fresh memory for every step costs three times as much
        cell -= first
        cell *= self.num_labels
        np.add(cell, predicted, out=cell, casting="unsafe")  # checked above, so safe for any type of integers
        return torch.from_numpy(np.bincount(cell, minlength=self.state.numel())).view_as(self.state)

    def scores(self, state: torch.Tensor) -> dict[str, Any]:
        """A class without pixels has NaN, and the means ignore it."""
        state = state.double()
        if state.sum() == 0:
            raise ValueError(
                "`compute` needs pixels whose reference is not ignored: none was added since the last call."
            )
        correct, of_reference, of_prediction = state.diag(), state.sum(dim=1), state.sum(dim=0)
        iou, accuracy = correct / (of_reference + of_prediction - correct), correct / of_reference
        return {
            "mean_iou": iou.nanmean().item(),
            "mean_accuracy": accuracy.nanmean().item(),
            "overall_accuracy": (correct.sum() / state.sum()).item(),
            "per_category_iou": iou.tolist(),
            "per_category_accuracy": accuracy.tolist(),
        }
