"""
Images for the training scripts: from wherever they are to augmented micro-batches.

What is random is keyed by seed and position in the run, never by how the work is divided: one process or many, with or without
an interruption, the same effective batches see the same augmentations.
"""

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.compute
import torch
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, Image, IterableDataset, Value, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetsError
from PIL import Image as PILImage
from transformers.hf_argparser import HfArg

from ..image_processing_adaperceiver import to_rgb
from .augmentation import Augment
from .checks import at_least, require
from .scenes import scenes


# Names of classes, one per line, in the order of the classes.
LABELS = Path(__file__).parents[1] / "evaluation" / "labels"
# Data sets that store numbers and no names.
LABEL_MAPS = {"timm/imagenet-1k-wds": "imagenet1k", "timm/imagenet-12k-wds": "imagenet12k"}


def known_label_maps() -> list[str]:
    return sorted(file.stem for file in LABELS.glob("*.txt") if file.stem != "nyuv2_test")  # that one holds a split


@dataclass
class SplitArguments:
    """What data of all kinds have in common."""

    dataset: str = HfArg(
        default="scenes",
        help='"scenes" (procedural), a hub id, an image folder, a parquet file or folder, or *.tar shards; for dense tasks '
        "also the folder ADEChallengeData2016, or nyu_depth_v2_labeled.mat.",
    )
    dataset_config: str | None = HfArg(default=None, help="Configuration name of a hub data set.")
    train_split: str = "train"
    validation_split: str | None = HfArg(
        default=None, help="By default validation or val, or else images held out of the training split."
    )
    holdout: float | None = HfArg(
        default=None,
        help="Share of the training images (where they have labels, the same of every class) that is kept apart for "
        "validation; 0.05 by default where the data have no validation split. No training reads a test split.",
    )
    image_column: str | None = HfArg(default=None, help="By default the first column of images.")
    label_map: str | None = HfArg(
        default=None, help=f"Names of the classes, one per line: a file, or one of {', '.join(known_label_maps())}."
    )
    train_samples: int | None = HfArg(
        default=None, help="Use at most that many images of a data set, the same share of every class."
    )
    validation_samples: int | None = None
    workers: int = HfArg(default=1, help="Processes per rank that decode and augment; 0 for none.")

    def __post_init__(self):
        at_least(self, 1, "train_samples", "validation_samples")
        at_least(self, 0, "workers")
        require(self, "above 0 and below 1", lambda share: 0 < share < 1, "holdout")
        if self.label_map is not None:
            read_label_map(self.label_map)
        for option in ("train_split", "validation_split"):
            if getattr(self, option) == "test":
                raise ValueError(
                    f"--{option} test: test images are for final scores alone. --holdout keeps others apart."
                )
        if self.holdout is not None and self.validation_split:
            raise ValueError(
                f"--holdout {self.holdout} and --validation_split {self.validation_split} exclude each other."
            )


@dataclass
class DataArguments(SplitArguments):
    label_column: str | None = HfArg(default=None, help="By default label, labels, cls or fine_label.")
    streaming: bool = HfArg(default=False, help="Read the training data as a stream, shuffled by buffer.")
    shuffle_buffer: int = 10_000

    def __post_init__(self):
        super().__post_init__()
        at_least(self, 1, "shuffle_buffer")


def load_splits(args: DataArguments, labelled: bool = True) -> tuple[Dataset | IterableDataset, Dataset]:
    """
    Training and validation data with the columns `image` (not decoded) and `label`, whatever they come from. Where they need
    not be `labelled`, a column of classes is kept if there is one.
    """
    train, validation = two_splits(
        stored_splits(args, streaming=args.streaming), args, partial(standard_columns, args=args, labelled=labelled)
    )
    return subset(train, args.train_samples), subset(validation, args.validation_samples)


def load_several(
    args: DataArguments, datasets: Sequence[str], labelled: bool = True
) -> tuple[Dataset | IterableDataset, Dataset]:
    """`load_splits` of several data sets, one after another; without labels, whatever their images show, if not `labelled`."""
    pairs = [load_splits(replace(args, dataset=one), labelled) for one in datasets]
    if not labelled:
        pairs = [tuple(split.select_columns("image") for split in pair) for pair in pairs]
    if len(pairs) == 1:
        return pairs[0]
    features = [pair[0].features for pair in pairs]
    if any(one != features[0] for one in features):
        raise ValueError(f"--dataset {' '.join(datasets)} must have the same classes.")
    return tuple(concatenate_datasets(list(splits)) for splits in zip(*pairs))


def load_scored(args: DataArguments, split: str | None) -> Dataset | IterableDataset:
    """
    The images of final scores: those of `split`, by default the first of test, validation and val. "validation" are those that
    training scripts validate on, held out of the training split where there is no such split.
    """
    if split == "validation":
        return load_splits(args)[1]
    name, rows = scored_split(stored_splits(args, streaming=args.streaming), args.dataset, split)
    return subset(standard_columns(rows, name, args), args.validation_samples)


def stored_splits(args: SplitArguments, **options: Any) -> Mapping[str, Dataset | IterableDataset]:
    """`options` are those of `load_dataset`."""
    if args.dataset != "scenes":
        return load_any(args.dataset, args.dataset_config, **options)
    train, validation = args.train_samples or 8000, args.validation_samples or 1000
    return {"train": scenes(train, split="train"), "validation": scenes(validation, split="validation")}


def load_any(path: str, config: str | None = None, **options) -> dict[str, Dataset | IterableDataset]:
    try:
        if path.endswith((".tar", ".parquet")):
            builder = "webdataset" if path.endswith(".tar") else "parquet"
            return load_dataset(builder, data_files=path, **options)
        return load_dataset(path, config, **options)
    except (OSError, ValueError, DatasetsError) as error:
        where = "" if os.path.exists(path) else ", which is no file or folder here,"
        reason = error.__cause__ if isinstance(error, DatasetGenerationError) else error  # which says nothing itself
        raise ValueError(f"--dataset {path}{where} could not be loaded: {reason}") from error


def two_splits(
    splits: Mapping[str, Dataset], args: Any, standard: Callable[..., Dataset]
) -> tuple[Dataset | IterableDataset, Dataset]:
    """
    Training and validation data in the form that `standard` gives a split. Validation data are the split that is named, or
    validation or val, or images that are held out of the training split. Nothing here reads a test split.
    """
    names = [args.validation_split] if args.validation_split else ["validation", "val"]
    validation_split = next((name for name in names if name in splits), None)
    if args.train_split not in splits or (args.validation_split and validation_split is None):
        wanted = " and ".join(repr(name) for name in (args.train_split, args.validation_split) if name)
        raise ValueError(f"--dataset {args.dataset} must have the splits {wanted}, it has {list(splits)}.")
    train = standard(splits[args.train_split], args.train_split)
    if args.holdout is None and validation_split is not None:
        return train, standard(splits[validation_split], validation_split)
    share = 0.05 if args.holdout is None else args.holdout
    if not isinstance(train, Dataset):
        raise ValueError(f"--dataset {args.dataset} needs a --validation_split: nothing can be held out of a stream.")
    if len(train) < 2:
        raise ValueError(f"--dataset {args.dataset} has one training image: none can be held out.")
    return hold_out(train, share)


def scored_split(splits: Mapping[str, Dataset], dataset: str, split: str | None) -> tuple[str, Dataset]:
    """The split that final scores are of, and its name."""
    names = [split] if split else ["test", "validation", "val"]
    name = next((name for name in names if name in splits), None)
    if name is None:
        raise ValueError(f"--dataset {dataset} must have a split {' or '.join(names)}, it has {list(splits)}.")
    return name, splits[name]


def hold_out(split: Dataset, share: float, seed: int = 0) -> tuple[Dataset, Dataset]:
    """What is left of `split`, and `share` of its images. Every script holds out the same ones."""
    order = stratified_order(split, seed)
    count = min(max(round(share * len(order)), 1), len(order) - 1)
    return split.select(np.sort(order[count:])), split.select(np.sort(order[:count]))


def subset(split: Dataset | IterableDataset, samples: int | None, seed: int = 0) -> Dataset | IterableDataset:
    """`samples` of the images, the same share of every class."""
    if samples is None or (isinstance(split, Dataset) and samples >= len(split)):
        return split
    if not isinstance(split, Dataset):
        return split.take(samples)
    return split.select(np.sort(stratified_order(split, seed)[:samples]))


def stratified_order(split: Dataset, seed: int) -> np.ndarray:
    """A random order of the images, any beginning of which has the same share of every class, where classes are known."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(split))
    if not is_class(split.features.get("label")):
        return order
    classes = np.asarray([-1 if label is None else label for label in split.with_format(None)["label"]])[order]
    position = np.empty(len(order))
    for label in np.unique(classes):
        rows = np.flatnonzero(classes == label)
        position[rows] = (np.arange(len(rows)) + generator.random(len(rows))) / len(rows)
    return order[np.argsort(position, kind="stable")]


def is_class(feature: Any) -> bool:
    return isinstance(feature, (ClassLabel, Value)) and pyarrow.types.is_integer(feature.pa_type)


def standard_columns(split: Dataset | IterableDataset, name: str, args: DataArguments, labelled: bool = True):
    features = split.features or {}
    image = args.image_column or next((n for n, f in features.items() if isinstance(f, Image)), None)
    label = args.label_column or next((n for n in ("label", "labels", "cls", "fine_label") if n in features), None)
    if not labelled and args.label_column is None and not is_class(features.get(label)):  # masks have that name, too
        label = None
    columns = {"image_column": image, "label_column": label}
    if label is None and not labelled:
        del columns["label_column"]
    for option, column in columns.items():
        if column not in features:
            raise ValueError(f"--{option} must be one of the columns {list(features)}, got {column}.")
    if isinstance(split, Dataset) and len(split) == 0:
        raise ValueError(f"--dataset {args.dataset} has no images in its {name} split.")
    names = {old: new for old, new in ((image, "image"), (label, "label")) if old not in (new, None)}
    split = split.cast_column(image, Image(decode=False))  # first, since a stream decodes what it renames
    return split.select_columns(list(columns.values())).rename_columns(names)


def label_names(split: Dataset | IterableDataset, args: DataArguments | None = None) -> list[str] | None:
    """
    The names that come with the data. With `args`, those of `--label_map` go first, and those of a map that is known for
    the data set stand in where none come with it.
    """
    feature = split.features["label"]
    own = feature.names if isinstance(feature, ClassLabel) else None
    if args is None:
        return own
    chosen = args.label_map or (LABEL_MAPS.get(args.dataset) if own is None else None)
    if chosen is None:
        return own
    names = read_label_map(chosen)
    if own is not None:
        check_label_map(names, len(own), f"--dataset {args.dataset}")
    elif (
        isinstance(split, Dataset)
        and is_class(feature)
        and (largest := pyarrow.compute.max(split.data["label"]).as_py()) >= len(names)
    ):
        check_label_map(names, largest + 1, f"--dataset {args.dataset}")
    return names


def check_labels(split: Dataset | IterableDataset, dataset: str, classes: int) -> None:
    """Stop at a label that is none of the `classes`, in data that can be looked through."""
    if not isinstance(split, Dataset):
        return
    if not is_class(split.features["label"]):
        raise ValueError(f"--dataset {dataset} must have integers as labels, got {split.features['label']}.")
    extremes = pyarrow.compute.min_max(split.data["label"]).as_py()
    for label in extremes.values():
        if label is not None and not 0 <= label < classes:
            raise ValueError(f"--dataset {dataset} must have labels from 0 to {classes - 1}, got {label}.")


def classes_seen(split: Dataset | IterableDataset) -> set[int] | None:
    """The classes that have images, if that can be known."""
    return set(split.with_format(None)["label"]) - {None} if isinstance(split, Dataset) else None


def read_label_map(name: str) -> list[str]:
    """Names of classes in their order: of a file, or of one of those in `labels/`."""
    path = Path(name) if os.path.isfile(name) else LABELS / f"{name}.txt"
    if not path.is_file():
        raise ValueError(f"--label_map must be a file or one of {', '.join(known_label_maps())}, got {name}.")
    names = [line.strip() for line in path.read_text().splitlines()]
    seen: dict[str, int] = {}
    for line, label in enumerate(names, start=1):
        if not label or label in seen:
            problem = f"repeats {label!r} of line {seen[label]}" if label else "is empty"
            raise ValueError(f"--label_map {path} must have one name per line, each once, but line {line} {problem}.")
        seen[label] = line
    return names


def check_label_map(names: Sequence[str], classes: int, whose: str) -> None:
    if len(names) != classes:
        raise ValueError(f"The label map has {len(names)} names, but {whose} has {classes} classes.")


def check_classes(split: Dataset | IterableDataset, args: DataArguments, model: str, classes: int) -> None:
    """Stop where the data have other classes than the checkpoint `model`."""
    names = label_names(split, args)
    if names is not None and len(names) != classes:
        raise ValueError(f"--dataset {args.dataset} has {len(names)} classes, --model {model} {classes}.")
    check_labels(split, args.dataset, classes)


Pair = tuple[torch.Tensor, Any]  # an image, and its label or target
# What PIL raises for a file that is cut short, is no image, or is too large.
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, PILImage.DecompressionBombError)


def open_stored(stored: dict) -> PILImage.Image:
    if stored["bytes"] is None and "://" in stored["path"]:  # a file of a stream
        with fsspec.open(stored["path"]) as file:
            return PILImage.open(BytesIO(file.read()))
    return PILImage.open(stored["path"] if stored["bytes"] is None else BytesIO(stored["bytes"]))


def decode(stored: dict | None) -> torch.Tensor | None:
    """An image that `datasets` has not decoded as uint8 (3, height, width), or None if there is none or it cannot be read."""
    if stored is None or (stored["bytes"] is None and stored["path"] is None):
        return None
    try:
        return torch.from_numpy(np.array(to_rgb(open_stored(stored)))).permute(2, 0, 1)
    except UNREADABLE:
        return None


# ------------------------------------------------------------------------------------------------------- micro-batches


def read_labelled(sample: dict) -> tuple[torch.Tensor, int] | None:
    """Image and label (-1 where the data have none), or None if the image cannot be read or has no label."""
    image, label = decode(sample["image"]), sample.get("label", -1)
    return None if image is None or label is None else (image, label)


class MicroBatches(torch.utils.data.Dataset):
    """
    Item i is the i-th micro-batch of the whole run, over all processes: its images are those at `i * size` and after in an
    endless stream that shuffles anew every epoch. Whoever asks for it, and whenever, gets the same one.

    `read` makes a sample of the data set the pair that `augment` takes, or None.
    """

    def __init__(
        self,
        dataset: Dataset,
        size: int,
        augment: Callable[..., dict[str, torch.Tensor]],
        seed: int,
        shuffle: bool = True,
        read: Callable[[dict], Pair | None] = read_labelled,
    ):
        self.dataset, self.size, self.augment, self.seed, self.shuffle = dataset, size, augment, seed, shuffle
        self.read = read
        self._permutation: tuple[int, np.ndarray] = (-1, np.empty(0))

    def index_at(self, position: int) -> int:
        epoch, position = divmod(position, len(self.dataset))
        if not self.shuffle:
            return position
        if self._permutation[0] != epoch:
            self._permutation = (epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.dataset)))
        return int(self._permutation[1][position])

    def __getitem__(self, micro: int) -> dict[str, torch.Tensor]:
        indices = [self.index_at(position) for position in range(micro * self.size, (micro + 1) * self.size)]
        samples = [self.dataset[index] for index in indices]
        batch = collate(samples, indices, self.augment, [self.seed, micro], self.read)
        return {**batch, "micro": torch.tensor(micro)}


class StreamedMicroBatches(torch.utils.data.IterableDataset):
    """Micro-batches of one process from a stream, which `datasets` divides among processes and workers."""

    def __init__(self, stream: IterableDataset, size: int, augment: Augment, seed: int, skip: int):
        self.stream, self.size, self.augment, self.seed, self.skip = stream, size, augment, seed, skip

    @property
    def shards(self) -> int:
        """Of this process; as many workers have something to read."""
        return self.stream.num_shards

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        micro, samples, epoch = number, [], 0  # workers take turns
        while True:
            self.stream.set_epoch(epoch)
            empty = True
            for sample in self.stream:
                empty = False
                samples.append(sample)
                if len(samples) == self.size:
                    if micro >= self.skip:  # those before were trained on already; passing them decodes nothing
                        batch = collate(samples, range(self.size), self.augment, [self.seed, micro])
                        yield {**batch, "micro": torch.tensor(micro)}
                    micro, samples = micro + workers, []
            if empty:
                raise ValueError(f"The stream has no images for worker {number} of {workers}.")
            epoch += 1


def collate(
    samples: Sequence[dict],
    indices: Sequence[int],
    augment: Callable[..., dict[str, torch.Tensor]],
    seed: Sequence[int],
    read: Callable[[dict], Pair | None] = read_labelled,
) -> dict[str, torch.Tensor]:
    """`places` are those of the images in the micro-batch: the ones that cannot be read are left out."""
    pairs = {place: pair for place, sample in enumerate(samples) if (pair := read(sample)) is not None}
    if not pairs:
        raise OSError(
            f"None of {len(samples)} images can be read; the first is {(samples[0]['image'] or {}).get('path')}."
        )
    views = augment(*map(list, zip(*pairs.values())), seed)
    return {
        **views,
        "places": torch.tensor(list(pairs)),
        "indices": torch.tensor([indices[place] for place in pairs]),
    }


def own_pairs(
    dataset: Dataset | IterableDataset, size: int, accelerator: Accelerator, read: Callable[[dict], Pair | None]
) -> Iterator[list[Pair]]:
    """What `read` makes of this process's share of the data, `size` samples at a time; None is left out."""
    for number, columns in enumerate(dataset.iter(size)):
        if number % accelerator.num_processes == accelerator.process_index:
            samples = (dict(zip(columns, values)) for values in zip(*columns.values()))
            pairs = [pair for sample in samples if (pair := read(sample)) is not None]
            if pairs:
                yield pairs


def validation_batches(
    dataset: Dataset | IterableDataset, processor: Callable, size: int, accelerator: Accelerator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`pixel_values` and `labels` of this process's share of the data; images that cannot be read are left out."""
    for pairs in own_pairs(dataset, size, accelerator, read_labelled):
        images, labels = zip(*pairs)
        pixel_values = processor(list(images), return_tensors="pt").pixel_values
        yield pixel_values.to(accelerator.device), torch.tensor(labels, device=accelerator.device)
