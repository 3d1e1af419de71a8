"""Checks that several groups of arguments share."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any


def require(arguments: Any, allowed: str, holds: Callable[[Any], bool], *names: str) -> None:
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
