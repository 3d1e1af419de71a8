"""
Predictions for a data set of any size, in parquet files ("shards") that are there whole or not at all.

Which images go into which shard depends on the data alone. So any number of processes can write them, and any other number can
go on after a kill: they divide the shards that are missing.
"""

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow.compute
import pyarrow.parquet
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from datasets import Dataset, Features, Image, IterableDataset, Value
from PIL import Image as PILImage
from tqdm.auto import tqdm
from transformers.image_processing_utils import BaseImageProcessor

from ..adaptive_adaperceiver import OperatingPoint
from ..evaluation.tables import write_csv
from ..image_processing_adaperceiver import to_rgb
from ..modeling_adaperceiver import AdaPerceiverPreTrainedModel
from ..training.data import UNREADABLE, open_stored


MOST_SOURCES = 1024
T = TypeVar("T")

# ------------------------------------------------------------------------------------------- which images, in which file


class Shard(NamedTuple):
    """A block of rows of a data set. A stream has several sources, each with blocks of its own."""

    source: int
    block: int

    def file(self, folder: Path) -> Path:
        return folder / f"predictions-{self.source:05d}-{self.block:06d}.parquet"


class Batch(NamedTuple):
    shard: Shard
    first: int  # row of the first sample in its source
    samples: list[dict[str, Any]]
    last: bool  # of its shard


def finished_shards(folder: Path) -> set[Shard]:
    names = (file.stem.split("-") for file in folder.glob("predictions-*.parquet"))
    return {Shard(int(source), int(block)) for _, source, block in names}


def row_count(shard: Shard, folder: Path) -> int:
    return pyarrow.parquet.read_metadata(shard.file(folder)).num_rows


def source_count(rows: Dataset | IterableDataset) -> int:
    """The files of a stream, or groups of neighbouring ones: what can be read without reading what is before it."""
    return 1 if isinstance(rows, Dataset) else min(rows.num_shards, MOST_SOURCES)


def open_sources(rows: IterableDataset, folder: Path, finished: set[Shard], shard_size: int) -> list[int]:
    """The sources of a stream that are not finished. The last shard of each is shorter than the others, if need be empty."""
    blocks: dict[int, list[int]] = {}
    for source, block in sorted(finished):
        blocks.setdefault(source, []).append(block)

    def is_open(source: int) -> bool:
        found = blocks.get(source, [])
        without_gaps = bool(found) and found == list(range(len(found)))
        return not without_gaps or row_count(Shard(source, found[-1]), folder) == shard_size

    return [source for source in range(source_count(rows)) if is_open(source)]


def batches_of_dataset(rows: Dataset, shards: Iterable[Shard], shard_size: int, batch_size: int) -> Iterator[Batch]:
    for shard in shards:
        stop = min((shard.block + 1) * shard_size, len(rows))
        for first in range(shard.block * shard_size, stop, batch_size):
            end = min(first + batch_size, stop)
            yield Batch(shard, first, [rows[index] for index in range(first, end)], end == stop)


def batches_of_source(
    rows: Iterable[dict], source: int, wanted: Callable[[Shard], bool], shard_size: int, batch_size: int
) -> Iterator[Batch]:
    """Of the shards of a source that are `wanted`; the rows of others are passed without being decoded."""
    samples: list[dict] = []
    row = -1
    for row, sample in enumerate(rows):
        shard, last = Shard(source, row // shard_size), (row + 1) % shard_size == 0
        if not wanted(shard):
            continue
        samples.append(sample)
        if last or len(samples) == batch_size:
            yield Batch(shard, row + 1 - len(samples), samples, last)
            samples = []
    ending = Shard(source, (row + 1) // shard_size)  # shorter than the others: so all know that nothing follows it
    if wanted(ending):
        yield Batch(ending, row + 1 - len(samples), samples, True)


def own_batches(
    rows: Dataset | IterableDataset,
    folder: Path,
    finished: set[Shard],
    shard_size: int,
    batch_size: int,
    process: int = 0,
    processes: int = 1,
) -> Iterator[Batch]:
    """Of this process's part of the shards that are not `finished`."""
    if isinstance(rows, Dataset):
        shards = (Shard(0, block) for block in range(-(-len(rows) // shard_size)))
        missing = [shard for shard in shards if shard not in finished]
        yield from batches_of_dataset(rows, missing[process::processes], shard_size, batch_size)
        return
    sources = open_sources(rows, folder, finished, shard_size)
    for number, source in enumerate(sources):
        # Several processes share a source if there are more of them than sources.
        readers = list(range(number % processes, processes, len(sources)))
        if process not in readers:
            continue
        turn, turns = readers.index(process), len(readers)

        def wanted(shard: Shard, turn: int = turn, turns: int = turns) -> bool:
            return shard.block % turns == turn and shard not in finished

        stream = rows.shard(source_count(rows), source)
        yield from batches_of_source(stream, source, wanted, shard_size, batch_size)


# -------------------------------------------------------------------------------------------------------- what is written


def write_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Have `write` fill a file that appears under its name when it is complete, or not at all."""
    incomplete = path.with_name(f".{path.name}.part")
    write(incomplete)
    os.replace(incomplete, path)


def write_shard(rows: Sequence[dict[str, Any]], features: Features, path: Path) -> None:
    def value(one: Any) -> Any:
        return one.result() if isinstance(one, Future) else one

    columns = {name: [value(row.get(name)) for row in rows] for name in features}
    table = Dataset.from_dict(columns, features=features)
    # Not by `Dataset.to_parquet`, which draws a progress bar of its own. The schema says which column holds images.
    write_file(path, lambda incomplete: pyarrow.parquet.write_table(table.data.table, incomplete))


def fingerprint(model: AdaPerceiverPreTrainedModel, processor: BaseImageProcessor) -> str:
    """Of all that predictions depend on, apart from the arguments of the call."""
    table = model.accuracy_table
    digest = hashlib.sha256(processor.to_json_string().encode())
    digest.update(json.dumps([model.config.id2label, None if table is None else asdict(table)]).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:12]


def record_call(folder: Path, call: dict[str, Any]) -> None:
    """Write `manifest.json`, or raise where `folder` holds predictions of another call. `call` is keyed by options."""
    path = folder / "manifest.json"
    call = json.loads(json.dumps(call))
    if path.exists() and finished_shards(folder):
        before = json.loads(path.read_text())
        changed = [
            f"--{name} was {before.get(name)}, not {call.get(name)}"
            for name in {**before, **call}
            if before.get(name) != call.get(name)
        ]
        if changed:
            raise ValueError(f"--output {folder} holds predictions of another call: {'; '.join(changed)}.")
        return
    if any(folder.glob("*.parquet")):
        raise ValueError(f"--output {folder} holds parquet files and no manifest.json: choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    write_file(path, lambda incomplete: incomplete.write_text(json.dumps(call, indent=2) + "\n"))


class Summary(NamedTuple):
    images: int
    unreadable: int
    gflops: float  # mean over the images that could be read


def summarize(folder: Path) -> Summary:
    """Count what was predicted, and list in `unreadable.csv` the images that could not be read."""
    columns = ["source", "row", "id", "path", "error"]
    images, gflops, unreadable = 0, 0.0, []
    for shard in sorted(finished_shards(folder)):
        table = pyarrow.parquet.read_table(shard.file(folder), columns=[*columns, "gflops"])
        images += len(table)
        gflops += sum(value for value in table["gflops"].to_pylist() if value is not None)
        unreadable += table.filter(pyarrow.compute.is_valid(table["error"])).select(columns).to_pylist()
    write_file(folder / "unreadable.csv", lambda incomplete: write_csv(unreadable, incomplete, columns))
    return Summary(images, len(unreadable), gflops / max(images - len(unreadable), 1))


# ------------------------------------------------------------------------------------------------------- what is predicted


class Ready(NamedTuple):
    """An image for the model, and its own height and width."""

    pixel_values: torch.Tensor
    size: tuple[int, int]


class Predictor:
    """
    Rows of predictions from samples with an `image` that is not decoded. `adaptive` are the adaptive arguments of the calls, one
    value for all images; `autocast` is what the calls run in.
    """

    def __init__(
        self,
        model: AdaPerceiverPreTrainedModel,
        processor: BaseImageProcessor,
        task: str,
        adaptive: dict[str, Any] | None = None,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.model, self.processor, self.task = model, processor, task
        # One batch may be smaller than the others: a budget of milliseconds would need a profile of its own.
        self.adaptive, self.autocast = {"max_latency_ms": False, **(adaptive or {})}, autocast
        self.points: dict[tuple[int, int], OperatingPoint] = {}  # by image size: a budget may be spent otherwise
        self.rows = {
            "image-classification": self.classes,
            "image-segmentation": self.masks,
            "depth-estimation": self.depth_maps,
        }[task]
        self.gflops: dict[tuple[OperatingPoint, tuple[int, int]], float] = {}

    @property
    def features(self) -> Features:
        """The columns. `depth` and `exit_depth` are blocks: asked for, and run with early exit."""
        where = {"source": Value("int64"), "row": Value("int64"), "id": Value("string"), "path": Value("string")}
        ran = {name: Value("int32") for name in ("tokens", "width", "depth", "exit_depth")} | {
            "gflops": Value("float64")
        }
        predicted = {
            "image-classification": {
                "label": Value("string"),
                "label_id": Value("int32"),
                "confidence": Value("float32"),
            },
            "image-segmentation": {"mask": Image(), "confidence": Value("float32")},
            "depth-estimation": {"depth_map": Image()},
        }
        return Features({**where, **predicted[self.task], **ran, "error": Value("string")})

    @property
    def depth_scale(self) -> float | None:
        """Metres of a step of the 16-bit depth maps: a millimetre, or the power of ten that the deepest ones need."""
        if self.task != "depth-estimation":
            return None
        return next(
            scale for scale in (10.0**power for power in range(-3, 30)) if self.model.config.max_depth / scale < 65535
        )

    def read(self, sample: dict[str, Any]) -> Ready | str:
        """The image, or why it cannot be read."""
        stored = sample["image"]
        if stored is None or (stored["bytes"] is None and stored["path"] is None):
            return "there is no image"
        try:
            image = to_rgb(open_stored(stored))
        except UNREADABLE as error:
            file = repr(stored["path"] or "without a name")
            return f"{type(error).__name__}: {re.sub('<_io.BytesIO.*?>', lambda _: file, str(error))}"
        pixel_values = self.processor(image, return_tensors="pt").pixel_values[0]
        return Ready(pixel_values, (image.height, image.width))

    def __call__(self, batch: Batch, images: Sequence[Ready | str], pool: ThreadPoolExecutor) -> list[dict[str, Any]]:
        """A row for each sample; images that are larger than others of the batch run apart."""
        rows: list[dict[str, Any]] = []
        by_size: dict[tuple[int, int], list[int]] = {}
        for index, (sample, image) in enumerate(zip(batch.samples, images)):
            rows.append({"source": batch.shard.source, "row": batch.first + index})
            rows[-1]["id"] = None if sample.get("id") is None else str(sample["id"])
            rows[-1]["path"] = None if sample["image"] is None else sample["image"]["path"]
            if isinstance(image, str):
                rows[-1]["error"] = image
            else:
                by_size.setdefault(tuple(image.pixel_values.shape[-2:]), []).append(index)
        for size, indices in by_size.items():
            chosen = [image for image in (images[index] for index in indices) if isinstance(image, Ready)]
            pixel_values = torch.stack([image.pixel_values for image in chosen]).to(self.model.device)
            with torch.no_grad(), self.autocast():
                outputs = self.model(pixel_values, operating_point=self.point(size))
            predicted = self.rows(outputs, [image.size for image in chosen], pool)
            for index, prediction, ran in zip(indices, predicted, self.where_it_ran(outputs, size)):
                rows[index] |= {**prediction, **ran}
        return rows

    def point(self, image_size: tuple[int, int]) -> OperatingPoint:
        if image_size not in self.points:
            self.points[image_size] = self.model.operating_point(image_size, **self.adaptive)
        return self.points[image_size]

    def where_it_ran(self, outputs: Any, image_size: tuple[int, int]) -> Iterator[dict[str, Any]]:
        exits = getattr(outputs, "exit_depth", None) is not None
        for index, ran in enumerate(outputs.operating_points):
            if (ran, image_size) not in self.gflops:
                self.gflops[ran, image_size] = self.model.flops_at(ran, image_size, batch_size=1)["total"] / 1e9
            yield {
                "tokens": ran.tokens,
                "width": ran.width,
                "depth": outputs.operating_point.of_image(index).depth,
                "exit_depth": ran.depth if exits else None,
                "gflops": self.gflops[ran, image_size],
            }

    def classes(self, outputs: Any, sizes: Any, pool: ThreadPoolExecutor) -> Iterator[dict[str, Any]]:
        """The confidence is the one that early exit goes by: at the temperature of the image's depth, if there is one."""
        logits, temperatures = outputs.logits.float(), outputs.operating_point.exit_temperatures
        if temperatures is not None:
            depths = [ran.depth for ran in outputs.operating_points]
            logits = logits / torch.tensor([[temperatures[depth - 1]] for depth in depths], device=logits.device)
        confidences, labels = logits.softmax(dim=-1).max(dim=-1)
        for label, confidence in zip(labels.tolist(), confidences.tolist()):
            yield {"label": self.model.config.id2label[label], "label_id": label, "confidence": confidence}

    def masks(self, outputs: Any, sizes: list[tuple[int, int]], pool: ThreadPoolExecutor) -> Iterator[dict[str, Any]]:
        """At the size of the images; the confidence is the mean over the pixels of the prediction, before it is resized."""
        for logits, mask in zip(outputs.logits, self.processor.post_process_semantic_segmentation(outputs, sizes)):
            logits = logits.float()
            confidence = (logits.amax(dim=0) - logits.logsumexp(dim=0)).exp().mean().item()
            pixels = mask.cpu().numpy().astype(np.uint8 if len(logits) <= 256 else np.uint16)
            yield {"mask": pool.submit(as_png, pixels), "confidence": confidence}

    def depth_maps(
        self, outputs: Any, sizes: list[tuple[int, int]], pool: ThreadPoolExecutor
    ) -> Iterator[dict[str, Any]]:
        for found in self.processor.post_process_depth_estimation(outputs, sizes):
            steps = (found["predicted_depth"] / self.depth_scale).round()
            yield {"depth_map": pool.submit(as_png, steps.cpu().numpy().astype(np.uint16))}


def as_png(pixels: np.ndarray) -> dict[str, Any]:
    file = BytesIO()
    PILImage.fromarray(pixels).save(file, format="PNG")
    return {"bytes": file.getvalue(), "path": None}


def ahead(items: Iterable[T], count: int) -> Iterator[T]:
    """The items, each taken when there are `count` more to come after it."""
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


def predict(
    predictor: Predictor,
    rows: Dataset | IterableDataset,
    folder: Path,
    accelerator: Accelerator,
    shard_size: int = 1024,
    batch_size: int = 64,
    threads: int = 2,
) -> None:
    """Write the shards that `folder` has not. All processes take part, and each returns when it has no more to write."""
    finished = on_main_process(accelerator, lambda: finished_shards(folder))
    mine = own_batches(
        rows, folder, finished, shard_size, batch_size, accelerator.process_index, accelerator.num_processes
    )
    main = accelerator.is_main_process
    total = len(rows) if isinstance(rows, Dataset) else None
    before = sum(row_count(shard, folder) for shard in finished) if main else 0
    progress = tqdm(total=total, initial=before, desc="predictions", unit=" images", disable=not main)
    counted, written = finished, []
    with ThreadPoolExecutor(threads) as pool, progress:
        reading = ((batch, [pool.submit(predictor.read, sample) for sample in batch.samples]) for batch in mine)
        for batch, images in ahead(reading, 2):
            written += predictor(batch, [image.result() for image in images], pool)
            progress.update(len(batch.samples))
            if not batch.last:
                continue
            write_shard(written, predictor.features, batch.shard.file(folder))
            written = []
            if main and accelerator.num_processes > 1:  # what the others have written meanwhile
                now = finished_shards(folder)
                progress.update(sum(row_count(shard, folder) for shard in now - counted - {batch.shard}))
                counted = now


def on_main_process(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """What the main process finds, or the error that it raises, for all processes."""
    found: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            found = [function()]
        except (ValueError, OSError) as error:
            found = [error]
    broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
