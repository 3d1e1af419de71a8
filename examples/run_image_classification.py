"""
Fine-tune an AdaPerceiver to classify images: every token count, width and depth in one pass, the backbone frozen
unless `--train_all`.

    accelerate launch examples/run_image_classification.py                            # procedural scenes, minutes on two cores
    accelerate launch examples/run_image_classification.py examples/recipes/imagenet1k.yaml --model ... --dataset ...

With --dataset and no recipe it runs recipes/own_classification.yaml. The recipe's values can be overridden on the command line;
`--help` lists all options with what they are by the recipe.
"""

import torch

from adaperceiver import image_processor_for
from adaperceiver.training.arguments import OptimizationArguments, RunArguments, command_line, parse, recipe_for
from adaperceiver.training.augmentation import Augment, AugmentationArguments
from adaperceiver.training.data import (
    DataArguments,
    MicroBatches,
    check_labels,
    classes_seen,
    label_names,
    load_splits,
    validation_batches,
)
from adaperceiver.training.finetuning import FineTuningArguments, fine_tune, load_model
from adaperceiver.training.loop import print_plan, start


GROUPS = [RunArguments, DataArguments, AugmentationArguments, OptimizationArguments, FineTuningArguments]
TASK = "image-classification"


def mixed_labels(batch: dict[str, torch.Tensor], num_labels: int) -> torch.Tensor:
    """What mixed images show, (batch, num_labels), as logits: the KL divergence to them is the cross-entropy with soft labels."""
    own, other = (torch.nn.functional.one_hot(batch[name], num_labels) for name in ("labels", "other_labels"))
    share = batch["share"][:, None]
    return (share * own + (1 - share) * other).clamp(min=1e-8).log()


def run_stage(
    run: RunArguments,
    data: DataArguments,
    augmentation: AugmentationArguments,
    optimization: OptimizationArguments,
    tuning: FineTuningArguments,
) -> None:
    if data.streaming:
        raise ValueError("--streaming is not for fine-tuning, whose data is passed many times.")
    tuning.check()
    session = start(run, data, optimization, augmentation, tuning)
    if session is None:
        return
    training_data, validation_data = load_splits(data)
    names = label_names(training_data, data)
    if names is None:
        raise ValueError(f"--dataset {data.dataset} does not name its classes: give --label_map.")
    for split in (training_data, validation_data):
        check_labels(split, data.dataset, len(names))
    model = load_model(tuning, TASK, names)
    processor = image_processor_for(model.config, TASK)
    augment = Augment(augmentation, model.config.image_size)
    batches = MicroBatches(training_data, optimization.micro_batch_size, augment, run.seed)
    sides = (model.config.image_size,) * 2
    steps = print_plan(session, training_data, validation_data, names, classes_seen(training_data), sides)
    mixes = augmentation.mixup_alpha or augmentation.cutmix_alpha

    def targets_of(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"teacher_logits": mixed_labels(batch, len(names))} if mixes else {"labels": batch["labels"]}

    def validation():
        return validation_batches(validation_data, processor, tuning.eval_batch_size, session.accelerator)

    script = "examples/run_image_classification.py"
    fine_tune(TASK, script, session, tuning, model, processor, batches, targets_of, validation, steps)


def main(arguments: list[str]) -> None:
    recipe = recipe_for(arguments, "scenes_classification.yaml", "own_classification.yaml")
    for stage in parse(GROUPS, arguments, recipe):
        run_stage(*stage)


if __name__ == "__main__":
    command_line(main)
