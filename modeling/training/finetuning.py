"""
What the fine-tuning scripts share: a checkpoint with a head for new labels, what of it is trained, and the run itself.

As in the paper, the backbone is frozen: training reaches the write attention, the output tokens and the head, and layers that
the checkpoint does not have. What is frozen runs without a graph, so it keeps no activations.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.hf_argparser import HfArg

from .. import image_processor_for, modeling_adaperceiver
from ..evaluation.grid import SCORES, along_axes, evaluate_grid, metrics_for, table_points
from ..tasks_adaperceiver import TASKS
from .arguments import OptimizationArguments, RunArguments
from .cards import accuracy_table, model_card
from .checks import SHIPPED, as_text, at_least, check_axes, check_checkpoint, check_config, config_fields, require
from .data import MicroBatches
from .dense_augmentation import DenseAugmentation, PairedAugment
from .dense_data import (
    DenseDataArguments,
    check_samples,
    dense_validation_batches,
    encoding_of,
    load_dense_splits,
    mask_names,
    read_dense,
)
from .loop import Session, draws, freeze_stem, normalisation, print_plan, start, train


TRAINED = ("adaperceiver.class_readout.", "adaperceiver.dense_readout.", "classifier.", "head.")


@dataclass
class FineTuningArguments:
    model: str = HfArg(default=SHIPPED, help="A hub id or folder of any AdaPerceiver checkpoint.")
    config_changes: str = HfArg(
        default="{}", help="Fields of AdaPerceiverConfig that differ from the checkpoint's, as JSON."
    )
    adaptive_axes: list[str] = field(default_factory=lambda: ["tokens"])
    image_size: list[int] | None = HfArg(
        default=None, help="Height and width that the model sees; by default the paper's for its size."
    )
    train_all: bool = HfArg(default=False, help="Train the whole network, not the readout and head alone.")
    freeze_stem: bool = HfArg(
        default=False, help="Of the whole network, leave the convolutions of the stem as they are."
    )
    eval_batch_size: int = 32

    def __post_init__(self):
        check_axes(self)
        at_least(self, 1, "eval_batch_size")
        require(self, "a height and a width", lambda size: len(size) == 2 and min(size) > 0, "image_size")

    def check(self) -> None:
        """Raise where the arguments name what is not there, before anything is loaded."""
        check_checkpoint("model", self.model, adaperceiver=True)
        changes = config_fields("config_changes", self.config_changes)
        patch = check_config("config_changes", changes, self.model).patch_size
        if self.image_size is not None and any(side % patch for side in self.image_size):
            raise ValueError(
                f"--image_size must be a height and a width, multiples of {patch}, got {as_text(self.image_size)}."
            )

    def loss_options(self, step: int) -> dict[str, Any]:
        """Keyword arguments of the model's call."""
        return {}

    def metric_options(self) -> dict[str, Any]:
        return {}


def load_model(args: FineTuningArguments, task: str, names: Sequence[str] | None) -> torch.nn.Module:
    """The checkpoint under the head of a task, for the labels `names`, with what stays as it is frozen."""
    model_class = getattr(modeling_adaperceiver, TASKS[task].model_class)
    changes = {
        "adaptive_axes": args.adaptive_axes,
        "distillation_temperature": 1.0,
        **config_fields("config_changes", args.config_changes),
    }
    if names is not None:
        changes |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    model, found = model_class.from_pretrained(
        args.model, **changes, ignore_mismatched_sizes=True, output_loading_info=True
    )
    new = {*found["missing_keys"], *(key[0] for key in found["mismatched_keys"])}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(args.train_all or name.startswith(TRAINED) or name in new)
    if args.freeze_stem:
        freeze_stem(model)
    model.drop_scores("training changes its weights")
    return model


def fine_tune(
    task: str,
    script: str,
    session: Session,
    tuning: FineTuningArguments,
    model: torch.nn.Module,
    processor: Any,
    batches: torch.utils.data.Dataset,
    targets_of: Callable[[dict], dict[str, torch.Tensor]],
    validation: Callable[[], Iterator[tuple[torch.Tensor, Any]]],
    steps: int,
) -> None:
    """
    Train, evaluate on what `validation()` gives, and save. `targets_of(batch)` are the arguments of the model's call with the
    targets of a micro-batch.
    """
    score, name, accelerator = SCORES[task].name, session.dataset, session.accelerator
    mean, std = normalisation(processor, accelerator)
    draw = draws(session, model.config, tuning.adaptive_axes)
    new_metric = metrics_for(task, model.config.num_labels, **tuning.metric_options())

    def loss_of(model: torch.nn.Module, batch: dict, step: int) -> torch.Tensor:
        options = {**targets_of(batch), **tuning.loss_options(step)}
        return model((batch["images"] - mean) / std, once_for_all=draw(batch, step), **options).loss

    def evaluate(model: torch.nn.Module) -> dict[str, Any]:
        points = grid_of(model.config, tuning.adaptive_axes)
        rows = evaluate_grid(model, validation(), new_metric, accelerator, **points)
        return {**along_axes(rows, score), "grid": table_points(rows, score)}

    def save(model: torch.nn.Module, folder: Path, metrics: dict[str, Any]) -> None:
        higher = SCORES[task].higher_is_better
        model.accuracy_table = accuracy_table(score, metrics["grid"], session.data.dataset, higher_is_better=higher)
        if accelerator.is_main_process:
            processor.save_pretrained(folder)  # before the model, which keeps the one it finds
        card = model_card(f"AdaPerceiver fine-tuned on {name}", script, session.arguments, metrics)
        model.save_pretrained(folder, is_main_process=accelerator.is_main_process, model_card=card)

    train(session, model, batches, loss_of, evaluate, save, steps, SCORES[task].higher_is_better)
    accelerator.print(f"The model is in {Path(session.run.output_dir) / 'final'}.")


def fine_tune_dense(
    task: str,
    script: str,
    run: RunArguments,
    data: DenseDataArguments,
    augmentation: DenseAugmentation,
    optimization: OptimizationArguments,
    tuning: FineTuningArguments,
) -> None:
    """Fine-tune a segmentation or a depth model, by `task`."""
    tuning.check()
    session = start(run, data, optimization, augmentation, tuning)
    if session is None:
        return
    accelerator = session.accelerator
    training_data, validation_data = load_dense_splits(data, task)
    names = mask_names(training_data) if task == "image-segmentation" else None
    model = load_model(tuning, task, names)
    seen = None
    for split in (validation_data, training_data) if accelerator.is_main_process else ():
        seen = check_samples(split, task, model.config.num_labels if names else None)
    processor = image_processor_for(model.config, task)
    if tuning.image_size is not None:
        processor.size = dict(zip(("height", "width"), tuning.image_size))
    processor.do_reduce_labels = encoding_of(training_data).reduce_labels
    size = (processor.size["height"], processor.size["width"])
    steps = print_plan(session, training_data, validation_data, names, seen, size)
    augment = PairedAugment(augmentation, size, task)
    batches = MicroBatches(training_data, optimization.micro_batch_size, augment, run.seed, read=read_dense)

    def validation() -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        return dense_validation_batches(validation_data, processor, tuning.eval_batch_size, accelerator, task)

    def targets_of(batch: dict) -> dict[str, torch.Tensor]:
        return {"labels": batch["labels"]}

    fine_tune(task, script, session, tuning, model, processor, batches, targets_of, validation, steps)


def grid_of(config: Any, axes: Sequence[str]) -> dict[str, Sequence[int]]:
    """The operating points that a training over `axes` covers."""
    return {
        "tokens": config.token_granularities if "tokens" in axes else [config.max_latent_tokens],
        "widths": config.widths if "width" in axes else [config.max_width],
        "depths": range(1, config.num_hidden_layers + 1) if "depth" in axes else [config.num_hidden_layers],
    }
