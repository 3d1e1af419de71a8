"""Mean IoU from one histogram, for `evaluate.load("modeling/evaluation/metrics/mean_iou", num_labels=150)`."""

import datasets
import evaluate
import numpy as np
import torch
from accelerate import Accelerator


class MeanIou(evaluate.Metric):
    """
    Intersection over union of each class over all pixels of all images, and its mean over classes.

    `state` (num_labels, num_labels) counts pixels: a row for each class of the reference, a column for each predicted one.
    Pixels whose reference is `ignore_index` do not count. `reduce_labels` is for references in which 0 means nothing
    and classes start at 1: 0 is ignored too, and the rest moves down by one.
    """

    # evaluate.Metric keeps every map in an Arrow file behind a lock, and joins processes through such files. A histogram says
    # as much: `add`, `add_batch` and `compute` are overridden to keep that alone. Hundreds of metrics can be open at once,
    # memory does not grow, and Accelerate adds up processes. The arguments after the third are those of `evaluate.load`;
    # `keep_in_memory` makes no difference.
    def __init__(
        self,
        num_labels: int,
        ignore_index: int = 255,
        reduce_labels: bool = False,
        *,
        config_name: str | None = None,
        cache_dir: str | None = None,
        experiment_id: str | None = None,
        hash: str | None = None,
        keep_in_memory: bool = True,
        process_id: int = 0,
        num_process: int = 1,
    ):
        if num_process != 1:
            raise ValueError(f"`num_process` must be 1, got {num_process}; join processes by `compute(accelerator=)`.")
        if num_labels < 1:
            raise ValueError(f"`num_labels` must be from 1 up, got {num_labels}.")
        self.num_labels, self.ignore_index, self.reduce_labels = num_labels, ignore_index, reduce_labels
        self.state = torch.zeros(num_labels, num_labels, dtype=torch.int64)
        super().__init__(
            config_name, cache_dir=cache_dir, process_id=process_id, experiment_id=experiment_id, hash=hash
        )

    def _info(self) -> evaluate.MetricInfo:
        classes = datasets.Sequence(datasets.Sequence(datasets.Value("int64")))
        return evaluate.MetricInfo(
            description=type(self).__doc__,
            citation="",
            inputs_description=(
                "\n\npredictions: classes (batch, height, width) or logits (batch, num_labels, height, width); references:"
                " classes (batch, height, width). Lists may hold maps of different sizes."
            ),
            features=datasets.Features({"predictions": classes, "references": classes}),
        )

    def add(self, *, prediction, reference) -> None:
        """Adds one image."""
        self.add_batch(predictions=[prediction], references=[reference])

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

    def compute(self, *, predictions=None, references=None, accelerator: Accelerator | None = None) -> dict:
        """
        Scores of all that was added since the last call, on all processes of `accelerator` if that is given. A class that is
        nowhere is NaN, and the means leave it out.
        """
        given = {"predictions": predictions, "references": references}
        if given := {name: values for name, values in given.items() if values is not None}:
            self.add_batch(**given)
        state, self.state = self.state, torch.zeros_like(self.state)
        if accelerator is not None and accelerator.num_processes > 1:
            state = accelerator.reduce(state.to(accelerator.device), "sum").cpu()
        state = state.double()
        if state.sum() == 0:
            raise ValueError(
                "`compute` needs pixels whose reference is not ignored: none was added since the last call."
            )
        right, of_reference, of_prediction = state.diag(), state.sum(dim=1), state.sum(dim=0)
        iou, accuracy = right / (of_reference + of_prediction - right), right / of_reference
        return {
            "mean_iou": iou.nanmean().item(),
            "mean_accuracy": accuracy.nanmean().item(),
            "overall_accuracy": (right.sum() / state.sum()).item(),
            "per_category_iou": iou.tolist(),
            "per_category_accuracy": accuracy.tolist(),
        }
