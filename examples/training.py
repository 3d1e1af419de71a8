"""
What the training scripts share: arguments and recipes, optimizers and schedules, checkpoints, and the loop. Their images come
from `data.py`.
"""

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import is_tensorboard_available, set_seed
from data import DataArguments, seed_of
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm.auto import tqdm
from transformers import HfArgumentParser

from adaperceiver import AdaPerceiverConfig, OnceForAll


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


def recipe_for(arguments: Sequence[str], scenes: Path, own: Path) -> Path:
    """The recipe of a command line that names none: that of the rendered scenes is for them alone, `own` for other data."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dataset", nargs="*", default=["scenes"])
    return scenes if parser.parse_known_args(arguments)[0].dataset == ["scenes"] else own


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
    if {"-h", "--help"} & {*arguments}:
        print_help(parser, path, recipe, stages)
    parsed = []
    for number, stage in enumerate(stages, start=1):
        lines = [*as_options({**recipe, **stage}), *arguments]
        parsed.append(parser.parse_args_into_dataclasses(lines))
        if len(stages) > 1:  # one folder for each, each from the EMA weights of the one before
            run = next(group for group in parsed[-1] if isinstance(group, RunArguments))
            run.output_dir = os.path.join(run.output_dir, f"stage{number}")
    return parsed


def print_help(parser: HfArgumentParser, path: Path, recipe: dict[str, Any], stages: Sequence[dict]) -> None:
    """Every option with the value that it has if the command line does not say otherwise: the recipe's, or the default."""
    for action in parser._actions:
        action.help = action.help or "(default: %(default)s)"  # argparse shows no default where there is no text
    parser.set_defaults(**recipe)
    parser.description = f"The defaults are those of the recipe {path}."
    if len(stages) > 1:
        parser.description += f" Its {len(stages)} stages have others: " + "; ".join(map(json.dumps, stages)).replace(
            "%", "%%"
        )
    parser.print_help()
    raise SystemExit(0)


def print_plan(
    accelerator: Accelerator,
    name: str,
    images: tuple[int | None, int | None],
    classes: Sequence[str] | None,
    seen: Iterable[int] | None,
    image_size: tuple[int, int],
    optimization: OptimizationArguments,
    steps: int,
) -> None:
    """
    What a run uses, before it starts. `images` are those of training and validation (None for a stream), `seen` the classes
    that the training data have, if that is known.
    """
    training, validation = ("a stream of images" if count is None else f"{count:,} images" for count in images)
    what = "" if classes is None else f" of {len(classes)} classes"
    accelerator.print(f"{name}: {training}{what} to train on, {validation} to validate on.")
    if classes is not None and seen is not None:
        without = [classes[index] for index in range(len(classes)) if index not in {*seen}]
        if without:
            more = ", ..." if len(without) > 5 else ""
            accelerator.print(
                f"No training image shows {len(without)} of the classes: {', '.join(without[:5])}{more}."
            )
    together = optimization.micro_batch_size * accelerator.num_processes
    accelerator.print(
        f"Images of {image_size[0]} x {image_size[1]} pixels (height x width); {steps:,} steps of {optimization.batch_size} "
        f"images ({together} at a time)."
    )


def shrink(run: RunArguments, data: DataArguments, optimization: OptimizationArguments) -> None:
    """Any recipe as a run of a minute or two, to see that everything is in its place."""
    data.train_samples, data.validation_samples = 64, 32
    optimization.micro_batch_size = 8
    optimization.batch_size = 8 * started_processes()  # one micro-batch for each
    optimization.steps, optimization.epochs, optimization.warmup_steps = 4, None, 1
    optimization.start_precondition_step, optimization.precondition_frequency = 2, 2
    run.log_steps, run.save_steps, run.eval_steps = 1, 2, 0


def started_processes() -> int:
    """By the launcher, whether Accelerate sees them or not."""
    return int(os.environ.get("WORLD_SIZE", 1))


def start(run: RunArguments, *groups: Any) -> tuple[Accelerator, dict[str, Any]] | None:
    """
    Prepare `output_dir`, trackers and seeds: the accelerator, and the arguments of all `groups` in one dictionary. None if
    the run in `output_dir` is complete.
    """
    accelerator = Accelerator(log_with=run.log_with(), project_dir=run.output_dir)
    arguments = {name: value for group in groups for name, value in vars(group).items()}
    folder, started = Path(run.output_dir), started_processes()
    if started != accelerator.num_processes:  # each would train alone, all into one folder
        raise SystemExit(
            f"{started} processes were started, but Accelerate sees {accelerator.num_processes}: on a CPU, set "
            "ACCELERATE_USE_CPU=true."
        )
    if (folder / "final").exists() and run.resume:
        accelerator.print(f"{run.output_dir} is complete.")
        return None
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
    return accelerator, arguments


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


def draw_curves(folders: Sequence[Path], path: Path) -> None:
    """The losses of runs that followed each other, and the first score of their evaluations, as a figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, losses = plt.subplots(figsize=(8, 4.5))
    scores, before, evaluated = losses.twinx(), 0, []
    for folder in folders:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps, values = zip(*((before + line["step"], line["loss"]) for line in lines if "loss" in line))
        losses.plot(steps, values, lw=0.8, label=folder.name)
        evaluated += [(before + line["step"], *list(line.items())[1]) for line in lines if "loss" not in line]
        before = steps[-1]
        losses.axvline(before, color="grey", lw=0.5)
    if evaluated:
        scores.plot([step for step, _, _ in evaluated], [value for _, _, value in evaluated], "ko-", ms=4, lw=0.5)
        scores.set_ylabel(f"{evaluated[-1][1]} (dots)")
    losses.set_xlabel("step")
    losses.set_ylabel("loss")
    losses.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


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
    batches: Dataset | Callable[[int], IterableDataset],
    loss_of: Callable[[torch.nn.Module, dict, int], torch.Tensor],
    evaluate: Callable[[torch.nn.Module], dict[str, Any]],
    save: Callable[[torch.nn.Module, Path, dict[str, Any]], None],
    run: RunArguments,
    optimization: OptimizationArguments,
    steps: int,
    workers: int,
    higher_is_better: bool = True,
) -> dict[str, Any]:
    """
    Train for `steps` steps and return the last metrics. The averaged (EMA) model is what is evaluated and saved.

    `batches` holds the micro-batches of the whole run by number, or, for a stream, makes those of this process after a number
    that it skips; `loss_of(model, batch, step)` is the mean loss of one of them; `evaluate(model)` gives metrics, the first
    of which decides which model is best; `save(model, folder, metrics)` writes a model.
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

    loader = iter(loader_from(progress.step, steps, batches, workers, accumulation, accelerator))
    bar = tqdm(total=steps, initial=progress.step, desc=folder.name, disable=not accelerator.is_main_process)
    begin, seen = time.perf_counter(), 0
    model.train()
    while progress.step < steps:
        total = torch.zeros((), device=accelerator.device)
        for number in range(accumulation):
            batch = {name: value.to(accelerator.device) for name, value in next(loader).items()}
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
            score = score if higher_is_better else -score
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
    if accelerator.is_main_process and find_spec("matplotlib"):
        draw_curves([folder], folder / "curves.png")
    for tracker in accelerator.trackers:  # `end_training` would part the processes as well, before the next stage
        tracker.finish()
    return progress.metrics


def loader_from(
    step: int,
    steps: int,
    batches: Dataset | Callable[[int], IterableDataset],
    workers: int,
    accumulation: int,
    accelerator: Accelerator,
) -> DataLoader:
    """This process's micro-batches from `step` on: processes take turns."""
    world, rank = accelerator.num_processes, accelerator.process_index
    options = {"batch_size": None, "num_workers": workers, "persistent_workers": workers > 0}
    if not isinstance(batches, Dataset):
        return DataLoader(batches(step * accumulation), **options)
    micros = range(step * accumulation * world + rank, steps * accumulation * world, world)
    return DataLoader(batches, sampler=micros, **options)


def draws(
    config: AdaPerceiverConfig, axes: Sequence[str], seed: int, args: OptimizationArguments, accelerator: Accelerator
) -> Callable[[dict, int], OnceForAll]:
    """`draw(batch, step)` is what a micro-batch trains in a step: one draw for the whole effective batch, whoever computes it."""
    drawn, per_step = {}, args.batch_size // args.micro_batch_size

    def draw(batch: dict, step: int) -> OnceForAll:
        if step not in drawn:
            drawn.clear()
            generator = torch.Generator().manual_seed(seed_of(seed, step))
            drawn[step] = OnceForAll.draw(config, axes, args.batch_size, generator)
        return drawn[step].of_images((batch["micro"] % per_step) * args.micro_batch_size + batch["places"])

    return draw


def freeze_stem(model: torch.nn.Module) -> None:
    if model.config.stem_layers is None:
        raise SystemExit("--freeze_stem needs a model with a stem (`stem_layers` in its config).")
    model.adaperceiver.embeddings.patch_embeddings.freeze()


def normalisation(processor: Any, accelerator: Accelerator) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation, each (3, 1, 1)"""
    both = (processor.image_mean, processor.image_std)
    return tuple(torch.tensor(values, device=accelerator.device)[:, None, None] for values in both)


def print_scores(metrics: dict[str, Any], accelerator: Accelerator) -> None:
    for name, scores in metrics.items():
        if isinstance(scores, dict):
            row = "  ".join(f"{at}: {score:.4f}" for at, score in scores.items())
            accelerator.print(f"{name.replace('_', ' '):20} {row}")


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
