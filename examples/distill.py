"""
Train one AdaPerceiver for every number of tokens, every width and every depth, from a teacher.

    accelerate launch examples/distill.py                                    # procedural scenes, minutes
    accelerate launch examples/distill.py examples/recipes/cifar10.yaml --dataset path/to/cifar10
    accelerate launch examples/distill.py examples/recipes/imagenet12k.yaml --output_dir runs/paper --resume
    accelerate launch examples/distill.py --dataset path/to/images --teacher TEACHER    # recipes/own_distillation.yaml

The recipe's values can be overridden on the command line; `--help` lists all options with what they are by the recipe.
"""

import json
import os
from functools import partial
from pathlib import Path

from accelerate import PartialState

from adaperceiver.image_processing_adaperceiver import image_processor_for
from adaperceiver.training.arguments import OptimizationArguments, RunArguments, command_line, parse, recipe_for
from adaperceiver.training.augmentation import Augment, AugmentationArguments
from adaperceiver.training.cards import accuracy_table, model_card
from adaperceiver.training.checks import config_fields
from adaperceiver.training.data import check_labels, classes_seen, label_names, load_several
from adaperceiver.training.distillation import (
    DistillationArguments,
    DistillationData,
    build_student,
    check,
    distillation_loss,
    evaluate_features,
    evaluate_logits,
    load_teacher,
    micro_batches,
)
from adaperceiver.training.loop import freeze_stem, print_plan, start, train


GROUPS = [RunArguments, DistillationData, AugmentationArguments, OptimizationArguments, DistillationArguments]
USAGE = """    from transformers import pipeline
    classify = pipeline("image-classification", "{folder}", trust_remote_code=True)
    classify("image.png", exit_threshold=0.9, report=True)"""


def run_stage(
    run: RunArguments,
    data: DistillationData,
    augmentation: AugmentationArguments,
    optimization: OptimizationArguments,
    args: DistillationArguments,
) -> None:
    check(data, augmentation, args)
    session = start(run, data, optimization, augmentation, args)
    if session is None:
        return
    accelerator = session.accelerator
    features = args.distill == "features"
    training_data, validation_data = load_several(data, data.dataset, labelled=not features)

    teacher = load_teacher(session, args)
    if not features:
        teacher.check_labels(label_names(training_data), f"--dataset {' '.join(data.dataset)}")
        for split in (training_data, validation_data):
            check_labels(split, " ".join(data.dataset), len(teacher.id2label))
    student = build_student(args, teacher)
    if args.freeze_stem:
        freeze_stem(student)
    if features:  # what gets no gradient need not wait for one in other processes
        student.adaperceiver.class_readout.requires_grad_(False)
        student.classifier.requires_grad_(False)
    config = student.config

    classes = None if features else list(config.id2label.values())
    seen = None if features else classes_seen(training_data)
    steps = print_plan(session, training_data, validation_data, classes, seen, (config.image_size,) * 2)

    processor = image_processor_for(config, "image-classification")
    augment, grid = Augment(augmentation, config.image_size), (config.grid_size, config.grid_size)
    batches = micro_batches(session, training_data, augment, teacher, grid, args)
    loss_of = distillation_loss(session, config, processor, teacher, args)
    evaluate = partial(evaluate_features, teacher=teacher) if features else evaluate_logits

    def measure(model) -> dict:
        return evaluate(model, validation_data, processor, accelerator)

    def save(model, folder: Path, metrics: dict) -> None:
        if "grid" in metrics:
            model.accuracy_table = accuracy_table("top-1 accuracy", metrics["grid"], data.dataset)
        title = f"AdaPerceiver distilled on {session.dataset}"
        card = model_card(title, "examples/distill.py", session.arguments, metrics)
        model.save_pretrained(folder, is_main_process=accelerator.is_main_process, model_card=card)

    train(session, student, batches, loss_of, measure, save, steps)


def main(arguments: list[str]) -> None:
    continued = any(argument.split("=")[0] in ("--init_from", "--init-from") for argument in arguments)
    own = "own_from_checkpoint.yaml" if continued else "own_distillation.yaml"
    stages = parse(GROUPS, arguments, recipe_for(arguments, "scenes.yaml", own))
    for _, data, augmentation, _, args in stages:
        check(data, augmentation, args)
    before = None
    for run, data, augmentation, optimization, args in stages:
        if run.smoke:
            args.student = json.dumps({**config_fields("student", args.student), "num_hidden_layers": 2})
            args.compile_teacher = False
        if before is not None:
            args.init_from, args.stem_from = before, None
        run_stage(run, data, augmentation, optimization, args)
        before = os.path.join(run.output_dir, "final")  # the EMA weights
    if PartialState().is_main_process:
        print(f"The model is in {before}. Run it with\n{USAGE.format(folder=before)}")


if __name__ == "__main__":
    command_line(main)
