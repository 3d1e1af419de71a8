"""The training loop, and what the scripts do before and after it."""

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm.auto import tqdm

from .. import AdaPerceiverConfig, OnceForAll
from ..evaluation.plots import draw_curves
from .arguments import OptimizationArguments, RunArguments, check_processes, shrink
from .augmentation import seed_of
from .checkpointing import Metrics, check_resumed, checkpoints, load_newest, lock, record_arguments, write_whole
from .optimization import build_optimizer, build_scheduler


class Session(NamedTuple):
    """A run that has started."""

    run: RunArguments
    data: Any  # of images with labels, or with masks or depth maps
    optimization: OptimizationArguments
    accelerator: Accelerator
    arguments: dict[str, Any]  # all of the run

    @property
    def dataset(self) -> str:
        """The names of the data."""
        datasets = self.data.dataset if isinstance(self.data.dataset, list) else [self.data.dataset]
        return ", ".join(Path(one).name for one in datasets)


def start(run: RunArguments, data: Any, optimization: OptimizationArguments, *others: Any) -> Session | None:
    """
    Prepare `output_dir`, trackers and seeds; `others` are the groups of arguments that are left. None if the run in
    `output_dir` is complete.
    """
    if run.smoke:
        shrink(run, data, optimization)
    accelerator = Accelerator(log_with=run.log_with(), project_dir=run.output_dir)
    groups = (data, optimization, *others)
    arguments = {"seed": run.seed} | {name: value for group in groups for name, value in vars(group).items()}
    folder = Path(run.output_dir)
    check_processes(accelerator)
    accelerator.gradient_accumulation_steps = micro_batches_per_step(optimization, accelerator)
    if optimization.steps is None and (optimization.epochs is None or arguments.get("streaming")):
        optimization.total_steps(None if arguments.get("streaming") else 0)
    if run.resume:
        if checkpoints(folder) and not (folder / "arguments.json").exists():
            accelerator.print(
                f"{folder} has no arguments.json, so that other arguments than before would go unnoticed."
            )
        check_resumed(folder, arguments)
    if (folder / "final").exists() and run.resume:
        accelerator.print(f"{run.output_dir} is complete.")
        return None
    earlier = checkpoints(folder) or (folder / "final").exists()
    if earlier and not run.resume and not run.overwrite:
        raise ValueError(
            f"--output_dir {folder} holds an earlier run: --resume it, --overwrite it, or choose another."
        )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        lock(folder)
    accelerator.wait_for_everyone()
    simple = {
        name: value if isinstance(value, (int, float, str, bool)) else str(value) for name, value in arguments.items()
    }
    accelerator.init_trackers("logs", config=simple)
    set_seed(run.seed)
    return Session(run, data, optimization, accelerator, arguments)


def print_plan(
    session: Session,
    training_data: Any,
    validation_data: Any,
    classes: Sequence[str] | None,
    seen: Iterable[int] | None,
    image_size: tuple[int, int],
) -> int:
    """
    Say what a run uses, before it starts, and return its number of steps. `seen` are the classes that the training data have,
    if that is known.
    """
    accelerator, optimization = session.accelerator, session.optimization
    counts = [len(one) if hasattr(one, "__len__") else None for one in (training_data, validation_data)]
    training, validation = ("a stream of images" if count is None else f"{count:,} images" for count in counts)
    what = "" if classes is None else f" of {len(classes)} classes"
    accelerator.print(f"{session.dataset}: {training}{what} to train on, {validation} to validate on.")
    if classes is not None and seen is not None:
        without = [classes[index] for index in range(len(classes)) if index not in {*seen}]
        if without:
            more = ", ..." if len(without) > 5 else ""
            accelerator.print(
                f"No training image shows {len(without)} of the classes: {', '.join(without[:5])}{more}."
            )
    together, steps = optimization.micro_batch_size * accelerator.num_processes, optimization.total_steps(counts[0])
    accelerator.print(
        f"Images of {image_size[0]} x {image_size[1]} pixels (height x width); {steps:,} steps of {optimization.batch_size} "
        f"images ({together} at a time)."
    )
    return steps


def train(
    session: Session,
    model: torch.nn.Module,
    batches: Dataset | Callable[[int], IterableDataset],
    loss_of: Callable[[torch.nn.Module, dict, int], torch.Tensor],
    evaluate: Callable[[torch.nn.Module], dict[str, Any]],
    save: Callable[[torch.nn.Module, Path, dict[str, Any]], None],
    steps: int,
    higher_is_better: bool = True,
) -> None:
    """
    Train for `steps` steps and print the last scores. The averaged (EMA) model is what is evaluated and saved.

    `batches` holds the micro-batches of the whole run by number, or, for a stream, makes those of this process after a number
    that it skips; `loss_of(model, batch, step)` is the mean loss of one of them; `evaluate(model)` gives metrics, the first
    of which decides which model is best; `save(model, folder, metrics)` writes a model.

    Old checkpoints are removed by hand: `save_state` with a `total_limit` removes one before the new one is complete.
    """
    run, data, optimization, accelerator, arguments = session
    folder = Path(run.output_dir)
    if not (run.resume and checkpoints(folder)):
        if accelerator.is_main_process:
            for old in [*checkpoints(folder), folder / "final", folder / "best"]:
                shutil.rmtree(old, ignore_errors=True)
            record_arguments(folder, arguments)
        accelerator.wait_for_everyone()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(optimization.ema_decay)).to(accelerator.device).eval()
    optimizer = build_optimizer(model, optimization)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = build_scheduler(optimizer, optimization, steps)
    progress = Progress()
    accelerator.register_for_checkpointing(ema, scheduler, progress)
    load_newest(folder, accelerator)
    if progress.step > steps:
        raise ValueError(f"{folder} has been trained for {progress.step} steps, more than the {steps} of this run.")
    metrics = Metrics(folder / "metrics.jsonl", progress.step, progress.evaluated, accelerator)
    accumulation = accelerator.gradient_accumulation_steps

    def checkpoint() -> None:
        write_whole(
            folder / f"checkpoint-{progress.step}", lambda path: accelerator.save_state(str(path)), accelerator
        )
        for old in checkpoints(folder)[:-2] if accelerator.is_main_process else []:
            shutil.rmtree(old)

    def measure() -> None:
        progress.metrics, progress.evaluated = evaluate(ema.module), progress.step
        metrics.log(progress.step, progress.metrics)
        name, score = next(iter(progress.metrics.items()))
        bar.write(f"step {progress.step}: {name} {score:.4f}")
        score = score if higher_is_better else -score
        if score > progress.best:
            progress.best = score
            write_whole(folder / "best", lambda path: save(ema.module, path, progress.metrics), accelerator)

    loader = iter(loader_from(progress.step, steps, batches, data.workers, accumulation, accelerator))
    bar = tqdm(total=steps, initial=progress.step, desc=folder.name, disable=not accelerator.is_main_process)
    begin, seen = time.perf_counter(), 0
    model.train()
    while True:
        due = progress.step == steps or (run.eval_steps and progress.step % run.eval_steps == 0)
        if due and progress.evaluated < progress.step:  # its checkpoint is saved: what fails here loses nothing
            measure()
        if progress.step == steps:
            break
        total = torch.zeros((), device=accelerator.device)
        for _ in range(accumulation):
            batch = {name: value.to(accelerator.device) for name, value in next(loader).items()}
            progress.skipped += optimization.micro_batch_size - len(batch["images"])
            with accelerator.accumulate(model):
                loss = loss_of(model, batch, progress.step)
                accelerator.backward(loss)
            total += loss.detach() / accumulation
        loss = accelerator.reduce(total, "mean").item()
        if not math.isfinite(loss):
            checkpoint()
            raise FloatingPointError(
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
        if progress.step % run.save_steps == 0 or progress.step == steps:
            checkpoint()
    write_whole(folder / "final", lambda path: save(ema.module, path, progress.metrics), accelerator)
    bar.close()
    skipped = int(accelerator.reduce(torch.tensor(progress.skipped, device=accelerator.device), "sum"))
    if skipped:
        accelerator.print(f"{skipped} images could not be read and were left out.")
    if accelerator.is_main_process and find_spec("matplotlib"):
        draw_curves([folder], folder / "curves.png")
    for tracker in accelerator.trackers:  # `end_training` would also end the process group, before the next stage
        tracker.finish()
    for name, scores in progress.metrics.items():
        if isinstance(scores, dict):
            row = "  ".join(f"{at}: {score:.4f}" for at, score in scores.items())
            accelerator.print(f"{name.replace('_', ' '):20} {row}")


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
        stream = batches(step * accumulation)
        if workers > stream.shards:  # one without a shard would wait for images for ever
            accelerator.print(f"--workers {workers} is more than the {stream.shards} shards of each process.")
            options |= {"num_workers": stream.shards}
        return DataLoader(stream, **options)
    micros = range(step * accumulation * world + rank, steps * accumulation * world, world)
    return DataLoader(batches, sampler=micros, **options)


def draws(
    session: Session, config: AdaPerceiverConfig, axes: Sequence[str], **fields: float | None
) -> Callable[[dict, int], OnceForAll]:
    """
    `draw(batch, step)` is what a micro-batch trains in a step: one draw for the whole effective batch, whoever computes it.
    `fields` are those of `OnceForAll`.
    """
    args = session.optimization
    drawn: dict[int, OnceForAll] = {}
    per_step = args.batch_size // args.micro_batch_size

    def draw(batch: dict, step: int) -> OnceForAll:
        if step not in drawn:
            drawn.clear()
            generator = torch.Generator().manual_seed(seed_of(session.run.seed, step))
            drawn[step] = OnceForAll.draw(config, axes, args.batch_size, generator, **fields)
        return drawn[step].of_images((batch["micro"] % per_step) * args.micro_batch_size + batch["places"])

    return draw


def freeze_stem(model: torch.nn.Module) -> None:
    if model.config.stem_layers is None:
        raise ValueError("--freeze_stem needs a model with a stem (`stem_layers` in its config).")
    model.adaperceiver.embeddings.patch_embeddings.freeze()


def normalisation(processor: Any, accelerator: Accelerator) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation, each (3, 1, 1)"""
    both = (processor.image_mean, processor.image_std)
    return tuple(torch.tensor(values, device=accelerator.device)[:, None, None] for values in both)


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
        self.step, self.evaluated, self.best, self.skipped, self.metrics = 0, 0, -math.inf, 0, {}

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update({"evaluated": state["step"], **state})


def micro_batches_per_step(args: OptimizationArguments, accelerator: Accelerator) -> int:
    """Micro-batches that a process accumulates into one step, so that the effective batch is what was asked for."""
    together = args.micro_batch_size * accelerator.num_processes
    if args.batch_size % together:
        raise ValueError(
            f"--batch_size must be a multiple of --micro_batch_size times the number of processes, {args.micro_batch_size} "
            f"x {accelerator.num_processes} = {together}, got {args.batch_size}."
        )
    return args.batch_size // together
