# Copyright 2026 The AdaPerceiver for Hugging Face authors.
# Licensed under the Apache License, Version 2.0.

"""
Where an AdaPerceiver runs: the operating point of a call, the defaults of a checkpoint, and budgets.

A call is resolved once, by the model that is called: `split_kwargs` finds the adaptive arguments among those of the call, and
`AdaptiveMixin.operating_point` makes an `OperatingPoint` of them, with nothing left open. Everything inside takes that.
"""

import copy
import inspect
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import product
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers.utils.hub import cached_file, hf_api

from .configuration_adaperceiver import AXES, AdaPerceiverConfig, check_int


ATTENTION_TYPES = ("block", "bidirectional")
POLICIES = ("fixed", "router")  # that can be chosen by name
PER_IMAGE_FIELDS = ("tokens", "width", "depth", "exit_threshold")  # what a call may choose image by image
BUDGETS = ("max_gflops", "max_latency_ms")
# What a checkpoint may turn on that runs images differently, and how it is turned off where they must run alike.
ALIKE = {"exit_threshold": False, "policy": "fixed"}
SWITCHES = ("exit_threshold", "exit_temperatures", *BUDGETS)  # that `False` turns off


if TYPE_CHECKING:  # most methods take points of images that run alike, which hold no tuples
    from transformers import PreTrainedModel as Base

    Integers: TypeAlias = Any
    Threshold: TypeAlias = Any
else:
    Base = object  # models bring it
    Integers, Threshold = int | tuple[int, ...], float | tuple[float, ...] | None

# ------------------------------------------------------------------------------------------------- the operating point


class OperatingPoint(NamedTuple):
    """Where a call runs, with nothing left open. A tuple holds one value per image."""

    tokens: Integers
    width: Integers
    depth: Integers
    attention: str
    exit_threshold: Threshold = None
    exit_after: int = 1
    exit_every: int = 1
    exit_temperatures: tuple[float, ...] | None = None  # one per block
    policy: tuple[str | Callable, ...] = ()  # what may still change it, image by image

    def probe_depths(self) -> range:
        """The depths, below the last, at which an image may exit."""
        return range(self.exit_after, 0 if self.exit_threshold is None else self.depth, self.exit_every)

    def per_image(self) -> dict[str, tuple[Any, ...]]:
        """The values that differ from image to image."""
        return {name: getattr(self, name) for name in PER_IMAGE_FIELDS if isinstance(getattr(self, name), tuple)}

    def of_image(self, index: int) -> "OperatingPoint":
        return self._replace(**{name: values[index] for name, values in self.per_image().items()})

    def check(self, config: AdaPerceiverConfig, images: int) -> None:
        """Raise if the model of `config` cannot run a batch of `images` here: a policy may return anything."""
        for name, values in self.per_image().items():
            if len(values) != images:
                raise ValueError(
                    f"`{name}` must be one value, or one per image of the batch of {images}, got {len(values)} values."
                )
        if self.policy:  # else every value was checked when the call was resolved
            for name in (*PER_IMAGE_FIELDS, "attention", "exit_after", "exit_every", "exit_temperatures"):
                values = getattr(self, name)
                for value in values if name in self.per_image() else [values] if values is not None else []:
                    check_field(name, value, config, f"{name} of the policy")


# ----------------------------------------------------------------------------------------- the defaults of a checkpoint


def _integer(highest: str | None = None) -> Callable:
    """Checks for an integer from 1 to the field `highest` of the model's config."""
    return lambda label, value, config: check_int(
        label, value, 1, getattr(config, highest) if highest and config is not None else None
    )


def _number(low: float, high: float | None = None) -> Callable:
    allowed = f"a number of at least {low}" if high is None else f"a number from {low} to {high}"

    def check(label: str, value: Any, config: AdaPerceiverConfig | None) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not value >= low or (high is not None and value > high):  # a NaN is not >= either
            raise ValueError(f"`{label}` must be {allowed}, got {value!r}.")
        return float(value)

    return check


def _attention(label: str, value: Any, config: AdaPerceiverConfig | None) -> str:
    if value not in ATTENTION_TYPES:
        raise ValueError(f"`{label}` must be one of {ATTENTION_TYPES}, got {value!r}.")
    return value


def _policy(label: str, value: Any, config: AdaPerceiverConfig | None) -> str:
    if value not in POLICIES:
        raise ValueError(f"`{label}` must be one of {POLICIES}, or a function in a call, got {value!r}.")
    if value == "router" and config is not None and config.router_ratio is None:
        raise ValueError(f"`{label}` must not be 'router' for a model without one (`config.router_ratio` is None).")
    return value


def _temperatures(label: str, value: Any, config: AdaPerceiverConfig | None) -> list[float]:
    values = value.tolist() if hasattr(value, "tolist") else value
    blocks = None if config is None else config.num_hidden_layers
    if not isinstance(values, (list, tuple)) or (blocks is not None and len(values) != blocks):
        raise ValueError(
            f"`{label}` must be a list of {blocks or 'as many'} numbers, one for each block, got {value!r}."
        )
    return [_number(1e-6)(f"{label}[{index}]", one, config) for index, one in enumerate(values)]


# Each takes the name for its errors, the value and the model's config (or None), and returns a plain number, list or string.
CHECKS: dict[str, Callable[[str, Any, AdaPerceiverConfig | None], Any]] = {
    "tokens": _integer(),
    "width": _integer("max_width"),
    "depth": _integer("num_hidden_layers"),
    "attention": _attention,
    "exit_threshold": _number(0, 1),
    "exit_after": _integer("num_hidden_layers"),
    "exit_every": _integer(),
    "exit_temperatures": _temperatures,
    "policy": _policy,
    "max_gflops": _number(0),
    "max_latency_ms": _number(0),
}


ADAPTIVE_KWARGS = sorted([*CHECKS, "adaptive_config"])  # what a call may say of where it runs
# What transformers may pass to a vision model; the other `TransformersKwargs` (positions, packing) have no meaning here.
CALL_KWARGS = (
    "interpolate_pos_encoding",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "use_cache",
)


def split_kwargs(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The adaptive arguments of a call, and those of transformers; all others are refused."""
    known = (*ADAPTIVE_KWARGS, "operating_point")
    unknown = [name for name in kwargs if name not in known and name not in CALL_KWARGS]
    if unknown:
        raise TypeError(
            f"Unknown argument{'s' * (len(unknown) > 1)} {', '.join(f'`{name}`' for name in unknown)}; the adaptive "
            f"ones are {', '.join(ADAPTIVE_KWARGS)}."
        )
    adaptive = {name: value for name, value in kwargs.items() if name in known and value is not None}
    return adaptive, {name: value for name, value in kwargs.items() if name in CALL_KWARGS}


def check_field(name: str, value: Any, config: AdaPerceiverConfig | None = None, label: str | None = None) -> Any:
    """The value of a field of `AdaptiveConfig` as a plain number, list or string, if it is one that can be."""
    if getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        value = value.item()
    return value if value is False and name in SWITCHES else CHECKS[name](label or name, value, config)


def optional_file(folder_or_hub_id: str | os.PathLike, name: str, **hub_kwargs) -> str | None:
    """The path of a file that a checkpoint may have beside its weights, or None if it has not."""
    return cached_file(
        folder_or_hub_id,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **hub_kwargs,
    )


def write_json(values: dict[str, Any], path: str | os.PathLike) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=2)
        file.write("\n")


def read_json(dataclass_type: type, path: str | os.PathLike) -> Any:
    """A dataclass from the JSON file of its fields; the error names the file and what is wrong with it."""
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
        _check_names(dataclass_type.__name__, values, [field.name for field in fields(dataclass_type)])
        return dataclass_type(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a valid {dataclass_type.__name__}: {error}") from error


def _check_names(owner: str, given: Mapping[str, Any], allowed: list[str]) -> None:
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise ValueError(f"{owner} has no {', '.join(f'`{name}`' for name in unknown)}; it has {', '.join(allowed)}.")


@dataclass
class BesideWeights:
    """A dataclass in a JSON file beside the weights of a checkpoint."""

    file_name: ClassVar[str]

    def __post_init__(self) -> None:
        """Check the fields."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, repo_id: str | None = None, **push_kwargs
    ) -> None:
        """
        Write the file. `repo_id` defaults to the name of the folder; `push_kwargs` are `private` and those of `upload_file`, such as
        `token`, `revision` and `commit_message`.
        """
        self.__post_init__()  # checks fields that may have been set since
        os.makedirs(save_directory, exist_ok=True)
        path = os.path.join(save_directory, self.file_name)
        write_json(self.to_dict(), path)
        if push_to_hub:
            repo_id = repo_id or os.path.basename(os.path.abspath(save_directory))
            private, token = push_kwargs.pop("private", None), push_kwargs.get("token")
            repo_id = hf_api().create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
            hf_api().upload_file(path_or_fileobj=path, path_in_repo=self.file_name, repo_id=repo_id, **push_kwargs)

    def push_to_hub(self, repo_id: str, **push_kwargs) -> None:
        """Upload the file; the arguments are those of `save_pretrained`."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, push_to_hub=True, repo_id=repo_id, **push_kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **hub_kwargs) -> Any:
        """
        Load it from a folder or the hub; None for a checkpoint without one. `hub_kwargs` (`revision`, `token`, ...) are
        those of `cached_file`.
        """
        path = optional_file(pretrained_model_name_or_path, cls.file_name, **hub_kwargs)
        return None if path is None else read_json(cls, path)


@dataclass
class AdaptiveConfig(BesideWeights):
    r"""
    The operating point of an AdaPerceiver: what `GenerationConfig` is to `generate`.

    It lives at `model.adaptive_config` and in `adaptive_config.json` beside the weights. Arguments of a call win over an
    `adaptive_config=` of that call, which wins over the model's own. A field that is `None` everywhere means the full
    model. In a call, `tokens`, `width`, `depth` and `exit_threshold` may also be lists or tensors, one value per image.

    Args:
        tokens (`int`, *optional*):
            Number of latents, 1 or more. Trained counts are `config.token_granularities`; others run as well.
        width (`int`, *optional*):
            Width of the FFNs, 1 to `config.max_width`. Trained widths are `config.widths`; others run as well.
        depth (`int`, *optional*):
            Number of blocks, 1 to `config.num_hidden_layers`.
        attention (`str`, *optional*):
            `"block"` or `"bidirectional"`; defaults to `config.attention_type`.
        exit_threshold (`float`, *optional*):
            Early exit: an image exits as soon as its largest class probability reaches this, 0 to 1. `depth` bounds it.
            `False` turns off what a checkpoint turns on.
        exit_after, exit_every (`int`, *optional*, default to 1):
            Where images may exit: after block `exit_after`, and after every `exit_every`-th block from there.
        exit_temperatures (`list[float]`, *optional*):
            One for each block, by which the logits are divided before an image's confidence is taken there; by default,
            or with `False`, 1.
        policy (`str`, *optional*):
            `"router"`: the model's router chooses the tokens of each image, up to `tokens`. `"fixed"` takes them as they
            are, as without a policy. A call may give a function as well, or a list; see `policy_adaperceiver.py`.
        max_gflops (`float`, *optional*):
            Budget per image. Picks those of tokens, width and depth that are not given; see `model.operating_point`.
            `False` turns it off.
        max_latency_ms (`float`, *optional*):
            Budget per call, by the profile that `model.profile()` measured on this machine. `False` turns it off.
    """

    tokens: int | None = None
    width: int | None = None
    depth: int | None = None
    attention: str | None = None
    exit_threshold: float | bool | None = None
    exit_after: int | None = None
    exit_every: int | None = None
    exit_temperatures: list[float] | bool | None = None
    policy: str | None = None
    max_gflops: float | bool | None = None
    max_latency_ms: float | bool | None = None

    file_name = "adaptive_config.json"

    def __post_init__(self):
        self.validate()

    def validate(self, config: AdaPerceiverConfig | None = None) -> None:
        """Raise on values that no model (or not the model of `config`) can run at."""
        for name, value in self.to_dict().items():
            setattr(self, name, check_field(name, value, config))

    def update(self, other: "AdaptiveConfig | None" = None, **kwargs) -> "AdaptiveConfig":
        """A copy in which what is set in `other`, and what is not `None` in `kwargs`, replaces the fields of that name."""
        _check_names(type(self).__name__, kwargs, [field.name for field in fields(self)])
        if other is not None:
            check_is_adaptive_config(other)
        changes = {name: value for name, value in kwargs.items() if value is not None}
        return type(self)(**{**self.to_dict(), **({} if other is None else other.to_dict()), **changes})

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set."""
        return {name: copy.copy(value) for name, value in vars(self).items() if value is not None}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **hub_kwargs) -> "AdaptiveConfig":
        """As `BesideWeights`; a checkpoint without one runs at the full model: the fields are all `None` then."""
        return super().from_pretrained(pretrained_model_name_or_path, **hub_kwargs) or cls()


def check_is_adaptive_config(value: Any) -> None:
    """By name: remote code brings copies of the class."""
    if AdaptiveConfig.__name__ not in {base.__name__ for base in type(value).__mro__}:
        raise TypeError(f"`adaptive_config` must be an AdaptiveConfig, got {value!r} of type {type(value).__name__}.")


def without_saved(kwargs: Mapping[str, Any], **off: Any) -> dict[str, Any]:
    """The arguments of a call, with the fields `off` turned off where the checkpoint alone may turn them on."""
    if kwargs.get("operating_point") is not None:
        return dict(kwargs)
    asked = kwargs.get("adaptive_config")
    named = {name for name in off if kwargs.get(name) is not None or getattr(asked, name, None) is not None}
    return {**kwargs, **{name: value for name, value in off.items() if name not in named}}


def with_adaptive_arguments(forward: Callable) -> Callable:
    """Add the adaptive arguments to the docstring of a model's `forward`."""
    fields = (AdaptiveConfig.__doc__ or "").partition("Args:\n")[2].rstrip()
    step = ONCE_FOR_ALL_ARGUMENT if "once_for_all" in inspect.signature(forward).parameters else ""
    forward.__doc__ = f"{(forward.__doc__ or '').rstrip()}\n\n{fields}{step}{OTHER_ARGUMENTS}"
    return forward


ONCE_FOR_ALL_ARGUMENT = """
        once_for_all (`OnceForAll`, *optional*):
            What a once-for-all step trains, instead of a random draw by `config.adaptive_axes`."""
OTHER_ARGUMENTS = """
        adaptive_config (`AdaptiveConfig`, *optional*):
            Values for those of the arguments above that are not given.
        operating_point (`OperatingPoint`, *optional*):
            A resolved call, of `model.operating_point`, in place of them.
        interpolate_pos_encoding (`bool`, *optional*):
            The position embedding is resampled whenever the grid of the images asks for it; `False` refuses to.
        """


# ------------------------------------------------------------------------------------------- what points score and take


@dataclass
class AccuracyTable(BesideWeights):
    """What a checkpoint scores at its operating points, measured on some data; `accuracy_table.json` beside the weights."""

    metric: str  # e.g. "top-1 accuracy, ImageNet-1k validation"
    points: list[dict[str, Any]]  # tokens, width, depth, value
    higher_is_better: bool = True
    dataset: str | None = None  # what it was measured on, for the model card: the name or hub id
    split: str | None = None
    file_name = "accuracy_table.json"

    def __post_init__(self):
        for point in self.points:
            missing = {*AXES, "value"} - point.keys()
            if missing:
                raise ValueError(f"`points` must have tokens, width, depth and value, got {point}.")
            if not isinstance(point["value"], Real) or not math.isfinite(point["value"]):  # a NaN outranks any number
                raise ValueError(f"`points` must have finite numbers as values, got {point}.")

    def best_first(self) -> list[dict[str, int]]:
        """The operating points, without their values, best first; the cheaper first where two score the same."""
        ordered = sorted(self.points, key=lambda p: (p["depth"] * p["tokens"], p["width"]))
        ordered.sort(key=lambda p: p["value"], reverse=self.higher_is_better)
        return [{name: point[name] for name in AXES} for point in ordered]


@dataclass
class LatencyProfile:
    """
    Milliseconds per call, as measured on one machine. Between two measured depths they are interpolated: every block takes
    the same time.
    """

    machine: str
    device: str
    dtype: str
    threads: int
    batch_size: int
    image_size: tuple[int, int]
    points: list[dict[str, Any]]  # tokens, width, depth, ms

    def by_depth(self, tokens: int, width: int) -> dict[int, float]:
        return dict(sorted((p["depth"], p["ms"]) for p in self.points if (p["tokens"], p["width"]) == (tokens, width)))

    def covers(self, tokens: int, width: int, depth: int) -> bool:
        """Whether a point was measured, or one above and one below it in depth."""
        depths = self.by_depth(tokens, width)
        return bool(depths) and min(depths) <= depth <= max(depths)

    def milliseconds(self, tokens: int, width: int, depth: int) -> float:
        measured = self.by_depth(tokens, width)
        if not self.covers(tokens, width, depth):
            have = sorted({(p["tokens"], p["width"]) for p in self.points})
            raise ValueError(
                f"The latency profile has no tokens={tokens}, width={width}, depth={depth}; it has (tokens, width) in {have}"
                f"{f' and depths {min(measured)} to {max(measured)}' if measured else ''}."
            )
        return float(np.interp(depth, list(measured), list(measured.values())))

    def save(self, path: str | os.PathLike) -> None:
        write_json(asdict(self), path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "LatencyProfile":
        profile = read_json(cls, path)
        profile.image_size = tuple(profile.image_size)
        return profile


def machine_name() -> str:
    """The model of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@torch.no_grad()
def interleaved(
    runs: Mapping[Hashable, Callable[[], Any]], repeats: int, seconds: float = 0.0, name: str | None = None
) -> dict[Hashable, float]:
    """
    Median milliseconds of each run; they take turns, so that a busy moment of the machine hits them alike.

    At least `repeats` rounds, and more until `seconds` have passed. `name` is that of the progress bar, if there is one.
    """
    times: dict[Hashable, list[float]] = {key: [] for key in runs}
    with tqdm(total=repeats, desc=name, disable=name is None, leave=False) as progress:
        for run in runs.values():
            run()  # the first call is slower
        begin, rounds = time.perf_counter(), 0
        while rounds < repeats or time.perf_counter() - begin < seconds:
            for key, run in runs.items():
                start = time.perf_counter()
                run()
                if torch.accelerator.is_available():
                    torch.accelerator.synchronize()
                times[key].append(1e3 * (time.perf_counter() - start))
            rounds += 1
            progress.update()
    return {key: statistics.median(values) for key, values in times.items()}


def owned_by_base_model(name: str, doc: str) -> Any:
    """An attribute that goes with the weights: the base model keeps it, so that every head reaches it."""
    return property(
        lambda self: getattr(self.base_model, name), lambda self, value: setattr(self.base_model, name, value), doc=doc
    )


class AdaptiveMixin(Base):
    """How a model resolves where a call runs, and what it says about its costs."""

    exits_early = False  # whether it knows what confidence is

    accuracy_table: AccuracyTable | None = owned_by_base_model(
        "_accuracy_table",
        "What the model scores at its operating points, if that was measured; budgets are spent by it.",
    )
    latency_profile: LatencyProfile | None = owned_by_base_model(
        "_latency_profile", "What the operating points take on this machine, by `profile`; never saved with the model."
    )

    @property
    def adaptive_config(self) -> AdaptiveConfig:
        """Where the model runs when a call does not say. The base model owns it, so that every head reaches it."""
        return self.base_model._adaptive_config

    @adaptive_config.setter
    def adaptive_config(self, adaptive_config: AdaptiveConfig) -> None:
        check_is_adaptive_config(adaptive_config)
        adaptive_config.validate(self.config)
        self.base_model._adaptive_config = adaptive_config

    def resolve(
        self, pixel_values: torch.Tensor | None, kwargs: Mapping[str, Any]
    ) -> tuple[OperatingPoint, dict[str, Any]]:
        """Where a call runs, at its `operating_point` if it is resolved already, and its arguments for transformers."""
        adaptive, others = split_kwargs(kwargs)
        if self.base_model.captured(others):
            adaptive = without_saved(adaptive, **ALIKE)
        if self.training:
            adaptive = without_saved(adaptive, max_latency_ms=False)
        operating_point = adaptive.pop("operating_point", None)
        if operating_point is not None:
            if adaptive:
                raise TypeError(f"`operating_point` leaves nothing open, got {', '.join(adaptive)} beside it.")
            return operating_point, others
        if isinstance(pixel_values, torch.Tensor) and pixel_values.ndim == 4:  # else the embeddings say what is wrong
            batch_size, _, *image_size = pixel_values.shape
            adaptive |= {"batch_size": batch_size, "image_size": tuple(image_size)}
        return self.operating_point(**adaptive), others

    def operating_point(
        self,
        image_size: tuple[int, int] | None = None,
        batch_size: int = 1,
        adaptive_config: AdaptiveConfig | None = None,
        **kwargs,
    ) -> OperatingPoint:
        """
        Where a call with these arguments runs: they win over `adaptive_config`, which wins over the model's own.

        A budget (`max_gflops` per image, `max_latency_ms` per call) picks the best affordable point of the trained grid,
        tokens, width and depth that are given left as they are. Best is what scores most in `accuracy_table`; without
        one, the deepest, among those the widest, among those the one with most tokens: tokens are given up first, then
        width, and depth last.
        """
        config, own = self.config, self.adaptive_config
        per_image: dict[str, tuple[Any, ...]] = {}
        given = {name: value for name, value in kwargs.items() if value is not None}
        for name in PER_IMAGE_FIELDS:
            values: Any = given.get(name)
            values = values.tolist() if hasattr(values, "tolist") else values  # tensors and arrays
            if isinstance(values, (list, tuple)):
                checked = (check_field(name, one, config, f"{name}[{index}]") for index, one in enumerate(values))
                per_image[name] = tuple(checked)
                del given[name]
        policies = given.pop("policy", None)
        if not self.exits_early:  # what a checkpoint's classifier does by default
            own = own.update(exit_threshold=False)
        chosen = own.update(adaptive_config, **given)
        chosen.validate(config)

        policies = chosen.policy if policies is None else policies
        policies = policies if isinstance(policies, (list, tuple)) else [policies or "fixed"]
        policies = [one if callable(one) else check_field("policy", one, config) for one in policies]
        full = {"tokens": config.max_latent_tokens, "width": config.max_width, "depth": config.num_hidden_layers}
        values = {name: value for name, value in chosen.to_dict().items() if value is not False}
        values = {**full, "attention": config.attention_type, **values, **per_image}
        if "exit_temperatures" in values:
            values["exit_temperatures"] = tuple(values["exit_temperatures"])
        values["policy"] = tuple(one for one in policies if one != "fixed")
        point = OperatingPoint(**{name: value for name, value in values.items() if name in OperatingPoint._fields})

        # A point that the call spells out wins over a saved budget.
        spelled_out = all(kwargs.get(name) is not None for name in AXES)
        budgets = {name: values[name] for name in BUDGETS if name in values and (name in given or not spelled_out)}
        if not budgets:
            return point
        fixed = [name for name in AXES if name in per_image or getattr(chosen, name) is not None]
        largest = {name: max(per_image.get(name, [getattr(point, name)])) for name in fixed}
        best = self._best_within(budgets, point, largest, image_size, batch_size)
        changes: dict[str, Any] = {name: value for name, value in best.items() if name not in fixed}
        return point._replace(**changes)

    def _best_within(
        self,
        budgets: dict[str, float],
        point: OperatingPoint,
        fixed: dict[str, int],
        image_size: tuple[int, int] | None,
        batch_size: int,
    ) -> dict[str, int]:
        """The best of the points of the trained grid that have the values of `fixed` and keep within every budget."""
        if self.accuracy_table is not None:
            grid = [candidate for candidate in self.accuracy_table.best_first() if fixed.items() <= candidate.items()]
        else:
            config = self.config
            trained = (config.token_granularities, config.widths, range(1, config.num_hidden_layers + 1))
            choices = ([fixed[name]] if name in fixed else values for name, values in zip(AXES, trained))
            grid = [dict(zip(AXES, values)) for values in product(*choices)]
            grid.sort(key=lambda one: (one["depth"], one["width"], one["tokens"]), reverse=True)

        if "max_latency_ms" in budgets:
            # What was not measured is not affordable; the profile names it where nothing was.
            profile = self._profile_for(image_size, batch_size)
            grid = [candidate for candidate in grid if profile.covers(**candidate)] or grid[-1:]

        def cost(budget: str, candidate: dict[str, Any]) -> float:
            if budget == "max_latency_ms":
                return profile.milliseconds(**candidate)
            # of one image, whatever the batch
            return self.flops_at(point._replace(**candidate), image_size, batch_size=1)["total"] / 1e9

        for candidate in grid:
            if all(cost(name, candidate) <= budget for name, budget in budgets.items()):
                return candidate
        for name, budget in budgets.items():
            if not grid:
                raise ValueError(
                    f"`{name}` has nothing to choose from: the accuracy table has no such operating point."
                )
            least, cheapest = min(((cost(name, one), one) for one in grid), key=lambda pair: pair[0])
            if least > budget:
                raise ValueError(
                    f"`{name}` must be at least {least:.4g}, the cost of the cheapest operating point "
                    f"({', '.join(f'{axis}={value}' for axis, value in cheapest.items())}), got {budget:g}."
                )
        raise ValueError(f"No operating point keeps within {budgets} at once.")

    def _profile_for(self, image_size: tuple[int, int] | None, batch_size: int) -> LatencyProfile:
        profile = self.latency_profile
        if profile is None:
            raise ValueError(
                "`max_latency_ms` needs a latency profile of this machine: call `model.profile()` first, or turn the budget off "
                "with `max_latency_ms=False`."
            )
        conditions = self._conditions(image_size, batch_size)
        for name, here in conditions.items():
            if getattr(profile, name) != here:
                raise ValueError(
                    f"`max_latency_ms` needs a profile for {name} {here!r}, but the one at hand is for "
                    f"{getattr(profile, name)!r}: call `model.profile({batch_size}, {conditions['image_size']})` here."
                )
        return profile

    def _conditions(self, image_size: tuple[int, int] | None, batch_size: int) -> dict[str, Any]:
        """What a latency profile holds for."""
        parameter, side = next(self.parameters()), self.config.image_size
        return {
            "machine": machine_name(),
            "device": str(parameter.device),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "batch_size": batch_size,
            "image_size": tuple(image_size or (side, side)),
        }

    def profile(
        self,
        batch_size: int = 1,
        image_size: tuple[int, int] | None = None,
        depths: Sequence[int] | None = None,
        repeats: int = 5,
        progress: bool = True,
    ) -> LatencyProfile:
        """
        Measure how long the trained tokens x widths take on this machine, and keep the result in `latency_profile`.

        By default at the first, the middle and the last depth; others are interpolated. `save` it to load it again.
        A model that exits early or routes by default is timed as if no image exited or got fewer tokens: a budget must
        hold for any image.
        """
        config, parameter = self.config, next(self.parameters())
        image_size, last = self._checked_size(image_size), config.num_hidden_layers
        check_int("batch_size", batch_size, low=1)
        check_int("repeats", repeats, low=1)
        chosen = [1, (1 + last) // 2, last] if depths is None else depths
        depths = sorted({check_int("depths", depth, 1, last) for depth in chosen})
        if not depths:
            raise ValueError("`depths` must not be empty.")
        pixel_values = torch.randn(
            batch_size, config.num_channels, *image_size, device=parameter.device, dtype=parameter.dtype
        )
        router = self.base_model.router

        def run_router(input_tokens: torch.Tensor, point: OperatingPoint) -> OperatingPoint:
            router(input_tokens, point)
            return point

        runs: dict[Hashable, Callable] = {}
        for values in product(config.token_granularities, config.widths, depths):
            point = self.operating_point(**dict(zip(AXES, values)))
            if point.exit_threshold is not None:
                point = point._replace(exit_threshold=float("inf"))
            point = point._replace(policy=tuple(run_router if one == "router" else one for one in point.policy))
            runs[values] = partial(self.__call__, pixel_values, operating_point=point)
        times = interleaved(runs, repeats, name="profile" if progress else None)
        points = [{**dict(zip(AXES, values)), "ms": ms} for values, ms in times.items()]
        self.latency_profile = LatencyProfile(**self._conditions(image_size, batch_size), points=points)
        return self.latency_profile

    def flops(self, image_size: tuple[int, int] | None = None, batch_size: int = 1, **kwargs) -> dict[str, int]:
        """
        FLOPs of a call (2 per multiply-add), by component and in `total`; nothing runs. With `exit_threshold`, those of
        images that never exit early, probes included; with a router, of images that get all of `tokens`.
        """
        check_int("batch_size", batch_size, low=1)
        if self.latency_profile is None:  # what a call would wait for says nothing of what it costs
            kwargs = without_saved(kwargs, max_latency_ms=False)
        point = self.operating_point(image_size, batch_size, **kwargs)
        for name, values in point.per_image().items():
            raise ValueError(f"`{name}` must be one value for `flops`, got {list(values)}: ask for each image.")
        return self.flops_at(point, image_size, batch_size)

    def _checked_size(self, image_size: tuple[int, int] | None) -> tuple[int, int]:
        """Height and width, those of the config by default, if they make whole patches."""
        patch, side = self.config.patch_size, self.config.image_size
        rows, columns = (side, side) if image_size is None else image_size
        if min(rows, columns) < patch or rows % patch or columns % patch:
            raise ValueError(f"`image_size` must be multiples of the patch size {patch}, got {(rows, columns)}.")
        return rows, columns

    def flops_at(self, point: OperatingPoint, image_size: tuple[int, int] | None, batch_size: int) -> dict[str, int]:
        patches = math.prod(side // self.config.patch_size for side in self._checked_size(image_size))
        components = self.base_model.encoder_flops(point, patches, batch_size)
        components |= self.head_flops(point, patches, batch_size)
        return {**components, "total": sum(components.values())}

    def head_flops(self, point: OperatingPoint, patches: int, images: int) -> dict[str, int]:
        """FLOPs of what stands on the base model, by component."""
        return {}


__all__ = ["AccuracyTable", "AdaptiveConfig", "LatencyProfile", "OperatingPoint"]
