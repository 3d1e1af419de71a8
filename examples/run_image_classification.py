"""
Fine-tune an AdaPerceiver to classify images: every token count, width and depth in one pass, the backbone frozen
unless `--train_all`.

    accelerate launch examples/run_image_classification.py                            # procedural scenes, minutes on two cores
    accelerate launch examples/run_image_classification.py examples/recipes/imagenet1k.yaml --model ... --dataset ...

With --dataset and no recipe it runs recipes/own_classification.yaml. The recipe's values can be overridden on the command line;
`--help` lists all options with what they are by the recipe.
"""

import torch
from accelerate import PartialState

from adaperceiver import AdaPerceiverForImageClassification, image_processor_for
from adaperceiver.evaluation.grid import evaluate_grid, metrics_for
from adaperceiver.training.arguments import (
    RECIPES,
    OptimizationArguments,
    RunArguments,
    command_line,
    parse,
    recipe_for,
)
from adaperceiver.training.augmentation import Augment, AugmentationArguments
from adaperceiver.training.data import (
    DataArguments,
    MicroBatches,
    classes_seen,
    label_names,
    load_splits,
    validation_batches,
)
from adaperceiver.training.finetuning import FineTuningArguments, fine_tune, grid_of, load_model
from adaperceiver.training.loop import draws, print_plan, start


SCRIPT = "examples/run_image_classification.py"
GROUPS = [RunArguments, DataArguments, AugmentationArguments, OptimizationArguments, FineTuningArguments]
TASK = "image-classification"


def mixed_labels(batch: dict[str, torch.Tensor], num_labels: int) -> torch.Tensor:
    """What mixed images show, (batch, num_labels), as logits: the KL divergence to them is the cross-entropy with soft labels."""
    own, other = (torch.nn.functional.one_hot(batch[name], num_labels) for name in ("labels", "other_labels"))
    share = batch["share"][:, None]
    return (share * own + (1 - share) * other).clamp(min=1e-8).log()


def run_stage(run, data, augmentation, optimization, tuning) -> None:
    if data.streaming:
        raise ValueError("--streaming is not for fine-tuning, whose data is passed many times.")
    tuning.check()
    session = start(run, data, optimization, augmentation, tuning)
    if session is None:
        return
    accelerator = session.accelerator
    training_data, validation_data = load_splits(data)
    names = label_names(training_data, data)
    if names is None:
        raise ValueError(f"--dataset {data.dataset} does not name its classes: give --label_map.")
    model = load_model(tuning, AdaPerceiverForImageClassification, names)
    processor = image_processor_for(model.config, TASK)
    augment = Augment(augmentation, model.config.image_size)
    batches = MicroBatches(training_data, optimization.micro_batch_size, augment, run.seed)
    sides = (model.config.image_size,) * 2
    steps = print_plan(session, training_data, validation_data, names, classes_seen(training_data), sides)
    draw = draws(session, model.config, tuning.adaptive_axes)
    mixes = augmentation.mixup_alpha or augmentation.cutmix_alpha
    new_metric = metrics_for(TASK, len(names))

    def loss_of(model, pixel_values, batch, step):
        target = {"teacher_logits": mixed_labels(batch, len(names))} if mixes else {"labels": batch["labels"]}
        return model(pixel_values, once_for_all=draw(batch, step), **target).loss

    def measure(model):
        validation = validation_batches(validation_data, processor, tuning.eval_batch_size, accelerator)
        return evaluate_grid(model, validation, new_metric, accelerator, **grid_of(model.config, tuning.adaptive_axes))

    fine_tune(TASK, model, processor, batches, loss_of, measure, session, steps, SCRIPT)


def main(arguments: list[str]) -> None:
    recipe = recipe_for(arguments, RECIPES / "scenes_classification.yaml", RECIPES / "own_classification.yaml")
    for stage in parse(GROUPS, arguments, recipe):
        run_stage(*stage)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    command_line(main)
