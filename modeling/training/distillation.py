"""Distillation: the student, its micro-batches with the teacher's answers, its loss, and its scores on validation data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from transformers.hf_argparser import HfArg

from .. import AdaPerceiverConfig, AdaPerceiverForDistillation, AdaPerceiverForImageClassification
from ..evaluation.grid import along_axes, evaluate_grid, metrics_for, table_points
from .augmentation import Augment, AugmentationArguments
from .checks import at_least, at_most_one, check_axes, check_checkpoint, check_config, config_fields, require
from .data import DataArguments, MicroBatches, StreamedMicroBatches, validation_batches
from .loop import Session, draws, normalisation
from .scenes import teacher as train_teacher
from .teacher import CachedMicroBatches, Teacher, cache_views, stem_of


@dataclass
class DistillationData(DataArguments):
    dataset: list[str] = HfArg(  # type: ignore[assignment]  # one or several, where others have one
        default_factory=lambda: ["scenes"],
        help='"scenes" (procedural), a hub id, an image folder, a parquet file or folder, or *.tar shards; or several of '
        "them. --distill features needs no labels.",
    )

    def __post_init__(self):
        super().__post_init__()
        require(self, "at least one data set", len, "dataset")


@dataclass
class DistillationArguments:
    teacher: str = HfArg(
        default="scenes", help='A hub id or folder of an image classifier; "scenes" trains a small one.'
    )
    trust_remote_code: bool = HfArg(default=False, help="Run code that comes with the teacher.")
    teacher_size: int | None = HfArg(
        default=None, help="Side of the images that the teacher sees, if not that of its processor."
    )
    compile_teacher: bool = HfArg(
        default=False, help="Compile the teacher (a minute), which pays where it answers for many images."
    )
    stem_from: str | None = HfArg(
        default=None,
        help="A hub id or folder of a MobileNet-like classifier whose first stages a new student starts with.",
    )
    stem_stages: int = HfArg(default=3, help="How many of its stages.")
    freeze_stem: bool = HfArg(default=False, help="Leave the convolutions of the stem as they are.")
    student: str = HfArg(default="{}", help="Fields of AdaPerceiverConfig, as JSON; a file or the text.")
    init_from: str | None = HfArg(
        default=None,
        help="A checkpoint to start from, e.g. another stage's; if the teacher has other classes, under a new classifier.",
    )
    adaptive_axes: list[str] = field(default_factory=lambda: ["tokens", "depth", "width"])
    full_share: float | None = HfArg(
        default=None,
        help="Share of the joint loss that the full model has, and of the images that run at full width; by default as "
        "in the paper: its part of the equal weights.",
    )
    partial_gradient: float = HfArg(
        default=1.0, help="Factor on the gradient that readouts of less than the full model send into blocks and read."
    )
    self_distillation: float = HfArg(
        default=0.0, help="Weight of the full model's own logits as a second teacher of the others."
    )
    distill: Literal["logits", "features"] = "logits"
    label_loss: bool = HfArg(default=False, help="Add the label loss to that of the teacher's logits.")
    cached_views: int = HfArg(
        default=0,
        help="Keep that many views of every image, with the teacher's logits or features, and train on them in turn.",
    )
    cached_flips: bool = HfArg(
        default=False,
        help="Mirror kept views at random as they are used, under the logits of the view as it was kept, or under its "
        "features, mirrored.",
    )
    cached_shift: int = HfArg(
        default=0, help="Move kept views by up to that many pixels as they are used, under the same logits."
    )

    def __post_init__(self):
        check_axes(self)
        at_least(self, 1, "teacher_size", "stem_stages")
        at_least(self, 0, "cached_views", "cached_shift", "self_distillation")
        at_most_one(self, "full_share", "partial_gradient")


def check(data: DistillationData, augmentation: AugmentationArguments, args: DistillationArguments) -> None:
    """Raise where the arguments of a run do not go together, or name what is not there, before anything is loaded."""
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
    for option in ("teacher", "init_from", "stem_from"):
        if (name := getattr(args, option)) not in (None, "scenes"):
            check_checkpoint(option, name, adaperceiver=option == "init_from")
    check_config("student", config_fields("student", args.student), args.init_from)


def load_teacher(session: Session, args: DistillationArguments) -> Teacher:
    """The teacher of `args`; that of the rendered scenes is trained if it is not there yet."""
    accelerator = session.accelerator
    if args.teacher == "scenes":
        with accelerator.main_process_first():
            args.teacher = str(train_teacher(Path(session.run.output_dir).parent / "scenes-teacher"))
    return Teacher(args.teacher, accelerator, args.trust_remote_code, args.teacher_size, args.compile_teacher)


def build_student(args: DistillationArguments, teacher: Teacher) -> AdaPerceiverForImageClassification:
    model_class = AdaPerceiverForDistillation if args.distill == "features" else AdaPerceiverForImageClassification
    changes: dict[str, Any] = {"adaptive_axes": args.adaptive_axes}
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
    student = model_class(AdaPerceiverConfig(**{**config_fields("student", args.student), **labels, **changes}))
    for number, (_, weights) in enumerate(layers):
        student.adaperceiver.embeddings.patch_embeddings[number].load_state_dict(weights)
    return student


def student_from(
    args: DistillationArguments,
    model_class: type[AdaPerceiverForImageClassification],
    teacher: Teacher,
    labels: dict,
    changes: dict,
) -> AdaPerceiverForImageClassification:
    """
    The checkpoint of `--init_from`: with its own classifier, or with a new one if the teacher's logits are of other classes.
    The feature adapter is new when a classifier goes on to features; the sizes of everything else must agree.
    """
    names = AdaPerceiverConfig.from_pretrained(args.init_from).id2label.values()
    other = args.distill == "logits" and bool(teacher.different_labels(list(names)))
    student, found = model_class.from_pretrained(
        args.init_from,
        **{**config_fields("student", args.student), **(labels if other else {}), **changes},
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


def micro_batches(
    session: Session,
    dataset: Dataset | IterableDataset,
    augment: Augment,
    teacher: Teacher,
    grid: tuple[int, int],
    args: DistillationArguments,
) -> MicroBatches | Callable[[int], StreamedMicroBatches]:
    """What `train` takes: micro-batches of kept views with the teacher's answers, or of new views without."""
    run, data, optimization, accelerator, _ = session
    size = optimization.micro_batch_size
    if isinstance(dataset, IterableDataset):
        stream = dataset.shuffle(run.seed, buffer_size=data.shuffle_buffer)
        stream = split_dataset_by_node(stream, rank=accelerator.process_index, world_size=accelerator.num_processes)
        return partial(StreamedMicroBatches, stream, size, augment, run.seed)
    if not args.cached_views:
        return MicroBatches(dataset, size, augment, run.seed)
    folder, of_features = Path(run.output_dir).parent, grid if args.distill == "features" else None
    views = cache_views(
        dataset, augment, teacher, args.cached_views, folder, run.seed, data.workers, accelerator, of_features
    )
    moves = (args.cached_flips, args.cached_shift, args.distill)
    return CachedMicroBatches(views, args.cached_views, len(dataset), size, run.seed, *moves)


def distillation_loss(
    session: Session, config: AdaPerceiverConfig, processor: Any, teacher: Teacher, args: DistillationArguments
) -> Callable[[torch.nn.Module, dict, int], torch.Tensor]:
    """`loss_of(model, batch, step)`: the loss of a micro-batch against the teacher, over `--adaptive_axes`."""
    accelerator, grid = teacher.accelerator, (config.grid_size, config.grid_size)
    mean, std = normalisation(processor, accelerator)
    fields = {name: getattr(args, name) for name in ("full_share", "partial_gradient", "self_distillation")}
    draw = draws(session, config, args.adaptive_axes, **fields)

    def loss_of(model: torch.nn.Module, batch: dict, step: int) -> torch.Tensor:
        targets = {name: values for name, values in batch.items() if name.startswith("teacher_")}  # of cached views
        if not targets:
            with accelerator.autocast():
                if args.distill == "features":
                    targets["teacher_features"] = teacher.features(batch["images"], grid)
                else:
                    targets["teacher_logits"] = teacher.logits(batch["images"])
        if args.label_loss:
            targets["labels"] = batch["labels"]
        return model((batch["images"] - mean) / std, once_for_all=draw(batch, step), **targets).loss

    return loss_of


def evaluate_logits(model, dataset, processor, accelerator, size: int = 250) -> dict[str, Any]:
    """Top-1 accuracy of the full model, along each axis from there, and of the whole trained grid."""
    batches = validation_batches(dataset, processor, size, accelerator)
    new_metric = metrics_for("image-classification", model.config.num_labels)
    rows = evaluate_grid(model, batches, new_metric, accelerator)
    return {**along_axes(rows, "top1"), "grid": table_points(rows, "top1")}


@torch.no_grad()
def evaluate_features(model, dataset, processor, accelerator, teacher: Teacher, size: int = 64) -> dict[str, Any]:
    """Cosine between the features of student and teacher, of the full model and along each axis from there."""
    config = model.config
    calls: dict[str, list[dict[str, int]]] = {"": [{}]}
    calls["_by_tokens"] = [{"tokens": tokens} for tokens in config.token_granularities]
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
