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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node

from adaperceiver import (
    AccuracyTable,
    AdaPerceiverConfig,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
)
from adaperceiver.evaluation.grid import along_axes, evaluate_grid, metrics_for, table_points
from adaperceiver.image_processing_adaperceiver import image_processor_for
from adaperceiver.training.arguments import (
    OptimizationArguments,
    RunArguments,
    command_line,
    parse,
    recipe_for,
    shrink,
)
from adaperceiver.training.augmentation import Augment, AugmentationArguments
from adaperceiver.training.checkpointing import model_card
from adaperceiver.training.data import (
    DataArguments,
    MicroBatches,
    StreamedMicroBatches,
    classes_seen,
    label_names,
    load_several,
    validation_batches,
)
from adaperceiver.training.loop import draws, freeze_stem, normalisation, print_plan, print_scores, start, train
from adaperceiver.training.scenes import teacher as train_teacher
from adaperceiver.training.teacher import CachedMicroBatches, Teacher, cache_views, stem_of


RECIPES = Path(__file__).parent / "recipes"
USAGE = """    from transformers import pipeline
    classify = pipeline("image-classification", "{folder}", trust_remote_code=True)
    classify("image.png", exit_threshold=0.9, report=True)"""


@dataclass
class DistillationData(DataArguments):
    dataset: list[str] = field(
        default_factory=lambda: ["scenes"],
        metadata={
            "help": '"scenes" (procedural), a hub id, an image folder, a parquet file or folder, or *.tar shards; or several of '
            "them. --distill features needs no labels."
        },
    )


@dataclass
class DistillationArguments:
    teacher: str = field(
        default="scenes", metadata={"help": 'A hub id or folder of an image classifier; "scenes" trains a small one.'}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the teacher."})
    teacher_size: int | None = field(
        default=None, metadata={"help": "Side of the images that the teacher sees, if not that of its processor."}
    )
    compile_teacher: bool = field(
        default=False,
        metadata={"help": "Compile the teacher (a minute), which pays where it answers for many images."},
    )
    stem_from: str | None = field(
        default=None,
        metadata={
            "help": "A hub id or folder of a MobileNet-like classifier whose first stages a new student starts with."
        },
    )
    stem_stages: int = field(default=3, metadata={"help": "How many of its stages."})
    freeze_stem: bool = field(default=False, metadata={"help": "Leave the convolutions of the stem as they are."})
    student: str = field(default="{}", metadata={"help": "Fields of AdaPerceiverConfig, as JSON; a file or the text."})
    init_from: str | None = field(
        default=None,
        metadata={
            "help": "A checkpoint to start from, e.g. another stage's; if the teacher has other classes, under a new classifier."
        },
    )
    adaptive_axes: list[str] = field(default_factory=lambda: ["tokens", "depth", "width"])
    distill: str = field(default="logits", metadata={"choices": ["logits", "features"]})
    label_loss: bool = field(default=False, metadata={"help": "Add the label loss to that of the teacher's logits."})
    cached_views: int = field(
        default=0,
        metadata={
            "help": "Keep that many views of every image, with the teacher's logits or features, and train on them in turn."
        },
    )
    cached_flips: bool = field(
        default=False,
        metadata={
            "help": "Mirror kept views at random as they are used, under the logits of the view as it was kept, or under its "
            "features, mirrored."
        },
    )
    cached_shift: int = field(
        default=0,
        metadata={"help": "Move kept views by up to that many pixels as they are used, under the same logits."},
    )


def student_fields(args: DistillationArguments) -> dict:
    return json.loads(Path(args.student).read_text() if os.path.isfile(args.student) else args.student)


def build_student(args: DistillationArguments, teacher: Teacher) -> AdaPerceiverForImageClassification:
    model_class = AdaPerceiverForDistillation if args.distill == "features" else AdaPerceiverForImageClassification
    changes = {"adaptive_axes": args.adaptive_axes}
    if args.distill == "features":
        changes["feature_size"] = teacher.feature_size()
    labels = {"id2label": teacher.id2label, "label2id": {name: i for i, name in teacher.id2label.items()}}
    if args.init_from is not None:
        return student_from(args, model_class, teacher, labels, changes)
    layers = []
    if args.stem_from is not None:
        source = teacher
        if args.stem_from != teacher.name:
            source = Teacher(args.stem_from, teacher.accelerator, args.trust_remote_code)
        layers = stem_of(source.model, args.stem_stages)
        changes["stem_layers"] = [row for row, _ in layers]
        changes["image_mean"], changes["image_std"] = source.mean.flatten().tolist(), source.std.flatten().tolist()
    student = model_class(AdaPerceiverConfig(**{**student_fields(args), **labels, **changes}))
    for number, (_, weights) in enumerate(layers):
        student.adaperceiver.embeddings.patch_embeddings[number].load_state_dict(weights)
    return student


def student_from(
    args: DistillationArguments, model_class: type, teacher: Teacher, labels: dict, changes: dict
) -> AdaPerceiverForImageClassification:
    """
    The checkpoint of `--init_from`: with its own classifier, or with a new one if the teacher's logits are of other classes.
    The feature adapter is new when a classifier goes on to features; the sizes of everything else must agree.
    """
    names = AdaPerceiverConfig.from_pretrained(args.init_from).id2label.values()
    other = args.distill == "logits" and bool(teacher.different_labels(list(names)))
    student, found = model_class.from_pretrained(
        args.init_from,
        **{**student_fields(args), **(labels if other else {}), **changes},
        ignore_mismatched_sizes=other,
        output_loading_info=True,
    )
    mismatched = [key[0] for key in found["mismatched_keys"] if not key[0].startswith("classifier.")]
    if mismatched:
        raise ValueError(f"--init_from {args.init_from} has {mismatched[0]} in another size than --student asks for.")
    if other:  # also where there are as many classes as before
        student.classifier.load_state_dict(model_class(student.config).classifier.state_dict())
        teacher.accelerator.print(f"A new classifier of {student.config.num_labels} classes on {args.init_from}.")
    student.drop_scores("training changes its weights")
    return student


def evaluate(model, dataset, processor, accelerator, size: int = 250) -> dict:
    """Top-1 accuracy of the full model, along each axis from there, and of the whole trained grid."""
    batches = validation_batches(dataset, processor, size, accelerator)
    new_metric = metrics_for("image-classification", model.config.num_labels)
    rows = evaluate_grid(model, batches, new_metric, accelerator)
    return {**along_axes(rows, "top1"), "grid": table_points(rows, "top1")}


@torch.no_grad()
def evaluate_features(model, dataset, processor, accelerator, teacher: Teacher, size: int = 64) -> dict:
    """Cosine between the features of student and teacher, of the full model and along each axis from there."""
    config = model.config
    calls = {"": [{}], "_by_tokens": [{"tokens": tokens} for tokens in config.token_granularities]}
    calls["_by_width"] = [{"width": width} for width in config.widths]
    calls["_by_depth"] = [{"depth": depth} for depth in range(1, config.num_hidden_layers + 1)]
    totals = {name: torch.zeros(len(points) + 1, device=accelerator.device) for name, points in calls.items()}
    mean, std = normalisation(processor, accelerator)
    for pixel_values, _ in validation_batches(dataset, processor, size, accelerator):
        wanted = teacher.features(pixel_values * std + mean, (config.grid_size, config.grid_size))
        for name, points in calls.items():
            features = [model(pixel_values, **point).features for point in points]
            cosines = [
                torch.nn.functional.cosine_similarity(one, wanted, dim=-1).mean(dim=1).sum() for one in features
            ]
            totals[name] += torch.stack([*cosines, cosines[0].new_tensor(len(wanted))])
    found = {}
    for name, points in calls.items():
        *sums, count = accelerator.reduce(totals[name], "sum").tolist()
        values = [total / count for total in sums]
        keys = [str(value) for point in points for value in point.values()]
        found[f"cosine{name}"] = dict(zip(keys, values)) if name else values[0]
    return found


def check(data: DistillationData, augmentation: AugmentationArguments, args: DistillationArguments) -> None:
    if args.teacher == "scenes" and data.dataset != ["scenes"]:
        raise ValueError(f"--dataset {' '.join(data.dataset)} needs a --teacher.")
    if data.streaming and (args.cached_views or len(data.dataset) > 1):
        raise ValueError(
            "--streaming is for one --dataset without --cached_views, which need data that can be indexed."
        )
    if (args.cached_flips or args.cached_shift) and not args.cached_views:
        raise ValueError("--cached_flips and --cached_shift need --cached_views.")
    if args.cached_shift and args.distill == "features":
        raise ValueError(
            f"--cached_shift {args.cached_shift} needs --distill logits: features would not move with the image."
        )
    if args.label_loss and args.distill == "features":
        raise ValueError("--label_loss needs --distill logits.")
    if args.label_loss and (augmentation.mixup_alpha or augmentation.cutmix_alpha):
        raise ValueError(
            "--label_loss needs --mixup_alpha 0 and --cutmix_alpha 0: mixed images have no label of their own."
        )
    if args.init_from is not None and args.stem_from is not None:
        raise ValueError("--init_from and --stem_from exclude each other: the checkpoint has its own stem.")


def run_stage(run, data, augmentation, optimization, distillation) -> None:
    check(data, augmentation, distillation)
    started = start(run, data, augmentation, optimization, distillation)
    if started is None:
        return
    accelerator, arguments = started
    if distillation.teacher == "scenes":
        with accelerator.main_process_first():
            distillation.teacher = str(train_teacher(Path(run.output_dir).parent / "scenes-teacher"))
    teacher = Teacher(
        distillation.teacher,
        accelerator,
        distillation.trust_remote_code,
        distillation.teacher_size,
        distillation.compile_teacher,
    )
    student = build_student(distillation, teacher)
    if distillation.freeze_stem:
        freeze_stem(student)
    processor = image_processor_for(student.config, "image-classification")
    features = distillation.distill == "features"
    training_data, validation_data = load_several(data, data.dataset, labelled=not features)
    if not features:
        teacher.check_labels(label_names(training_data), f"--dataset {' '.join(data.dataset)}")
    if features:  # what gets no gradient need not wait for one in other processes
        student.adaperceiver.class_readout.requires_grad_(False)
        student.classifier.requires_grad_(False)

    augment = Augment(augmentation, student.config.image_size)
    grid = (student.config.grid_size, student.config.grid_size)
    size = optimization.micro_batch_size
    images = tuple(None if isinstance(one, IterableDataset) else len(one) for one in (training_data, validation_data))
    steps = optimization.total_steps(images[0])
    classes = None if features else list(student.config.id2label.values())
    seen = None if features else classes_seen(training_data)
    sides = (student.config.image_size,) * 2
    name = ", ".join(Path(one).name for one in data.dataset)
    print_plan(accelerator, name, images, classes, seen, sides, optimization, steps)
    if distillation.cached_views:
        count, folder = distillation.cached_views, Path(run.output_dir).parent
        views = cache_views(
            training_data,
            augment,
            teacher,
            count,
            folder,
            run.seed,
            data.workers,
            accelerator,
            grid if features else None,
        )
        moves = {
            "flips": distillation.cached_flips,
            "shift": distillation.cached_shift,
            "answer": distillation.distill,
        }
        batches = CachedMicroBatches(views, count, len(training_data), size, run.seed, **moves)
    elif isinstance(training_data, IterableDataset):
        stream = training_data.shuffle(run.seed, buffer_size=data.shuffle_buffer)
        stream = split_dataset_by_node(stream, rank=accelerator.process_index, world_size=accelerator.num_processes)
        batches = partial(StreamedMicroBatches, stream, size, augment, run.seed)
    else:
        batches = MicroBatches(training_data, size, augment, run.seed)

    mean, std = normalisation(processor, accelerator)
    draw = draws(student.config, distillation.adaptive_axes, run.seed, optimization, accelerator)

    def loss_of(model, batch, step: int) -> torch.Tensor:
        targets = {name: values for name, values in batch.items() if name.startswith("teacher_")}  # of cached views
        if not targets:
            with accelerator.autocast():
                if features:
                    targets["teacher_features"] = teacher.features(batch["images"], grid)
                else:
                    targets["teacher_logits"] = teacher.logits(batch["images"])
        if distillation.label_loss:
            targets["labels"] = batch["labels"]
        return model((batch["images"] - mean) / std, once_for_all=draw(batch, step), **targets).loss

    def save(model, folder: Path, metrics: dict) -> None:
        if "grid" in metrics:
            model.accuracy_table = AccuracyTable(f"top-1 accuracy on the validation data of {name}", metrics["grid"])
        card = model_card(f"AdaPerceiver distilled on {name}", "examples/distill.py", arguments, metrics)
        model.save_pretrained(folder, is_main_process=accelerator.is_main_process, model_card=card)

    common = {"dataset": validation_data, "processor": processor, "accelerator": accelerator}
    measure = partial(evaluate_features, teacher=teacher, **common) if features else partial(evaluate, **common)
    metrics = train(
        accelerator,
        student,
        batches,
        loss_of,
        evaluate=measure,
        save=save,
        run=run,
        optimization=optimization,
        steps=steps,
        workers=data.workers,
    )
    print_scores(metrics, accelerator)


def main(arguments: list[str]) -> None:
    groups = [RunArguments, DistillationData, AugmentationArguments, OptimizationArguments, DistillationArguments]
    before = None
    continued = any(part.split("=")[0] in ("--init_from", "--init-from") for part in arguments)
    own = RECIPES / ("own_from_checkpoint.yaml" if continued else "own_distillation.yaml")
    for stage in parse(groups, arguments, recipe_for(arguments, RECIPES / "scenes.yaml", own)):
        run, data, _, optimization, distillation = stage
        if run.smoke:
            shrink(run, data, optimization)
            distillation.student = json.dumps({**student_fields(distillation), "num_hidden_layers": 2})
            distillation.compile_teacher = False
        if before is not None:
            distillation.init_from, distillation.stem_from = before, None
        run_stage(*stage)
        before = os.path.join(run.output_dir, "final")  # the EMA weights
    if PartialState().is_main_process:
        print(f"The model is in {before}. Run it with\n{USAGE.format(folder=before)}")
    PartialState().destroy_process_group()


if __name__ == "__main__":
    command_line(main)
