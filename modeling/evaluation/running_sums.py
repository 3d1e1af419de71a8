"""What the metrics share."""

from abc import ABC, abstractmethod
from typing import Any

import datasets
import evaluate
import torch
from accelerate import Accelerator


class RunningSums(evaluate.Metric, ABC):  # abstract, so `evaluate.load` takes a module's own class for its metric
    """
    A metric that keeps sums alone: `state`, which `add_batch` adds to and `scores` reads.

    evaluate.Metric keeps every sample in an Arrow file behind a lock, and joins processes through such files. Sums say as
    much: hundreds of metrics can be open at once, memory does not grow, and Accelerate adds up processes. The arguments after
    `state` are those of `evaluate.load`; `keep_in_memory` makes no difference.
    """

    inputs: str  # what predictions and references are
    features: dict[str, Any]  # of one sample

    def __init__(
        self,
        state: torch.Tensor,
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
        self.state = state
        super().__init__(
            config_name, cache_dir=cache_dir, process_id=process_id, experiment_id=experiment_id, hash=hash
        )

    def _info(self) -> evaluate.MetricInfo:
        features, inputs = datasets.Features(self.features), f"\n\n{self.inputs}"
        return evaluate.MetricInfo(
            description=type(self).__doc__, citation="", inputs_description=inputs, features=features
        )

    def add(self, *, prediction, reference) -> None:
        """Adds one sample."""
        self.add_batch(predictions=torch.as_tensor(prediction)[None], references=torch.as_tensor(reference)[None])

    @abstractmethod
    def add_batch(self, *, predictions, references) -> None:
        """Adds a batch."""

    @abstractmethod
    def scores(self, state: torch.Tensor) -> dict[str, Any]:
        """The scores of all that was added to `state`; an error if that is nothing."""

    def compute(self, *, predictions=None, references=None, accelerator: Accelerator | None = None) -> dict[str, Any]:
        """
        Scores of all that was added since the last call, on all processes of `accelerator` if that is given.
        """
        given = {"predictions": predictions, "references": references}
        if given := {name: values for name, values in given.items() if values is not None}:
            self.add_batch(**given)
        state, self.state = self.state, torch.zeros_like(self.state)
        if accelerator is not None and accelerator.num_processes > 1:
            state = accelerator.reduce(state.to(accelerator.device), "sum").cpu()
        return self.scores(state)
