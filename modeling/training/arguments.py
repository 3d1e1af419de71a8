"""Arguments of the training scripts, and recipes: files that hold them."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml
from accelerate import Accelerator, PartialState
from accelerate.utils import is_tensorboard_available
from huggingface_hub.errors import StrictDataclassError
from transformers import HfArgumentParser
from transformers.hf_argparser import HfArg, string_to_bool

from .checks import above_zero, at_least, at_most_one, check_output, require, suggestion
from .data import DataArguments


PACKAGE = Path(__file__).parents[1]
# In a checkout the recipes are beside the scripts, in a wheel inside the package.
RECIPES = next(folder for folder in (PACKAGE / "recipes", PACKAGE.parent / "examples" / "recipes") if folder.is_dir())


def command_line(main: Callable[[list[str]], None]) -> None:
    """
    Run a script. Input that cannot be used is an error of one line and exit code 2; with PYTHONDEVMODE=1 a traceback.
    """
    try:
        main(sys.argv[1:])
        PartialState().destroy_process_group()
    except (ValueError, OSError, FloatingPointError, StrictDataclassError) as error:
        if sys.flags.dev_mode:
            raise
        message = str(error)
        if "Original Traceback" in message:  # from a process of a data loader, whose own error is the last line
            message = message.strip().splitlines()[-1].partition(": ")[2]
        print("error:", " ".join(message.split()), file=sys.stderr)
        raise SystemExit(2) from None


class Switch(argparse.Action):
    """`--flip`, or `--no_flip` and `--no-flip`, without a value."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options):
        negated = [f"--no_{dest}", f"--no-{dest.replace('_', '-')}"]
        super().__init__([*option_strings, *negated], dest, nargs=0, **options)

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, not option_string.startswith(("--no_", "--no-")))


class Parser(HfArgumentParser):
    """Options from the fields of dataclasses: booleans are switches, lists may be empty, errors are raised as `ValueError`."""

    def __init__(self, groups: Sequence[type]):
        super().__init__(groups, allow_abbrev=False)

    def add_argument(self, *names: str, **options) -> argparse.Action | None:
        if options.get("action") == "store_false":  # the negation that HfArgumentParser adds to some booleans
            return None
        if options.get("type") is string_to_bool:
            options = {name: value for name, value in options.items() if name in ("default", "help")}
            options["action"] = Switch
        if options.get("nargs") == "+":
            options["nargs"] = "*"
        return super().add_argument(*names, **options)

    def parse(self, arguments: Sequence[str]) -> tuple[Any, ...]:
        """One object for each of the groups."""
        *parsed, rest = self.parse_args_into_dataclasses(
            list(arguments), return_remaining_strings=True, look_for_args_file=False
        )
        if rest and rest[0].startswith("--"):
            option, known = rest[0].split("=")[0], self._option_string_actions
            raise ValueError(f"There is no option {option}{suggestion(option, known) or '; --help lists them.'}")
        if rest:
            raise ValueError(f"No option takes the value {rest[0]}; switches (--resume, --no_resume) take none.")
        return tuple(parsed)

    def error(self, message: str) -> None:
        raise ValueError(message)


@dataclass
class RunArguments:
    output_dir: str = HfArg(default="runs/distill", help="Checkpoints, metrics and the final model.")
    resume: bool = HfArg(default=False, help="Continue from the last checkpoint in output_dir.")
    overwrite: bool = HfArg(default=False, help="Replace the earlier run in output_dir.")
    smoke: bool = HfArg(default=False, help="Shrink the run to a minute or two: few small steps.")
    seed: int = 0
    tracker: str | None = HfArg(default=None, help='An Accelerate tracker, or "none"; tensorboard if it is installed.')
    log_steps: int = 10
    save_steps: int = 500
    eval_steps: int = HfArg(default=1000, help="Steps between evaluations; 0 for one at the end.")

    def __post_init__(self):
        at_least(self, 0, "seed", "eval_steps")
        at_least(self, 1, "log_steps", "save_steps")
        check_output(self, "output_dir")

    def log_with(self) -> str | None:
        if self.tracker == "none":
            return None
        return self.tracker or ("tensorboard" if is_tensorboard_available() else None)


@dataclass
class OptimizationArguments:
    batch_size: int = HfArg(default=4096, help="Effective batch: over all processes and accumulation.")
    micro_batch_size: int = HfArg(default=64, help="Images of one process in one forward pass.")
    epochs: float | None = None
    steps: int | None = HfArg(default=None, help="Optimizer steps; wins over epochs.")
    optimizer: Literal["soap", "nadamw", "adamw"] = HfArg(default="soap", help="soap, nadamw or adamw.")
    learning_rate: float = 1e-3
    weight_decay: float = 0.003
    beta1: float = 0.9
    beta2: float = 0.999
    clip_norm: float = 3.0
    schedule: Literal["cosine", "polynomial", "constant"] = "cosine"
    polynomial_power: float = 1.0
    warmup_steps: int = 3000
    warmup_learning_rate: float = 1e-6
    min_learning_rate: float = 1e-5
    ema_decay: float = 0.999
    precondition_frequency: int = 100
    max_precondition_dim: int = 8192
    start_precondition_step: int = 500

    def __post_init__(self):
        at_least(self, 1, "batch_size", "micro_batch_size", "steps", "precondition_frequency", "max_precondition_dim")
        at_least(self, 0, "weight_decay", "warmup_steps", "start_precondition_step", "warmup_learning_rate")
        at_least(self, 0, "min_learning_rate")
        above_zero(self, "epochs", "learning_rate", "clip_norm", "polynomial_power")
        require(self, "at least 0 and below 1", lambda value: 0 <= value < 1, "beta1", "beta2")
        at_most_one(self, "ema_decay")

    def total_steps(self, images: int | None) -> int:
        """`images` are those of an epoch, if they can be counted."""
        if self.steps is not None:
            return self.steps
        if self.epochs is None or images is None:
            raise ValueError(
                "--steps must be given" + " for a stream, whose epochs cannot be counted." * (images is None)
            )
        return max(round(self.epochs * images / self.batch_size), 1)


def recipe_for(arguments: Sequence[str], scenes: str, own: str) -> Path:
    """The recipe of a command line that names none: that of the rendered scenes is for them alone, `own` for other data."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dataset", nargs="*", default=["scenes"])
    return RECIPES / (scenes if parser.parse_known_args(arguments)[0].dataset == ["scenes"] else own)


def parse(groups: Sequence[type], arguments: Sequence[str], default_recipe: Path) -> list[tuple[Any, ...]]:
    """
    The dataclasses `groups`, once for every stage. `arguments` are those of the command line: a recipe file first, or
    else `default_recipe`, whose values its own `stages` and then the command line override.
    """
    arguments, path = list(arguments), default_recipe
    if arguments and not arguments[0].startswith("-"):
        path = Path(arguments.pop(0))
    parser = Parser(groups)
    recipe, stages = read_recipe(path, {field.name for group in groups for field in fields(group)})
    if {"-h", "--help"} & {*arguments}:
        print_help(parser, path, recipe, stages)
    parsed = []
    for number, stage in enumerate(stages, start=1):
        parsed.append(parser.parse([*as_options({**recipe, **stage}), *arguments]))
        if len(stages) > 1:  # one folder for each, each from the EMA weights of the one before
            run = next(group for group in parsed[-1] if isinstance(group, RunArguments))
            run.output_dir = os.path.join(run.output_dir, f"stage{number}")
    return parsed


def read_recipe(path: Path, known: set[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The values of a recipe without its stages, and the values of each stage (at least one)."""
    if not path.is_file():
        raise ValueError(f"There is no recipe {path}; those at hand are {', '.join(known_recipes())}.")
    try:
        recipe = yaml.safe_load(path.read_text())  # JSON is YAML, too
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"The recipe {path} must be YAML or JSON: {error}") from error
    recipe = {} if recipe is None else recipe
    stages = recipe.pop("stages", None) or [{}] if isinstance(recipe, dict) else []
    stages = stages if isinstance(stages, list) else [stages, None]  # a mapping is not a list of stages
    for values in [recipe, *stages]:
        if not isinstance(values, dict):
            raise ValueError(f"The recipe {path} must be a mapping, and its stages a list of mappings.")
        if unknown := [name for name in values if name not in known]:
            raise ValueError(
                f"The recipe {path} has {unknown[0]}, which is no option of this script"
                f"{suggestion(str(unknown[0]), known) or '; --help lists them.'}"
            )
    return recipe, stages


def print_help(parser: Parser, path: Path, recipe: dict[str, Any], stages: Sequence[dict]) -> None:
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


def check_processes(accelerator: Accelerator) -> None:
    """Raise where each process would work alone, all into one folder."""
    started = started_processes()
    if started != accelerator.num_processes:
        raise ValueError(
            f"{started} processes were started, but Accelerate sees {accelerator.num_processes}: on a CPU, set "
            "ACCELERATE_USE_CPU=true."
        )


def known_recipes() -> list[str]:
    return sorted(map(str, RECIPES.glob("*.yaml")))


def as_options(values: dict[str, Any]) -> list[str]:
    """{"flip": True, "label_loss": False, "crop_scale": [0.5, 1]} -> --flip --no_label_loss --crop_scale 0.5 1"""
    options = []
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            options.append(f"--{name}" if value else f"--no_{name}")
            continue
        if isinstance(value, dict):
            value = json.dumps(value)
        options += [f"--{name}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return options
