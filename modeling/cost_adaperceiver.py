"""
What an operating point costs: floating-point operations from arithmetic, milliseconds from a measurement.

FLOPs are those of linear layers, convolutions and attention products, two per multiply-add, each counted once.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from tqdm.auto import tqdm

from .configuration_adaperceiver import (
    AXES,
    AdaPerceiverConfig,
    AdaptiveConfig,
    OperatingPoint,
    optional_file,
    read_json,
    write_json,
)
from .policy_adaperceiver import router_flops


ACCURACY_TABLE_NAME = "accuracy_table.json"
BUDGETS = ("max_gflops", "max_latency_ms")


def ffn_flops(config: AdaPerceiverConfig, rows: int, units: int, out_features: int, gated: bool = False) -> int:
    return 2 * rows * units * (config.hidden_size * (2 if gated else 1) + out_features)


def encoder_flops(
    config: AdaPerceiverConfig, point: OperatingPoint, output_tokens: str, patches: int, images: int
) -> dict[str, int]:
    """FLOPs of the base model, without a head, for `images` images of `patches` patches each, by component."""
    d, tokens = config.hidden_size, point.tokens
    full_units = config.ffn_hidden_size(d)
    projections = 2 * d * d  # of one token by one of q, k, v, o

    embeddings = images * patches * patch_embedding_flops(config)
    if config.use_embed_ffn:
        embeddings += ffn_flops(config, images * patches, full_units, d)

    # The latents' query is one vector, turned to each position: projected once.
    read = projections + images * (2 * patches + tokens) * projections + images * 4 * tokens * patches * d

    groups = config.token_groups(tokens, point.attention)
    seen = sum((stop - start) * stop for start, stop in groups)  # pairs of latents that see each other
    units = config.ffn_hidden_size(point.width)
    components = {
        "embeddings": embeddings,
        "read": read,
        "attention": point.depth * images * (4 * tokens * projections + 4 * seen * d),
        "ffn": point.depth * ffn_flops(config, images * tokens, units, d, gated=config.use_swiglu_ffn),
    }
    if "router" in point.policy:
        components["router"] = images * router_flops(config)
    if output_tokens in ("class", "both"):
        fold = projections + tokens * projections + 2 * tokens * d * config.qkv_bias  # for all images together
        components["class_readout"] = fold + images * class_readout_flops(config, tokens)
        components["probes"] = len(point.probe_depths()) * images * class_readout_flops(config, tokens)
    if output_tokens in ("dense", "both"):
        components["dense_readout"] = images * dense_readout_flops(config, tokens, patches)
    return components


def patch_embedding_flops(config: AdaPerceiverConfig) -> int:
    """Pixels to one patch: one convolution, or the stem, whose layers see more positions the earlier they come."""
    if config.stem_layers is None:
        return 2 * config.num_channels * config.patch_size**2 * config.hidden_size
    flops, channels, side = 0, config.num_channels, config.patch_size
    for out_channels, stride, *inverted in config.stem_layers:
        before, side = side, side // stride
        if not inverted or inverted[1] == 0:
            kernel = inverted[0] if inverted else 3
            flops += 2 * side**2 * kernel**2 * channels * out_channels
        else:
            kernel, expansion = inverted
            hidden = channels * expansion
            expand = before**2 * channels * hidden if expansion > 1 else 0
            flops += 2 * (expand + side**2 * hidden * (kernel**2 + out_channels))
        channels = out_channels
    return flops + 2 * channels * config.hidden_size


def dense_readout_flops(config: AdaPerceiverConfig, tokens: int, patches: int) -> int:
    """One dense readout of one image: projections of output tokens, queries and outputs; of keys and values; attention."""
    rows = 3 * patches + 2 * tokens
    return 2 * rows * config.hidden_size**2 + 4 * patches * tokens * config.hidden_size


def class_readout_flops(config: AdaPerceiverConfig, tokens: int) -> int:
    """One folded readout of one image: scores and pooling for every head, then the value and output projections."""
    return 4 * config.num_attention_heads * tokens * config.hidden_size + 4 * config.hidden_size**2


@dataclass
class AccuracyTable:
    """What a checkpoint scores at its operating points, measured on some data; `accuracy_table.json` beside the weights."""

    metric: str  # e.g. "top-1 accuracy, ImageNet-1k validation"
    points: list[dict[str, Any]]  # tokens, width, depth, value
    higher_is_better: bool = True

    def __post_init__(self):
        for point in self.points:
            missing = {"tokens", "width", "depth", "value"} - point.keys()
            if missing:
                raise ValueError(f"`points` must have tokens, width, depth and value, got {point}.")

    def best_first(self) -> list[dict[str, int]]:
        """The operating points, without their values, from the best to the worst; the cheaper first where two agree."""
        ordered = sorted(self.points, key=lambda p: (p["depth"] * p["tokens"], p["width"]))
        ordered.sort(key=lambda p: p["value"], reverse=self.higher_is_better)
        return [{name: point[name] for name in ("tokens", "width", "depth")} for point in ordered]

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        os.makedirs(save_directory, exist_ok=True)
        write_json(asdict(self), os.path.join(save_directory, ACCURACY_TABLE_NAME))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **hub_kwargs) -> "AccuracyTable | None":
        """Load it from a folder or the hub; None for a checkpoint without one."""
        path = optional_file(pretrained_model_name_or_path, ACCURACY_TABLE_NAME, **hub_kwargs)
        return None if path is None else read_json(cls, path)


@dataclass
class LatencyProfile:
    """
    Milliseconds per call, as measured on one machine. Between two measured depths they are interpolated: every block costs
    the same.
    """

    machine: str
    device: str
    dtype: str
    threads: int
    batch_size: int
    image_size: tuple[int, int]
    points: list[dict[str, Any]]  # tokens, width, depth, ms

    def milliseconds(self, tokens: int, width: int, depth: int) -> float:
        measured = sorted((p["depth"], p["ms"]) for p in self.points if (p["tokens"], p["width"]) == (tokens, width))
        depths = [measured_depth for measured_depth, _ in measured]
        if not depths or not depths[0] <= depth <= depths[-1]:
            have = sorted({(p["tokens"], p["width"]) for p in self.points})
            raise ValueError(
                f"The latency profile has no tokens={tokens}, width={width}, depth={depth}; it has (tokens, width) in {have}"
                f"{f' and depths {depths[0]} to {depths[-1]}' if depths else ''}."
            )
        for (low, low_ms), (high, high_ms) in zip(measured, measured[1:] or measured):
            if low <= depth <= high:
                return low_ms + (high_ms - low_ms) * (depth - low) / max(high - low, 1)
        return measured[0][1]

    def save(self, path: str | os.PathLike) -> None:
        write_json(asdict(self), path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "LatencyProfile":
        profile = read_json(cls, path)
        profile.image_size = tuple(profile.image_size)
        return profile


def first_affordable(
    points: Sequence[dict[str, int]], budgets: dict[str, float], cost: Callable[[str, dict[str, int]], float]
) -> dict[str, int]:
    """The first of `points` whose `cost(budget name, point)` keeps within every budget; they come best first."""
    for point in points:
        if all(cost(name, point) <= budget for name, budget in budgets.items()):
            return point
    for name, budget in budgets.items():
        if not points:
            raise ValueError(f"`{name}` has nothing to choose from: the accuracy table has no such operating point.")
        cheapest = min(points, key=lambda point: cost(name, point))
        if cost(name, cheapest) > budget:
            raise ValueError(
                f"`{name}` must be at least {cost(name, cheapest):.4g}, the cost of the cheapest operating point "
                f"({', '.join(f'{axis}={value}' for axis, value in cheapest.items())}), got {budget:g}."
            )
    raise ValueError(f"No operating point keeps within {budgets} at once.")


@torch.no_grad()
def measure_latency(
    model: torch.nn.Module,
    batch_size: int,
    image_size: tuple[int, int],
    depths: Sequence[int],
    repeats: int,
    progress: bool,
) -> LatencyProfile:
    """Time the model's trained tokens x widths at `depths`; the median of `repeats` runs after one that is not timed."""
    config = model.config
    parameter = next(model.parameters())
    pixel_values = torch.randn(
        batch_size, config.num_channels, *image_size, device=parameter.device, dtype=parameter.dtype
    )
    grid = [(t, w, d) for t in config.token_granularities for w in config.widths for d in sorted(set(depths))]
    # A model that exits early or routes by default is timed as if nobody left or got fewer tokens: a budget must hold for any
    # image.
    exit_threshold = None if model.adaptive_config.exit_threshold is None else 1.0
    router = model.base_model.router if model.adaptive_config.policy == "router" else None
    policy = "fixed" if router is None else lambda input_tokens, point: (router(input_tokens, point), point)[1]
    points = []
    for tokens, width, depth in tqdm(grid, desc="profile", unit="point", disable=not progress):
        point = {"tokens": tokens, "width": width, "depth": depth}
        run = partial(model, pixel_values, **point, exit_threshold=exit_threshold, policy=policy)
        points.append({**point, "ms": milliseconds(run, repeats)})
    return LatencyProfile(
        machine=platform.processor() or platform.machine(),
        device=str(parameter.device),
        dtype=str(parameter.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        batch_size=batch_size,
        image_size=tuple(image_size),
        points=points,
    )


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    """Median time of `run()`, after one run that is not timed."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def owned_by_base_model(name: str, doc: str) -> property:
    """An attribute that goes with the weights: the base model keeps it, so that every head reaches it."""
    return property(
        lambda self: getattr(self.base_model, name), lambda self, value: setattr(self.base_model, name, value), doc=doc
    )


class CostMixin:
    """What a model says about its costs, and how it chooses an operating point by them."""

    accuracy_table: AccuracyTable | None = owned_by_base_model(
        "_accuracy_table",
        "What the model scores at its operating points, if that was measured; budgets are spent by it.",
    )
    latency_profile: LatencyProfile | None = owned_by_base_model(
        "_latency_profile", "What the operating points take on this machine, by `profile`; never saved with the model."
    )

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
        chosen = self.adaptive_config
        if adaptive_config is not None:
            chosen = chosen.update(**adaptive_config.to_dict())
        budgets = {name: kwargs.get(name) for name in BUDGETS}
        if any(kwargs.get(name) is None for name in AXES):  # a point that the call spells out wins over a saved budget
            budgets = {name: getattr(chosen, name) if value is None else value for name, value in budgets.items()}
        budgets = {name: value for name, value in budgets.items() if value is not None}
        if budgets:
            by_name = {name: value for name, value in kwargs.items() if name != "policy" or isinstance(value, str)}
            kwargs |= self._best_within(budgets, chosen.update(**by_name), image_size, batch_size)
        return chosen.operating_point(self.config, **kwargs)

    def _best_within(
        self,
        budgets: dict[str, float],
        chosen: AdaptiveConfig,
        image_size: tuple[int, int] | None,
        batch_size: int,
    ) -> dict[str, int]:
        """The best point of the trained grid, with tokens, width and depth of `chosen` as they are, that fits `budgets`."""
        chosen.validate(self.config)
        trained = (self.config.token_granularities, self.config.widths, range(1, self.config.num_hidden_layers + 1))
        fixed = {name: getattr(chosen, name) for name in AXES if getattr(chosen, name) is not None}
        if self.accuracy_table is not None:
            grid = [point for point in self.accuracy_table.best_first() if fixed.items() <= point.items()]
        else:
            choices = ([fixed[name]] if name in fixed else values for name, values in zip(AXES, trained))
            grid = [dict(zip(AXES, values)) for values in product(*choices)]
            grid.sort(key=lambda point: (point["depth"], point["width"], point["tokens"]), reverse=True)

        def cost(budget: str, point: dict[str, int]) -> float:
            if budget == "max_latency_ms":
                return self._profile_for(image_size, batch_size).milliseconds(**point)
            point = chosen.update(**point).operating_point(self.config)
            return self.flops_at(point, image_size, batch_size=1)["total"] / 1e9  # for one image, whatever the batch

        return first_affordable(grid, budgets, cost)

    def _profile_for(self, image_size: tuple[int, int] | None, batch_size: int) -> LatencyProfile:
        profile, side = self.latency_profile, self.config.image_size
        if profile is None:
            raise ValueError("`max_latency_ms` needs a latency profile of this machine: call `model.profile()` first.")
        asked = (batch_size, tuple(image_size or (side, side)))
        if asked != (profile.batch_size, profile.image_size):
            raise ValueError(
                f"`max_latency_ms` needs a profile for a batch of {asked[0]} images of size {asked[1]}, but the one at "
                f"hand is for {profile.batch_size} of size {profile.image_size}: call `model.profile()` with these."
            )
        return profile

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
        """
        last = self.config.num_hidden_layers
        self.latency_profile = measure_latency(
            self,
            batch_size,
            tuple(image_size or (self.config.image_size, self.config.image_size)),
            depths=(1, (1 + last) // 2, last) if depths is None else depths,
            repeats=repeats,
            progress=progress,
        )
        return self.latency_profile

    def flops(self, image_size: tuple[int, int] | None = None, batch_size: int = 1, **kwargs) -> dict[str, int]:
        """
        FLOPs of a call (2 per multiply-add), by component and in `total`; nothing runs. With `exit_threshold`, those of
        images that never leave early, probes included; with a router, of images that get all of `tokens`.
        """
        point = self.operating_point(image_size, batch_size, **kwargs)
        if point.per_image():
            raise ValueError(f"`{next(iter(point.per_image()))}` must be one value for `flops`: ask for each image.")
        return self.flops_at(point, image_size, batch_size)

    def flops_at(self, point: OperatingPoint, image_size: tuple[int, int] | None, batch_size: int) -> dict[str, int]:
        height, width = image_size or (self.config.image_size, self.config.image_size)
        patches = (height // self.config.patch_size) * (width // self.config.patch_size)
        components = encoder_flops(self.config, point, self.base_model.output_tokens, patches, batch_size)
        components |= self.head_flops(point, patches, batch_size)
        return {**components, "total": sum(components.values())}

    def head_flops(self, point: OperatingPoint, patches: int, images: int) -> dict[str, int]:
        """FLOPs of what stands on the base model, by component."""
        return {}
