"""
What the training scripts share: arguments and recipes, data and augmentation, optimizers and schedules, and the loop.

Everything random is drawn from a generator keyed by seed and step, never from how the work is divided: one process or
many, with or without an interruption, the same effective batches see the same augmentations.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from glob import glob
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import is_tensorboard_available, set_seed
from datasets import ClassLabel, Dataset, Image, IterableDataset, load_dataset
from PIL import Image as PILImage
from scenes import scenes
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm.auto import tqdm
from transformers import HfArgumentParser

from adaperceiver.image_processing_adaperceiver import to_rgb


# ------------------------------------------------------------------------------------------------- arguments, recipes


@dataclass
class RunArguments:
    output_dir: str = field(default="runs/distill", metadata={"help": "Checkpoints, metrics and the final model."})
    resume: bool = field(default=False, metadata={"help": "Go on from the last checkpoint in output_dir."})
    overwrite: bool = field(default=False, metadata={"help": "Start anew where output_dir holds an earlier run."})
    smoke: bool = field(default=False, metadata={"help": "Shrink the run to a minute or two: few small steps."})
    seed: int = 0
    tracker: str | None = field(
        default=None, metadata={"help": 'An Accelerate tracker, or "none"; tensorboard if it is installed.'}
    )
    log_steps: int = 10
    save_steps: int = 500
    eval_steps: int = field(default=1000, metadata={"help": "Steps between evaluations; 0 for one at the end."})

    def log_with(self) -> str | None:
        if self.tracker == "none":
            return None
        return self.tracker or ("tensorboard" if is_tensorboard_available() else None)


@dataclass
class DataArguments:
    dataset: str = field(
        default="scenes",
        metadata={
            "help": '"scenes" (procedural), a hub id, an image folder, a parquet file or folder, or *.tar shards.'
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name of a hub data set."})
    train_split: str = "train"
    validation_split: str | None = field(
        default=None, metadata={"help": "By default the first of validation, val and test that exists."}
    )
    image_column: str | None = field(default=None, metadata={"help": "By default the first column of images."})
    label_column: str | None = field(default=None, metadata={"help": "By default label, labels, cls or fine_label."})
    streaming: bool = field(
        default=False, metadata={"help": "Read the training data as a stream, shuffled by buffer."}
    )
    shuffle_buffer: int = 10_000
    train_samples: int | None = field(default=None, metadata={"help": "Use the first images alone, for a trial."})
    validation_samples: int | None = None
    workers: int = field(default=1, metadata={"help": "Processes per rank that decode and augment; 0 for none."})


@dataclass
class AugmentationArguments:
    crop_scale: list[float] = field(
        default_factory=lambda: [0.08, 1.0], metadata={"help": "Least and largest area of random resized crops."}
    )
    flip: bool = True
    randaugment_ops: int = 2
    randaugment_magnitude: int = field(default=15, metadata={"help": "0 to 30; 0 leaves RandAugment out."})
    mixup_alpha: float = 1.0
    cutmix_alpha: float = 0.0
    erasing: float = field(default=0.0, metadata={"help": "Probability of random erasing."})


@dataclass
class OptimizationArguments:
    batch_size: int = field(default=4096, metadata={"help": "Effective batch: over all processes and accumulation."})
    micro_batch_size: int = field(default=64, metadata={"help": "Images of one process in one forward pass."})
    epochs: float | None = None
    steps: int | None = field(default=None, metadata={"help": "Optimizer steps; wins over epochs."})
    optimizer: str = field(
        default="soap", metadata={"help": "soap, nadamw or adamw.", "choices": ["soap", "nadamw", "adamw"]}
    )
    learning_rate: float = 1e-3
    weight_decay: float = 0.003
    beta1: float = 0.9
    beta2: float = 0.999
    clip_norm: float = 3.0
    schedule: str = field(default="cosine", metadata={"choices": ["cosine", "polynomial", "constant"]})
    polynomial_power: float = 1.0
    warmup_steps: int = 3000
    warmup_learning_rate: float = 1e-6
    min_learning_rate: float = 1e-5
    ema_decay: float = 0.999
    precondition_frequency: int = 100
    max_precondition_dim: int = 8192
    start_precondition_step: int = 500

    def total_steps(self, images: int | None) -> int:
        """`images` are those of an epoch, if they can be counted."""
        if self.steps is not None:
            return self.steps
        if self.epochs is None or images is None:
            raise SystemExit(
                "--steps must be given" + " for a stream, whose epochs cannot be counted." * (images is None)
            )
        return max(round(self.epochs * images / self.batch_size), 1)


def parse(groups: Sequence[type], arguments: Sequence[str], default_recipe: Path) -> list[tuple]:
    """
    The dataclasses `groups`, once for every stage. `arguments` are those of the command line: a recipe file first, or
    else `default_recipe`, whose values its own `stages` and then the command line override.
    """
    arguments, path = list(arguments), default_recipe
    if arguments and not arguments[0].startswith("-"):
        path = Path(arguments.pop(0))
    if not path.is_file():
        raise SystemExit(f"There is no recipe {path}; those at hand are {', '.join(known_recipes())}.")
    recipe = yaml.safe_load(path.read_text()) or {}  # JSON is YAML, too
    parser = HfArgumentParser(groups, allow_abbrev=False)
    stages = recipe.pop("stages", None) or [{}]
    parsed = []
    for number, stage in enumerate(stages, start=1):
        lines = [*as_options({**recipe, **stage}), *arguments]
        parsed.append(parser.parse_args_into_dataclasses(lines))
        if len(stages) > 1:  # one folder for each, each from the EMA weights of the one before
            run = next(group for group in parsed[-1] if isinstance(group, RunArguments))
            run.output_dir = os.path.join(run.output_dir, f"stage{number}")
    return parsed


def shrink(run: RunArguments, data: DataArguments, optimization: OptimizationArguments) -> None:
    """Any recipe as a run of a minute or two, to see that everything is in its place."""
    data.train_samples, data.validation_samples = 64, 32
    optimization.batch_size = optimization.micro_batch_size = 8
    optimization.steps, optimization.epochs, optimization.warmup_steps = 4, None, 1
    optimization.start_precondition_step, optimization.precondition_frequency = 2, 2
    run.log_steps, run.save_steps, run.eval_steps = 1, 2, 0


def start(accelerator: Accelerator, run: RunArguments, arguments: dict[str, Any]) -> bool:
    """Prepare `output_dir`, trackers and seeds; False if the run in `output_dir` is complete."""
    folder = Path(run.output_dir)
    if (folder / "final").exists() and run.resume:
        return False
    earlier = checkpoints(folder) or (folder / "final").exists()
    if earlier and not run.resume and not run.overwrite:
        raise SystemExit(
            f"--output_dir {folder} holds an earlier run: --resume it, --overwrite it, or choose another."
        )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for old in [*checkpoints(folder), folder / "final", folder / "best"] if not run.resume else []:
            shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    simple = {
        name: value if isinstance(value, (int, float, str, bool)) else str(value) for name, value in arguments.items()
    }
    accelerator.init_trackers("logs", config=simple)
    set_seed(run.seed)
    return True


def known_recipes() -> list[str]:
    return sorted(glob(str(Path(__file__).parent / "recipes" / "*.yaml")))


def as_options(values: dict[str, Any]) -> list[str]:
    """{"flip": True, "crop_scale": [0.5, 1]} -> --flip True --crop_scale 0.5 1"""
    options = []
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, dict):
            value = json.dumps(value)
        options += [f"--{name}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return options


# ------------------------------------------------------------------------------------------------- data, augmentation


def load_splits(args: DataArguments) -> tuple[Dataset | IterableDataset, Dataset]:
    """Training and validation data with the columns `image` (not decoded) and `label`, whatever they come from."""
    if args.dataset == "scenes":
        train = scenes(args.train_samples or 8000, split="train")
        validation = scenes(args.validation_samples or 1000, split="validation")
    else:
        splits = load_any(args)
        names = [args.validation_split] if args.validation_split else ["validation", "val", "test"]
        validation_split = next((name for name in names if name in splits), None)
        if args.train_split not in splits or validation_split is None:
            wanted = f"{args.train_split!r} and one of {names}"
            raise SystemExit(f"--dataset {args.dataset} must have the splits {wanted}, it has {list(splits)}.")
        train, validation = splits[args.train_split], splits[validation_split]
    train = standard_columns(train, args, args.train_samples)
    return train, standard_columns(validation, args, args.validation_samples)


def load_any(args: DataArguments) -> dict[str, Dataset | IterableDataset]:
    path, options = args.dataset, {"streaming": args.streaming}
    if path.endswith((".tar", ".parquet")):
        builder = "webdataset" if path.endswith(".tar") else "parquet"
        return load_dataset(builder, data_files=path, **options)
    return load_dataset(path, args.dataset_config, **options)


def standard_columns(split: Dataset | IterableDataset, args: DataArguments, samples: int | None):
    features = split.features or {}
    image = args.image_column or next((n for n, f in features.items() if isinstance(f, Image)), None)
    label = args.label_column or next((n for n in ("label", "labels", "cls", "fine_label") if n in features), None)
    for option, name in (("image_column", image), ("label_column", label)):
        if name not in features:
            raise SystemExit(f"--{option} must be one of the columns {list(features)}, got {name}.")
    if isinstance(split, Dataset):
        if len(split) == 0:
            raise SystemExit(f"--dataset {args.dataset} has an empty split.")
        split = split.select(range(min(samples or len(split), len(split))))
    elif samples:
        split = split.take(samples)
    names = {old: new for old, new in ((image, "image"), (label, "label")) if old != new}
    split = split.select_columns([image, label]).rename_columns(names)
    return split.cast_column("image", Image(decode=False))


def label_names(split: Dataset | IterableDataset) -> list[str] | None:
    feature = split.features["label"]
    return feature.names if isinstance(feature, ClassLabel) else None


def decode(stored: dict) -> torch.Tensor | None:
    """An image that `datasets` has not decoded as uint8 (3, height, width), or None if it cannot be read."""
    try:
        image = PILImage.open(stored["path"] if stored["bytes"] is None else BytesIO(stored["bytes"]))
        return torch.from_numpy(np.array(to_rgb(image))).permute(2, 0, 1)
    except (OSError, SyntaxError, ValueError):  # what PIL raises for a file that is cut short or is no image
        return None


def seed_of(*numbers: int) -> int:
    """One seed from several numbers: that of the run and a step, say."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


class Augment:
    """Random views of images, by kornia: batched where sizes agree, seeded, in values from 0 to 1."""

    group = 8  # images that share the operations of one RandAugment draw

    def __init__(self, args: AugmentationArguments, image_size: int):
        import kornia.augmentation as K
        from kornia.augmentation.auto import RandAugment

        self.args, self.size = args, image_size
        self.crop = K.RandomResizedCrop((image_size, image_size), scale=tuple(args.crop_scale))
        self.flip = K.RandomHorizontalFlip() if args.flip else None
        magnitude = args.randaugment_magnitude
        self.randaugment = RandAugment(n=args.randaugment_ops, m=magnitude) if magnitude else None
        self.erasing = K.RandomErasing(p=args.erasing) if args.erasing else None
        alpha = args.cutmix_alpha
        self.cutmix = (
            K.RandomCutMixV2(beta=alpha, use_correct_lambda=True, data_keys=["input", "class"]) if alpha else None
        )

    def __call__(self, images: Sequence[torch.Tensor], labels: torch.Tensor, seed: Sequence[int]) -> dict:
        """
        (3, height, width) uint8 each -> `images` (images, 3, image_size, image_size). Where two were mixed, an image shows
        `share` of its own label and `1 - share` of `other_labels`.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(*seed))
            if len({image.shape for image in images}) == 1:
                views = self.crop(torch.stack(tuple(images)) / 255)
            else:
                views = torch.cat([self.crop(image[None] / 255) for image in images])
            views = views if self.flip is None else self.flip(views)
            if self.randaugment is not None:
                views = torch.cat([self.randaugment(part) for part in views.split(self.group)])
            views = views if self.erasing is None else self.erasing(views)
            views, other_labels, share = self.mix(views.clamp(0, 1), labels)
        return {"images": views, "labels": labels, "other_labels": other_labels, "share": share}

    def mix(self, views: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mixup or CutMix (one of them by chance if both are on) with another image of the batch."""
        mixup, count = self.args.mixup_alpha, len(views)
        if self.cutmix is not None and (not mixup or torch.rand(()) < 0.5):
            views, mixed = self.cutmix(views, labels)  # (1, images, 3): label, other label, share of the first
            return views, mixed[0, :, 1].long(), mixed[0, :, 2]
        if not mixup:
            return views, labels, torch.ones(count)
        # kornia's Mixup draws from a range, not from Beta(alpha, alpha)
        share = torch.distributions.Beta(mixup, mixup).sample((count,))
        own = share[:, None, None, None]
        return own * views + (1 - own) * views.roll(1, dims=0), labels.roll(1), share


class MicroBatches(torch.utils.data.Dataset):
    """
    Item i is the i-th micro-batch of the whole run, over all processes: its images are those at `i * size` and after in an
    endless stream that shuffles anew every epoch. Whoever asks for it, and whenever, gets the same one.
    """

    def __init__(self, dataset: Dataset, size: int, augment: Augment, seed: int, shuffle: bool = True):
        self.dataset, self.size, self.augment, self.seed, self.shuffle = dataset, size, augment, seed, shuffle
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
        return {**collate(samples, indices, self.augment, [self.seed, micro]), "micro": torch.tensor(micro)}


class StreamedMicroBatches(torch.utils.data.IterableDataset):
    """Micro-batches of one process from a stream, which `datasets` divides among processes and workers."""

    def __init__(self, stream: IterableDataset, size: int, augment: Augment, seed: int, skip: int):
        self.stream, self.size, self.augment, self.seed, self.skip = stream, size, augment, seed, skip

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        micro, samples, epoch = number, [], 0  # workers take turns
        while True:
            self.stream.set_epoch(epoch)
            for sample in self.stream:
                samples.append(sample)
                if len(samples) == self.size:
                    if micro >= self.skip:  # those before were trained on already; passing them decodes nothing
                        batch = collate(samples, range(self.size), self.augment, [self.seed, micro])
                        yield {**batch, "micro": torch.tensor(micro)}
                    micro, samples = micro + workers, []
            epoch += 1


def collate(samples: Sequence[dict], indices: Sequence[int], augment: Augment, seed: Sequence[int]) -> dict:
    """`places` are those of the images in the micro-batch: the ones that cannot be read are left out."""
    decoded = [decode(sample["image"]) for sample in samples]
    places = [place for place, image in enumerate(decoded) if image is not None]
    if not places:
        raise OSError(f"None of {len(samples)} images can be read; the first is {samples[0]['image'].get('path')}.")
    labels = torch.tensor([samples[place]["label"] for place in places])
    views = augment([decoded[place] for place in places], labels, seed)
    return {**views, "places": torch.tensor(places), "indices": torch.tensor([indices[place] for place in places])}


def validation_batches(
    dataset: Dataset | IterableDataset, processor: Callable, size: int, accelerator: Accelerator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`pixel_values` and `labels` of this process's share of the data; images that cannot be read are left out."""
    for number, columns in enumerate(dataset.iter(size)):
        if number % accelerator.num_processes != accelerator.process_index:
            continue
        pairs = [(decode(stored), label) for stored, label in zip(columns["image"], columns["label"])]
        pairs = [(image, label) for image, label in pairs if image is not None]
        if pairs:
            pixel_values = processor([image for image, _ in pairs], return_tensors="pt").pixel_values
            labels = torch.tensor([label for _, label in pairs])
            yield pixel_values.to(accelerator.device), labels.to(accelerator.device)


# ------------------------------------------------------------------------------------------------ optimizer, schedule


def build_optimizer(model: torch.nn.Module, args: OptimizationArguments) -> torch.optim.Optimizer:
    """Biases, norms, layer scales and learned tokens do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.squeeze().ndim > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in trained if p.squeeze().ndim <= 1], "weight_decay": 0.0},
    ]
    common = {"lr": args.learning_rate, "betas": (args.beta1, args.beta2)}
    if args.optimizer == "adamw":
        return torch.optim.AdamW(groups, **common)
    if args.optimizer == "nadamw":
        return torch.optim.NAdam(groups, **common, decoupled_weight_decay=True)
    from soap import DelayedSOAP

    return DelayedSOAP(
        groups,
        **common,
        precondition_frequency=args.precondition_frequency,
        max_precondition_dim=args.max_precondition_dim,
        start_precondition_step=args.start_precondition_step,
    )


def build_scheduler(optimizer: torch.optim.Optimizer, args: OptimizationArguments, steps: int) -> LambdaLR:
    """A linear warm-up from `warmup_learning_rate`, then the schedule down to `min_learning_rate` (or constant)."""
    highest, lowest, warmup = args.learning_rate, args.min_learning_rate, args.warmup_steps

    def rate(step: int) -> float:
        if step < warmup:
            return args.warmup_learning_rate + (highest - args.warmup_learning_rate) * step / warmup
        left = 1 - min((step - warmup) / max(steps - warmup, 1), 1)
        share = {
            "cosine": (1 - math.cos(math.pi * left)) / 2,
            "polynomial": left**args.polynomial_power,
            "constant": 1,
        }[args.schedule]
        return lowest + (highest - lowest) * share

    return LambdaLR(optimizer, lambda step: rate(step) / highest)


# --------------------------------------------------------------------------------------------------------- checkpoints


def write_whole(folder: Path, write: Callable[[Path], None], accelerator: Accelerator | None = None) -> None:
    """
    Have `write` fill a folder that appears under its name when it is complete, or not at all. With an `accelerator` all
    processes take part.
    """
    part = folder.with_name(f".{folder.name}.part")
    wait, main = (accelerator.wait_for_everyone, accelerator.is_main_process) if accelerator else (lambda: None, True)
    if main:
        shutil.rmtree(part, ignore_errors=True)
    wait()
    try:
        write(part)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise SystemExit(
            f"{folder} could not be written: {error}. What was saved before is whole, and --resume goes on from there."
        ) from error
    wait()
    if main:
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    wait()


def checkpoints(folder: Path) -> list[Path]:
    """From the oldest to the newest."""
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


class Metrics:
    """One JSON object a line, in `metrics.jsonl`; what an interrupted run wrote after its last checkpoint is dropped."""

    def __init__(self, path: Path, step: int, accelerator: Accelerator):
        self.path, self.accelerator = path, accelerator
        if accelerator.is_main_process:
            lines = path.read_text().splitlines() if path.exists() and step else []
            path.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= step))

    def log(self, step: int, values: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        self.accelerator.log({name: value for name, value in values.items() if isinstance(value, (int, float))}, step)


def model_card(title: str, script: str, arguments: dict[str, Any], metrics: dict[str, Any]) -> str:
    """What the weights are, how they came to be, and what they score."""
    lines = [
        f"# {title}",
        "",
        f"Trained by `{script}` with",
        "",
        "```yaml",
        yaml.safe_dump(arguments).rstrip(),
        "```",
        "",
    ]
    for name, value in metrics.items():
        heading = name.replace("_", " ")
        if isinstance(value, dict):
            row = [f"{score:.4f}" for score in value.values()]
            lines += [f"| {heading} | {' | '.join(value)} |", "|---" * (len(value) + 1) + "|"]
            lines += [f"| | {' | '.join(row)} |", ""]
        elif isinstance(value, float):
            lines += [f"{heading}: {value:.4f}", ""]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ the loop


def train(
    accelerator: Accelerator,
    model: torch.nn.Module,
    loader_from: Callable[[int], Iterator[dict]],
    loss_of: Callable[[torch.nn.Module, dict, int], torch.Tensor],
    evaluate: Callable[[torch.nn.Module], dict[str, Any]],
    save: Callable[[torch.nn.Module, Path, dict[str, Any]], None],
    run: RunArguments,
    optimization: OptimizationArguments,
    steps: int,
) -> dict[str, Any]:
    """
    Train for `steps` steps and return the last metrics. The averaged (EMA) model is what is evaluated and saved.

    `loader_from(step)` gives this process's micro-batches from that step on; `loss_of(model, batch, step)` the mean loss of
    one of them; `evaluate(model)` metrics, the first of which decides which model is best; `save(model, folder, metrics)`
    writes a model.
    """
    folder = Path(run.output_dir)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(optimization.ema_decay)).to(accelerator.device).eval()
    optimizer = build_optimizer(model, optimization)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = build_scheduler(optimizer, optimization, steps)
    progress = Progress()
    accelerator.register_for_checkpointing(ema, scheduler, progress)
    if run.resume and (saved := checkpoints(folder)):
        accelerator.load_state(str(saved[-1]))
    metrics = Metrics(folder / "metrics.jsonl", progress.step, accelerator)
    accumulation = micro_batches_per_step(optimization, accelerator)

    def checkpoint() -> None:
        write_whole(
            folder / f"checkpoint-{progress.step}", lambda part: accelerator.save_state(str(part)), accelerator
        )
        for old in checkpoints(folder)[:-2] if accelerator.is_main_process else []:
            shutil.rmtree(old)

    batches = iter(loader_from(progress.step))
    bar = tqdm(total=steps, initial=progress.step, desc=folder.name, disable=not accelerator.is_main_process)
    begin, seen = time.perf_counter(), 0
    model.train()
    while progress.step < steps:
        total = torch.zeros((), device=accelerator.device)
        for number in range(accumulation):
            batch = {name: value.to(accelerator.device) for name, value in next(batches).items()}
            progress.skipped += optimization.micro_batch_size - len(batch["images"])
            with accelerator.no_sync(model) if number + 1 < accumulation else nullcontext():
                loss = loss_of(model, batch, progress.step) / accumulation
                accelerator.backward(loss)
            total += loss.detach()
        loss = accelerator.reduce(total, "mean").item()
        if not math.isfinite(loss):
            checkpoint()
            raise SystemExit(
                f"The loss is {loss} at step {progress.step}. {folder}/checkpoint-{progress.step} holds the state before "
                "it; a lower --learning_rate or --clip_norm may help."
            )
        norm = accelerator.clip_grad_norm_(model.parameters(), optimization.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        ema.update_parameters(Whole(accelerator.unwrap_model(model)))
        progress.step += 1
        seen += optimization.batch_size
        bar.update()
        bar.set_postfix(loss=f"{loss:.3f}", images_per_second=f"{seen / (time.perf_counter() - begin):.0f}")
        if progress.step % run.log_steps == 0 or progress.step == steps:
            rate = seen / (time.perf_counter() - begin)
            values = {"loss": loss, "learning_rate": scheduler.get_last_lr()[0], "gradient_norm": float(norm)}
            metrics.log(progress.step, {**values, "images_per_second": round(rate, 1)})
        if progress.step == steps or (run.eval_steps and progress.step % run.eval_steps == 0):
            progress.metrics = evaluate(ema.module)
            metrics.log(progress.step, progress.metrics)
            name, score = next(iter(progress.metrics.items()))
            bar.write(f"step {progress.step}: {name} {score:.4f}")
            if score > progress.best:
                progress.best = score
                write_whole(folder / "best", lambda part: save(ema.module, part, progress.metrics), accelerator)
            if progress.step == steps:
                write_whole(folder / "final", lambda part: save(ema.module, part, progress.metrics), accelerator)
        if progress.step % run.save_steps == 0 or progress.step == steps:
            checkpoint()
    bar.close()
    skipped = int(accelerator.reduce(torch.tensor(progress.skipped, device=accelerator.device), "sum"))
    if skipped:
        accelerator.print(f"{skipped} images could not be read and were left out.")
    accelerator.end_training()
    return progress.metrics


class Whole(NamedTuple):
    """A model as the average wants to see it: with whole parameters, also where FSDP shards them."""

    model: torch.nn.Module

    def parameters(self) -> Iterator[torch.Tensor]:
        return (p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.model.parameters())

    def buffers(self) -> Iterator[torch.Tensor]:
        return self.model.buffers()


class Progress:
    """What a checkpoint remembers beside the states of model, average, optimizer and scheduler."""

    def __init__(self):
        self.step, self.best, self.skipped, self.metrics = 0, -math.inf, 0, {}

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def micro_batches_per_step(args: OptimizationArguments, accelerator: Accelerator) -> int:
    """Micro-batches that a process accumulates into one step, so that the effective batch is what was asked for."""
    together = args.micro_batch_size * accelerator.num_processes
    if args.batch_size % together:
        raise SystemExit(
            f"--batch_size must be a multiple of --micro_batch_size times the number of processes, {args.micro_batch_size} "
            f"x {accelerator.num_processes} = {together}, got {args.batch_size}."
        )
    return args.batch_size // together
