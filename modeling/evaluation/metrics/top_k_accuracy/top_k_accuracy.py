"""Top-k accuracy from running sums, for `evaluate.load("modeling/evaluation/metrics/top_k_accuracy", k=[1, 5])`."""

from collections.abc import Sequence

import datasets
import evaluate
import torch
from accelerate import Accelerator


class TopKAccuracy(evaluate.Metric):
    """
    Share of samples whose label is among the `k` highest logits, for each of several `k`.

    `state` (len(k) + 1) holds how many labels were found for each `k`, and the number of samples.
    """

    # evaluate.Metric keeps every sample in an Arrow file behind a lock, and joins processes through such files. Sums say as
    # much: `add`, `add_batch` and `compute` are overridden to keep those alone. Hundreds of metrics can be open at once,
    # memory does not grow, and Accelerate adds up processes. The arguments after the first are those of `evaluate.load`;
    # `keep_in_memory` makes no difference.
    def __init__(
        self,
        k: int | Sequence[int] = (1, 5),
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
        self.k = [k] if isinstance(k, int) else list(k)
        if not self.k or len(set(self.k)) < len(self.k) or min(self.k) < 1:
            raise ValueError(f"`k` must be different numbers from 1 up, got {k}.")
        self.state = torch.zeros(len(self.k) + 1, dtype=torch.int64)
        super().__init__(
            config_name, cache_dir=cache_dir, process_id=process_id, experiment_id=experiment_id, hash=hash
        )

    def _info(self) -> evaluate.MetricInfo:
        logits = datasets.Sequence(datasets.Value("float32"))
        return evaluate.MetricInfo(
            description=type(self).__doc__,
            citation="",
            inputs_description="\n\npredictions: logits (batch, classes); references: labels (batch).",
            features=datasets.Features({"predictions": logits, "references": datasets.Value("int64")}),
        )

    def add(self, *, prediction, reference) -> None:
        """Adds one sample."""
        self.add_batch(predictions=torch.as_tensor(prediction)[None], references=torch.as_tensor(reference)[None])

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
        right = (rank[:, None] < torch.tensor(self.k, device=rank.device)).sum(dim=0)
        self.state += torch.cat([right.cpu(), torch.tensor([len(labels)])])

    def compute(
        self, *, predictions=None, references=None, accelerator: Accelerator | None = None
    ) -> dict[str, float]:
        """
        `top1`, `top5`, ... of all that was added since the last call, on all processes of `accelerator` if that is given.
        """
        given = {"predictions": predictions, "references": references}
        if given := {name: values for name, values in given.items() if values is not None}:
            self.add_batch(**given)
        state, self.state = self.state, torch.zeros_like(self.state)
        if accelerator is not None and accelerator.num_processes > 1:
            state = accelerator.reduce(state.to(accelerator.device), "sum").cpu()
        *right, samples = state.tolist()
        if samples == 0:
            raise ValueError("`compute` needs samples: none was added since the last call.")
        return {f"top{k}": count / samples for k, count in zip(self.k, right)}
