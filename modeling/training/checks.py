"""Checks that several groups of arguments share."""

import json
import os
from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from .. import AdaPerceiverConfig, AdaPerceiverForDistillation, AdaPerceiverForImageClassification


AXES = ("tokens", "depth", "width")
CLASSIFIERS = (AdaPerceiverForImageClassification, AdaPerceiverForDistillation)
SHIPPED = str(Path(__file__).parents[2] / "checkpoints" / "adaperceiver-tiny-cifar10")  # of a checkout


def require(arguments: Any, allowed: str, holds: Callable[[Any], Any], *names: str) -> None:
    """Raise unless `holds` is true of each of the named fields of a dataclass; None is always allowed."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not holds(value):
            raise ValueError(f"--{name} must be {allowed}, got {as_text(value)}.")


def at_least(arguments: Any, least: float, *names: str) -> None:
    require(arguments, f"at least {least}", lambda value: value >= least, *names)


def above_zero(arguments: Any, *names: str) -> None:
    require(arguments, "above 0", lambda value: value > 0, *names)


def at_most_one(arguments: Any, *names: str) -> None:
    require(arguments, "from 0 to 1", lambda value: 0 <= value <= 1, *names)


def as_text(value: Any) -> str:
    """As it is written on a command line."""
    return (" ".join(map(str, value)) or "nothing") if isinstance(value, (list, tuple)) else str(value)


def suggestion(name: str, names: Any) -> str:
    close = get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def check_axes(arguments: Any) -> None:
    require(arguments, f"any of {', '.join(AXES)}", lambda axes: {*axes} <= {*AXES}, "adaptive_axes")


def check_output(arguments: Any, *names: str) -> None:
    """Before the work of which the result could not be written."""

    def may_be_written(path: str) -> bool:
        existing = next(one for one in (Path(path), *Path(path).absolute().parents) if one.exists())
        return existing.is_dir() and os.access(existing, os.W_OK)

    require(arguments, "a folder that can be written", may_be_written, *names)


def check_checkpoint(option: str, name: str, adaperceiver: bool = False) -> dict[str, Any]:
    """
    The config of a model that can be loaded, of our kind with `adaperceiver`; raises before anything else is loaded.
    """
    wanted = f"--{option} must be a folder with a config.json, or the id of a model on the hub, got {name}"
    try:
        config, _ = PreTrainedConfig.get_config_dict(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{wanted}: {error}") from error
    if not config:
        raise ValueError(f"{wanted}, which has none.")
    if adaperceiver and config.get("model_type") != "adaperceiver":
        raise ValueError(f"--{option} must be an AdaPerceiver, got {name}, which is {config.get('model_type')}.")
    return config


def check_classifier(option: str, name: str) -> AdaPerceiverConfig:
    """The config of an image classifier of AdaPerceiver, before anything is loaded."""
    config, allowed = check_checkpoint(option, name, adaperceiver=True), [one.__name__ for one in CLASSIFIERS]
    if not {*allowed} & {*(config.get("architectures") or [])}:
        raise ValueError(
            f"--{option} must be a checkpoint of {' or '.join(allowed)}, got {name} of {config.get('architectures')}."
        )
    return check_config(option, {}, name)


def config_fields(option: str, text: str) -> dict[str, Any]:
    """The fields of `AdaPerceiverConfig` that JSON gives: a text, or a file that holds it."""
    try:
        found = json.loads(Path(text).read_text() if os.path.isfile(text) else text)
    except ValueError as error:
        raise ValueError(f"--{option} must be JSON or a file that holds it, got {text}: {error}") from error
    known = {field.name for field in fields(AdaPerceiverConfig)} | {"num_labels"}
    if not isinstance(found, dict):
        raise ValueError(f"--{option} must be a mapping of fields of AdaPerceiverConfig, got {text}.")
    for name in found:
        if name not in known or name.startswith("_"):
            raise ValueError(
                f"--{option} has {name}, which is no field of AdaPerceiverConfig{suggestion(name, known) or '.'}"
            )
    return found


def check_config(option: str, values: dict[str, Any], checkpoint: str | None = None) -> AdaPerceiverConfig:
    """The configuration with `values` in place of those of a checkpoint, or of the defaults."""
    try:
        before = {} if checkpoint is None else AdaPerceiverConfig.get_config_dict(checkpoint)[0]
        return AdaPerceiverConfig.from_dict({**before, **values})
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"--{option}: {error}") from error
