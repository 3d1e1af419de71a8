"""
Images with masks or depth maps for the training scripts: how each data set is read, and a check of all samples before a
training starts.

```python
train, validation = load_dense_splits(DenseDataArguments(dataset="path/to/ADEChallengeData2016"), "image-segmentation")
train[0]["mask"]  # (height, width) uint8: classes from 0, and 255 for ignored pixels
train, validation = load_dense_splits(DenseDataArguments(dataset="nyu_depth_v2_labeled.mat"), "depth-estimation")
train[0]["depth"]  # (height, width) float32: metres, and 0 where nothing was measured
```

However a data set stores its targets, they come out in these forms; images are not decoded until they are used.
"""

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset, Features, Image, Value
from PIL import Image as PILImage
from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg

from .checks import above_zero, at_least
from .data import (
    LABELS,
    UNREADABLE,
    SplitArguments,
    check_label_map,
    decode,
    load_any,
    open_stored,
    own_pairs,
    read_label_map,
    scored_split,
    stored_splits,
    subset,
    two_splits,
)
from .dense_targets import DTYPES, IGNORED, TARGETS, Encoding
from .scenes import MASK_LABELS


TARGET_NAMES = {
    "mask": ("mask", "annotation", "label", "labels", "segmentation_mask", "png"),
    "depth": ("depth", "depth_map", "depth.npy", "depth.png"),
}
ADE20K, NYUV2 = "zhoubolei/scene_parse_150", "adams-story/nyu-depthv2-wds"


@dataclass
class DenseDataArguments(SplitArguments):
    encoding: Literal["ade20k", "camvid", "nyuv2"] | None = HfArg(
        default=None,
        help="What a data set is that neither its hub id nor its layout gives away: how are its targets stored?",
    )
    target_column: str | None = HfArg(default=None, help="By default mask, annotation, depth and such.")
    reduce_labels: bool | None = HfArg(
        default=None, help="Stored class 0 is ignored, and the others move down by one."
    )
    mask_values: list[int] | None = HfArg(
        default=None, help="Stored values of the classes, in the order of their names, if not 0, 1, ..."
    )
    ignored_class: int | None = HfArg(default=None, help="A stored value that is ignored, as 255 is.")
    depth_scale: float | None = HfArg(
        default=None, help="Metres = (stored + depth_offset) x depth_scale; needed for whole numbers."
    )
    depth_offset: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        above_zero(self, "depth_scale")
        at_least(self, 0, "ignored_class")


# ------------------------------------------------------------------------------------------------------------ data sets


class Stored(NamedTuple):
    """The splits of a data set as they are stored, and what its targets mean."""

    splits: Mapping[str, Dataset]
    encoding: Encoding


def load_dense_splits(args: DenseDataArguments, task: str) -> tuple[Dataset, Dataset]:
    """Training and validation data with the columns `image` (not decoded), `mask` or `depth`, and `id`."""
    splits, encoding = stored_pairs(args, task)
    standard = partial(standard_columns, args=args, encoding=chosen_encoding(encoding, args))
    train, validation = two_splits(splits, args, standard)
    return subset(train, args.train_samples), subset(validation, args.validation_samples)


def load_dense_scored(args: DenseDataArguments, task: str, split: str | None) -> Dataset:
    """The samples of final scores, with the same columns: as `load_scored` of `data.py`."""
    if split == "validation":
        return load_dense_splits(args, task)[1]
    splits, encoding = stored_pairs(args, task)
    name, rows = scored_split(splits, args.dataset, split)
    rows = standard_columns(rows, name, args, chosen_encoding(encoding, args))
    return subset(rows, args.validation_samples)


def stored_pairs(args: DenseDataArguments, task: str) -> Stored:
    if task not in TARGETS:
        raise ValueError(f"`task` must be one of {', '.join(TARGETS)}, got {task!r}.")
    kind = args.encoding or recognised(args.dataset)
    if kind is None or args.dataset == "scenes":
        names = MASK_LABELS if args.dataset == "scenes" else ()
        return Stored(stored_splits(args), Encoding(task, tuple(names)))
    loaders = {
        "ade20k": (stored_ade20k, "image-segmentation"),
        "camvid": (stored_camvid, "image-segmentation"),
        "nyuv2": (stored_nyuv2, "depth-estimation"),
    }
    function, of = loaders[kind]
    if of != task:
        raise ValueError(f"--dataset {args.dataset} is {kind}, which is for {of}, not for {task}.")
    return function(args.dataset)


def recognised(source: str) -> str | None:
    if source == ADE20K or ade20k_tree(source):
        return "ade20k"
    return "nyuv2" if source == NYUV2 or nyuv2_file(source) else None


def stored_ade20k(source: str) -> Stored:
    """Scenes, 150 classes: from the hub, a folder of parquet files or the official tree. Stored 0 is ignored."""
    if tree := ade20k_tree(source):
        folders = {"train": "training", "validation": "validation"}
        splits = {
            name: paired_files(tree / "images" / folder, tree / "annotations" / folder)
            for name, folder in folders.items()
        }
    elif source == ADE20K:  # the main branch holds a script, which `datasets` does not run any more
        splits = load_any(source, revision="refs/convert/parquet", data_dir="scene_parsing")
    else:
        splits = load_any(source)
    return Stored(splits, Encoding("image-segmentation", tuple(read_label_map("ade20k")), reduce_labels=True))


def ade20k_tree(source: str) -> Path | None:
    folders = (Path(source), Path(source, "ADEChallengeData2016"))
    return next((one for one in folders if (one / "images").is_dir() and (one / "annotations").is_dir()), None)


def stored_camvid(source: str) -> Stored:
    """Streets, 11 classes: from a folder of parquet files, or of train, trainannot, val, valannot. 11 is ignored."""
    if Path(source, "trainannot").is_dir():
        names = ["train", "val", *(["test"] if Path(source, "testannot").is_dir() else [])]
        splits = {name: paired_files(Path(source, name), Path(source, f"{name}annot")) for name in names}
    else:
        splits = load_any(source)
    return Stored(splits, Encoding("image-segmentation", tuple(read_label_map("camvid")), ignored_class=11))


def stored_nyuv2(source: str) -> Stored:
    """Rooms: from the hub, a folder of parquet files or shards, or the official labelled file (795 and 654 images)."""
    file = nyuv2_file(source)
    return Stored(nyuv2_official(file) if file else load_any(source), Encoding("depth-estimation"))


def nyuv2_file(source: str) -> Path | None:
    files = (Path(source), Path(source, "nyu_depth_v2_labeled.mat"))
    return next((file for file in files if file.suffix == ".mat" and file.is_file()), None)


def nyuv2_official(file: Path) -> dict[str, Dataset]:
    """The split is that of `splits.mat` beside the file, or else the same one from `labels/nyuv2_test.txt`."""
    beside = file.with_name("splits.mat")
    try:
        with needed("h5py").File(file) as content:
            counts = {name: len(content[name]) for name in ("images", "depths")}
        if beside.is_file():
            split = needed("scipy.io").loadmat(beside)
            train, test = (split[name].ravel().tolist() for name in ("trainNdxs", "testNdxs"))
        else:
            test = [int(line) for line in (LABELS / "nyuv2_test.txt").read_text().split()]
            train = sorted({*range(1, counts["images"] + 1)} - {*test})
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"--dataset {file}, or splits.mat beside it, is not the official file: {error}") from error
    if not train or not test or max(train + test) > min(counts.values()):
        raise ValueError(
            f"--dataset {file} has {counts['images']} images and {counts['depths']} depth maps, its split {len(train)} and "
            f"{len(test)} up to number {max([0, *train, *test])}."
        )
    features = Features(image=Image(), depth=Image(), id=Value("string"))
    # `datasets` keeps what a generator gave before, by its arguments: a file that changed must be another argument.
    common = {"file": str(file.resolve()), "version": (file.stat().st_mtime_ns, file.stat().st_size)}
    return {
        name: Dataset.from_generator(nyuv2_rows, features, gen_kwargs={**common, "numbers": tuple(numbers)})
        for name, numbers in (("train", train), ("test", test))
    }


def needed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"The official NYUv2 file cannot be read without `pip install {module.split('.')[0]}`."
        ) from error


def nyuv2_rows(file: str, numbers: Sequence[int], version: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """`numbers` count from 1; the axes of MATLAB's arrays are (image, channel, column, row) here."""

    def stored(pixels: np.ndarray, **options) -> dict[str, Any]:
        file = BytesIO()
        PILImage.fromarray(np.ascontiguousarray(pixels)).save(file, **options)
        return {"bytes": file.getvalue(), "path": None}

    with needed("h5py").File(file) as content:
        for number in numbers:
            image, depth = content["images"][number - 1], content["depths"][number - 1]
            yield {
                "image": stored(image.transpose(2, 1, 0), format="PNG", compress_level=1),
                "depth": stored(depth.T.astype(np.float32), format="TIFF"),  # the metres, bit for bit
                "id": str(number),
            }


def paired_files(images: Path, targets: Path) -> Dataset:
    """The files of two folders, paired by name."""
    for folder in (images, targets):
        if not folder.is_dir():
            raise ValueError(f"--dataset: there is no folder {folder}.")
    files = sorted(file for file in images.iterdir() if file.suffix.lower() in (".jpg", ".jpeg", ".png"))
    missing = [file for file in files if not (targets / f"{file.stem}.png").is_file()]
    if missing:
        raise ValueError(
            f"--dataset: {len(missing)} of {len(files)} images in {images} have no mask; {missing[0].name} needs "
            f"{targets / missing[0].stem}.png."
        )
    columns = {
        "image": [str(file) for file in files],
        "mask": [str(targets / f"{file.stem}.png") for file in files],
        "id": [file.stem for file in files],
    }
    return Dataset.from_dict(columns, features=Features(image=Image(), mask=Image(), id=Value("string")))


def chosen_encoding(encoding: Encoding, args: DenseDataArguments) -> Encoding:
    """With what `args` say of it."""
    source = args.dataset
    if encoding.task == "image-segmentation" and args.label_map is not None:
        names = read_label_map(args.label_map)
        if encoding.names:
            check_label_map(names, len(encoding.names), f"--dataset {source}")
        encoding = replace(encoding, names=tuple(names))
    if encoding.task == "image-segmentation" and not 1 <= len(encoding.names) <= IGNORED:
        raise ValueError(
            f"--dataset {source}: --label_map must name its classes, 1 to {IGNORED} of them, got {len(encoding.names)}. If "
            "it is ADE20K or CamVid in another form, --encoding says so."
        )
    if args.mask_values is not None:
        values, ignored = args.mask_values, {IGNORED, args.ignored_class}
        if args.reduce_labels:
            raise ValueError("--mask_values and --reduce_labels exclude each other.")
        if len(set(values)) != len(encoding.names) or len(values) != len(encoding.names) or ignored & {*values}:
            raise ValueError(
                f"--mask_values must be one value for each of the {len(encoding.names)} classes, each another one and not "
                f"ignored, got {values}."
            )
        if min(values) < 0 or max(values) >= IGNORED:
            raise ValueError(f"--mask_values must be from 0 to {IGNORED - 1}, got {values}.")
        encoding = replace(encoding, mask_values=tuple(values), reduce_labels=False)
    chosen = ("reduce_labels", "ignored_class", "depth_scale", "depth_offset")
    return replace(encoding, **{name: getattr(args, name) for name in chosen if getattr(args, name) is not None})


def standard_columns(split: Dataset, name: str, args: DenseDataArguments, encoding: Encoding) -> Dataset:
    features, kind = split.features, TARGETS[encoding.task]
    target = args.target_column or next((column for column in TARGET_NAMES[kind] if column in features), None)
    images = (
        column for column, feature in features.items() if isinstance(feature, (Image, dict)) and column != target
    )
    image = args.image_column or next(images, None)
    for option, column in (("image_column", image), ("target_column", target)):
        if column not in features:
            raise ValueError(f"--{option} must be one of the columns {list(features)}, got {column}.")
    if len(split) == 0:
        raise ValueError(f"--dataset {args.dataset} has no samples in its {name} split.")
    known = next((column for column in ("id", "__key__") if column in features), None)
    if known is None:
        known, split = "id", split.add_column("id", [f"{name}[{index}]" for index in range(len(split))])
    renamed = {old: new for old, new in ((image, "image"), (target, kind), (known, "id")) if old != new}
    split = split.select_columns([image, target, known]).rename_columns(renamed)
    for column in ("image", kind):
        # Bytes and path, if the file does not say what they are. Such a cast alone copies no data.
        if isinstance(split.features[column], (Image, dict)):
            split = split.cast_column(column, Image(decode=False))
    return split.with_transform(encoding)


def read_dense(sample: dict) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Image (3, height, width) uint8 and its target (height, width), or None if either cannot be read."""
    image, target = decode(sample["image"]), sample["mask" if "mask" in sample else "depth"]
    if image is None or target is None:
        return None
    if image.shape[1:] != target.shape:
        raise ValueError(f"{sample['id']}: {size_mismatch(image.shape[1:], target.shape)}")
    return image, target


def size_mismatch(image: Sequence[int], target: Sequence[int]) -> str:
    return f"the image is {image[0]}x{image[1]} (height x width), its target {target[0]}x{target[1]}."


def encoding_of(dataset: Dataset) -> Encoding:
    return dataset.format["format_kwargs"]["transform"]


def mask_names(dataset: Dataset) -> list[str]:
    return list(encoding_of(dataset).names)


# --------------------------------------------------------------------------------------------------------------- checks


def check_samples(dataset: Dataset, task: str, num_labels: int | None = None, decoded: int = 2000) -> set[int]:
    """
    Stop before a training starts on data that would stop it later. Every file must be there and be of the size of its
    partner; `decoded` targets, evenly spaced, must hold what they may (the others are checked when they are used). Gives the
    classes that these masks show.
    """
    if len(dataset) == 0:
        raise ValueError("There are no samples in the split.")
    encoding, kind = encoding_of(dataset), TARGETS[task]
    if task == "image-segmentation" and num_labels is not None:
        check_label_map(encoding.names, num_labels, "the model")
    raw, problems, shown = dataset.with_format(None), [], torch.zeros(256, dtype=torch.long)
    # Arrays have no header; the others are not read.
    headers = raw if isinstance(raw.features[kind], Image) else raw.remove_columns(kind)
    whole = set(np.linspace(0, len(raw) - 1, min(decoded, len(raw))).astype(int).tolist())
    for index in tqdm(range(len(raw)), "checking samples", disable=len(raw) < 200, leave=False):
        problem = problem_of(
            raw[index] if index in whole else headers[index], encoding, shown if index in whole else None
        )
        if problem is not None:
            problems.append(f"sample {index}, id {problem}")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{len(problems)} of {len(raw)} samples cannot be used: " + "; ".join(problems[:5]) + more)
    return set(shown[:IGNORED].nonzero().flatten().tolist())


def problem_of(sample: dict, encoding: Encoding, shown: torch.Tensor | None) -> str | None:
    """What is wrong with a sample, if anything. With `shown`, its target is read, and the pixels of each class added there."""
    name, kind, sizes = sample["id"], TARGETS[encoding.task], {}
    for column in [column for column in ("image", kind) if column in sample]:
        stored = sample[column]
        if stored is None or (isinstance(stored, dict) and stored["bytes"] is None and stored["path"] is None):
            return f"{name}: there is no {column}."
        if not isinstance(stored, dict):
            sizes[column] = np.shape(stored)
            continue
        if stored["bytes"] is None and not os.path.isfile(stored["path"]):
            return f"{name}: there is no file {stored['path']}."
        try:
            header = open_stored(stored)
        except UNREADABLE as error:
            return f"{name}: the {column} cannot be read: {error}."
        on_its_side = column == "image" and header.getexif().get(0x0112, 1) >= 5
        sizes[column] = header.size if on_its_side else header.size[::-1]
    if kind in sizes and sizes["image"] != sizes[kind]:
        return f"{name}: {size_mismatch(sizes['image'], sizes[kind])}"
    if shown is None:
        return None
    try:
        target = encoding.decode(sample[kind], name)
    except ValueError as error:
        return str(error)
    if target is None:
        return f"{name}: the {kind} is cut short."
    if encoding.task == "image-segmentation":
        shown += torch.bincount(target.flatten(), minlength=256)
    return None


# ---------------------------------------------------------------------------------------------------------- validation


def dense_validation_batches(
    dataset: Dataset, processor: Callable, size: int, accelerator: Accelerator, task: str
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """`pixel_values` of whole images, and their targets in the size in which they are stored, of this process's share."""
    encoding, column = encoding_of(dataset), TARGETS[task]

    def read(sample: dict) -> tuple[torch.Tensor, torch.Tensor] | None:
        return read_dense({**sample, column: encoding.decode(sample[column], sample["id"])})

    for pairs in own_pairs(dataset.with_format(None), size, accelerator, read):  # decoded where they are used alone
        images, targets = zip(*pairs)
        pixel_values = processor(list(images), return_tensors="pt").pixel_values
        yield pixel_values.to(accelerator.device), [target.to(accelerator.device, DTYPES[task]) for target in targets]
