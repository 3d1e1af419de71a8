"""Arguments of the training scripts, and recipes: files that hold them."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from accelerate.utils import is_tensorboard_available
from transformers import HfArgumentParser

from .data import DataArguments


PACKAGE = Path(__file__).parents[1]
# In a checkout the recipes are beside the scripts, in a wheel inside the package.
RECIPES = next(folder for folder in (PACKAGE / "recipes", PACKAGE.parent / "examples" / "recipes") if folder.is_dir())


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


def known_recipes() -> list[str]:
    return sorted(map(str, RECIPES.glob("*.yaml")))


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
