"""
Speed and memory, as ratios: what is compared takes turns in one process, and medians are divided.

Each suite gives rows; `SUITES` names them.
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ViTConfig, ViTForImageClassification

from ..adaptive_adaperceiver import interleaved, machine_name
from ..configuration_adaperceiver import AdaPerceiverConfig
from ..modeling_adaperceiver import AdaPerceiverForDistillation, AdaPerceiverForImageClassification
from ..once_for_all_adaperceiver import OnceForAll
from .checkouts import exit_thresholds


class Scale(NamedTuple):
    """The models and batches that are measured."""

    full: dict[str, int]
    half: dict[str, int]  # half the width, for suites of many images
    vit: dict[str, int]
    batches: tuple[int, int]
    many: int  # images that differ in what they run
    step: int  # images of a training step
    judged: bool  # whether the targets apply


PAPER = Scale({}, {"hidden_size": 416, "num_attention_heads": 13, "feature_size": 640}, {}, (1, 8), 64, 6, True)
SIDES = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
TINY = {**SIDES, "max_latent_tokens": 16, "feature_size": 24}
SMOKE = Scale(TINY, TINY, {**SIDES, "intermediate_size": 64}, (1, 2), 8, 3, False)


@dataclass
class Row:
    """One ratio of two medians, and its target."""

    suite: str
    name: str
    ratio: float
    target: str | None  # e.g. "<= 1.05"
    milliseconds: dict[str, float]

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        relation, bound = self.target.split()
        return self.ratio <= float(bound) if relation == "<=" else self.ratio >= float(bound)

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}

    def __str__(self) -> str:
        verdict = {True: "met", False: "NOT met", None: ""}[self.met]
        return f"{self.suite:17} {self.ratio:6.3f}  {self.target or '':8} {verdict:8} {self.name}"


@dataclass
class Benchmark:
    scale: Scale = PAPER
    repeats: int = 5  # timed runs of each side of a comparison, at least
    seconds: float = 0  # go on with a comparison for this long
    progress: bool = True
    device: torch.device | str = "cpu"
    autocast: Callable[[], AbstractContextManager] = nullcontext

    def build(self, sizes: dict[str, int], *model_class: type) -> AdaPerceiverForImageClassification:
        return build(sizes, *model_class).to(self.device)

    def cast(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """A run of its own: what autocast keeps must not outlive a training step."""

        def cast_run() -> None:
            with self.autocast():
                run()

        return cast_run

    def times(self, runs: Mapping[Any, Callable[[], Any]], name: str, repeats: int | None = None) -> dict[Any, float]:
        runs = {key: self.cast(run) for key, run in runs.items()}
        return interleaved(runs, repeats or self.repeats, self.seconds, name if self.progress else None)

    def row(self, suite: str, name: str, ratio: float, target: str, times: dict[str, float] | None = None) -> Row:
        return Row(suite, name, ratio, target if self.scale.judged else None, times or {})

    @property
    def few(self) -> int:
        """Repeats of what takes long."""
        return max(3, self.repeats // 2) if self.scale.judged else self.repeats


def build(
    sizes: dict[str, int], model_class: type[AdaPerceiverForImageClassification] = AdaPerceiverForImageClassification
) -> AdaPerceiverForImageClassification:
    """A model whose latents matter: at init, blocks hardly change anything."""
    torch.manual_seed(0)
    model = model_class(AdaPerceiverConfig(num_labels=1000, **sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gamma", "latent_token", "output_token", "classifier.weight")):
                parameter.normal_(std=0.5)
    return model


def images(model: torch.nn.Module, batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, model.config.image_size, model.config.image_size).to(model.device)


def block_attention_suite(bench: Benchmark) -> list[Row]:
    """Block-masked attention against bidirectional attention of the same network: slicing must cost nothing."""
    model, rows = bench.build(bench.scale.full), []
    for batch in bench.scale.batches:
        pixel_values = images(model, batch)
        for tokens in model.config.token_granularities:
            runs = {
                kind: lambda kind=kind: model(pixel_values, tokens=tokens, attention=kind)  # noqa: B023
                for kind in ("block", "bidirectional")
            }
            times = bench.times(runs, f"block attention, batch {batch}, {tokens} tokens")
            ratio = times["block"] / times["bidirectional"]
            rows.append(bench.row("block_attention", f"batch {batch}, {tokens} tokens", ratio, "<= 1.05", times))
    return rows


def vit_suite(bench: Benchmark) -> list[Row]:
    """GFLOP/s and time against transformers' ViT, and peak memory beyond the weights against what it needs."""
    model, vit, rows = (
        bench.build(bench.scale.full),
        ViTForImageClassification(ViTConfig(num_labels=1000, **bench.scale.vit)).eval().to(bench.device),
        [],
    )
    config = vit.config
    patches, d, hidden = (config.image_size // config.patch_size) ** 2, config.hidden_size, config.intermediate_size
    length = patches + 1
    vit_flops = config.num_hidden_layers * (2 * length * (4 * d * d + 2 * d * hidden) + 4 * length**2 * d)
    vit_flops += 2 * patches * 3 * config.patch_size**2 * d
    for batch in bench.scale.batches:
        pixel_values = images(model, batch)
        runs = {"adaperceiver": lambda: model(pixel_values), "vit": lambda: vit(pixel_values)}  # noqa: B023
        times = bench.times(runs, f"ViT, batch {batch}")
        speed = {
            "adaperceiver": model.flops(batch_size=batch)["total"] / times["adaperceiver"] / 1e6,
            "vit": batch * vit_flops / times["vit"] / 1e6,
        }
        ratio = speed["adaperceiver"] / speed["vit"]
        name = f"GFLOP/s, batch {batch} ({speed['adaperceiver']:.0f} against {speed['vit']:.0f})"
        rows.append(bench.row("vit", name, ratio, ">= 0.9", times))
    tokens, width, one_image = model.config.max_latent_tokens // 8, model.config.max_width // 2, images(model, 1)
    runs = {
        "vit": lambda: vit(one_image),
        f"{tokens} tokens": lambda: model(one_image, tokens=tokens),
        f"width {width}": lambda: model(one_image, width=width),
    }
    times = bench.times(runs, "ViT, one image")
    for name, bound in zip(list(runs)[1:], ("<= 0.54", "<= 1.51")):
        rows.append(bench.row("vit", f"time, batch 1, {name}", times[name] / times["vit"], bound, times))
    memory = {
        name: peak_memory(network, bench.cast(lambda: network(pixel_values)), pixel_values)  # noqa: B023
        for name, network in (("adaperceiver", model), ("vit", vit))
    }
    # What lives at once in an FFN: its input, norm and output, the hidden layer before and after the activation, and in
    # AdaPerceiver the input tokens, which are part of the output.
    units = model.config.ffn_hidden_size(model.config.hidden_size)
    latents = model.config.max_latent_tokens
    needed = {
        "adaperceiver": latents * (4 * model.config.hidden_size + 2 * units),
        "vit": length * (3 * d + 2 * hidden),
    }
    ratio = (memory["adaperceiver"] / needed["adaperceiver"]) / (memory["vit"] / needed["vit"])
    megabytes = f"{memory['adaperceiver']:.0f} against {memory['vit']:.0f} MB"
    rows.append(
        bench.row(
            "vit",
            f"peak memory beyond the weights, by activation size, batch {batch} ({megabytes})",
            ratio,
            "<= 1.0",
            {},
        )
    )
    return rows


class LiveMemory(TorchDispatchMode):
    """Follows the bytes of all tensors that are made and not yet freed, and their peak."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.follow(tensor.untyped_storage())
        return result

    def follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self.known or size == 0:  # a view
            return
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, key, size)

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


@torch.no_grad()
def peak_memory(model: torch.nn.Module, run: Callable, *inputs: torch.Tensor) -> float:
    """Megabytes that `run` needs at its peak, beside the weights and the inputs."""
    with LiveMemory() as memory:
        memory.known = {tensor.untyped_storage().data_ptr() for tensor in [*inputs, *model.parameters()]}
        run()
    return memory.peak / 1e6


def axes_suite(bench: Benchmark) -> list[Row]:
    """Each axis must save time, not only FLOPs."""
    model = bench.build(bench.scale.full)
    pixel_values = images(model, bench.scale.batches[1])
    config = model.config
    tokens, width, depth = config.max_latent_tokens // 8, config.hidden_size // 2, config.num_hidden_layers // 3
    runs = {
        "full": lambda: model(pixel_values),
        "tokens": lambda: model(pixel_values, tokens=tokens),
        "width": lambda: model(pixel_values, width=width),
        "depth": lambda: model(pixel_values, depth=depth),
    }
    times = bench.times(runs, "tokens, width and depth")
    return [
        bench.row("axes", f"{tokens} tokens of {8 * tokens}", times["tokens"] / times["full"], "<= 0.22", times),
        bench.row("axes", f"width {width} of {2 * width}", times["width"] / times["full"], "<= 0.78", times),
        bench.row("axes", f"depth {depth} of {3 * depth}", times["depth"] / times["full"], "<= 0.38", times),
    ]


def probes_suite(bench: Benchmark) -> list[Row]:
    """Probes after every block, while no image exits early, against no probes."""
    model, rows = bench.build(bench.scale.full), []
    for batch in bench.scale.batches:
        pixel_values = images(model, batch)
        runs = {
            "probes": lambda: model(pixel_values, exit_threshold=1.0),  # noqa: B023
            "no probes": lambda: model(pixel_values),  # noqa: B023
        }
        times = bench.times(runs, f"probes, batch {batch}")
        rows.append(bench.row("probes", f"batch {batch}", times["probes"] / times["no probes"], "<= 1.03", times))
    return rows


@torch.no_grad()
def exit_suite(bench: Benchmark) -> list[Row]:
    """Early exit with a known pattern, against the time that the blocks of the images that still run should take."""
    model = bench.build(bench.scale.half)
    pixel_values = images(model, bench.scale.many)
    many, last = bench.scale.many, model.config.num_hidden_layers
    with bench.autocast():
        thresholds = exit_thresholds(
            torch.stack([outputs.logits.softmax(-1).amax(-1) for outputs in model.anytime(pixel_values)])
        )
        depths = model(pixel_values, exit_threshold=thresholds).exit_depth.tolist()
    runs = {
        "early exit": lambda: model(pixel_values, exit_threshold=thresholds),
        "all blocks": lambda: model(pixel_values),
        "one block": lambda: model(pixel_values, depth=1),
    }
    times = bench.times(runs, repeats=bench.few, name="early exit")
    block = (times["all blocks"] - times["one block"]) / (last - 1) / many  # of one image
    ideal = times["one block"] + block * (sum(depths) - many)
    name = f"batch {many}, exit depths {min(depths)} to {max(depths)}, {sum(depths) / many:.1f} on average, against the ideal"
    return [bench.row("early_exit", name, times["early exit"] / ideal, "<= 1.08", {**times, "ideal": ideal})]


def groups_suite(bench: Benchmark) -> list[Row]:
    """Tokens per image, against a separate call for each token count."""
    model = bench.build(bench.scale.half)
    pixel_values = images(model, bench.scale.many)
    granularities = model.config.token_granularities
    tokens = torch.tensor([granularities[index % len(granularities)] for index in range(bench.scale.many)])

    def apart() -> None:
        for count in granularities:
            model(pixel_values[(tokens == count).to(bench.device)], tokens=count)

    runs = {"together": lambda: model(pixel_values, tokens=tokens), "apart": apart}
    times = bench.times(runs, repeats=bench.few, name="tokens per image")
    return [
        bench.row(
            "tokens_per_image", f"batch {bench.scale.many}", times["together"] / times["apart"], "<= 1.10", times
        )
    ]


def grid_suite(bench: Benchmark) -> list[Row]:
    """Predictions at all token counts, widths and depths, against one pass at each width."""
    model = bench.build(bench.scale.half)
    pixel_values = images(model, bench.scale.batches[1])
    config = model.config
    runs = {
        "grid": lambda: [model.logits_grid(pixel_values, width=width) for width in config.widths],
        "passes": lambda: [model(pixel_values, width=width) for width in config.widths],
    }
    times = bench.times(runs, "grid")
    points = len(config.token_granularities) * len(config.widths) * config.num_hidden_layers
    return [
        bench.row(
            "grid",
            f"batch {len(pixel_values)}, {points} points, against one pass at each width",
            times["grid"] / times["passes"],
            "<= 1.15",
            times,
        )
    ]


def once_for_all_suite(bench: Benchmark) -> list[Row]:
    """A training step over all tokens, widths and depths, against one of the full model alone: forward and backward."""
    model = bench.build(bench.scale.half)
    pixel_values, labels = (
        images(model, bench.scale.step),
        torch.randint(0, 1000, (bench.scale.step,)).to(bench.device),
    )
    rows = step_rows(bench, model, "logits", ("<= 1.12", "<= 1.07"), pixel_values, labels=labels)
    model = bench.build(bench.scale.half, AdaPerceiverForDistillation)
    features = torch.randn(bench.scale.step, model.config.grid_size**2, model.config.feature_size).to(bench.device)
    name = f"{features.shape[1]} x {model.config.feature_size} features"
    return rows + step_rows(bench, model, name, ("<= 2.0", "<= 1.5"), pixel_values, teacher_features=features)


def step_rows(
    bench: Benchmark,
    model: AdaPerceiverForImageClassification,
    name: str,
    bounds: tuple[str, str],  # of time and of memory
    pixel_values: torch.Tensor,
    **targets: torch.Tensor,
) -> list[Row]:
    config, batch = model.train().config, pixel_values.shape[0]
    step = OnceForAll.draw(config, ["tokens", "depth"], batch, torch.Generator().manual_seed(0))
    step = step._replace(width=tuple(config.widths[image % len(config.widths)] for image in range(batch)))

    @torch.enable_grad()
    def train(step: OnceForAll | None) -> None:
        model.zero_grad()
        model(pixel_values, once_for_all=step, **targets).loss.backward()

    runs = {"joint": lambda: train(step), "full model": lambda: train(None)}
    times = bench.times(runs, repeats=bench.few, name=f"once for all, {name}")
    memory = {side: peak_memory(model, bench.cast(run), pixel_values, *targets.values()) for side, run in runs.items()}

    points = [(tokens, config.num_hidden_layers) for tokens in step.tokens]
    points += [(tokens, depth) for depth, tokens in enumerate(step.depth_tokens, start=1)]
    loop = sum(model.flops(tokens=tokens, depth=depth)["total"] for tokens, depth in points) / model.flops()["total"]
    what = (
        f"{len(points)} readouts of {name}, {config.num_hidden_layers} blocks of {config.hidden_size}, batch {batch}"
    )
    time_name = f"time, {what} (a loop: {loop:.1f} x the FLOPs)"
    memory_name = f"peak memory, {what} ({memory['joint']:.0f} against {memory['full model']:.0f} MB)"
    return [
        bench.row("once_for_all", time_name, times["joint"] / times["full model"], bounds[0], times),
        bench.row("once_for_all", memory_name, memory["joint"] / memory["full model"], bounds[1], {}),
    ]


SUITES = {
    "block_attention": block_attention_suite,
    "vit": vit_suite,
    "axes": axes_suite,
    "probes": probes_suite,
    "early_exit": exit_suite,
    "tokens_per_image": groups_suite,
    "grid": grid_suite,
    "once_for_all": once_for_all_suite,
}


def machine(device: str | None = None) -> str:
    """`device` says where other models than those in float32 on the CPU ran."""
    cpu = f"{machine_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return f"{cpu}, {device or 'float32'}"
