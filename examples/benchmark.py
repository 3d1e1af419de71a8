"""
    python examples/benchmark.py                 # the paper's model; about fifteen minutes on two cores
    python examples/benchmark.py --smoke true    # a tiny model, for a look at the output; under a minute
    python examples/benchmark.py --against CHECKOUT    # has a change made anything slower?

Speed, as ratios: what is compared runs interleaved in one process, and medians are divided. Prints a table, and writes it
with the machine's name as CSV, JSON and a figure to `--output`. `--only` picks suites by name.

With `--against`, the same calls of this checkout and of another one (a clone or a git worktree at another commit) take turns
instead, in a process each; what it prints goes to `--output` as against.csv, and `--only` picks cases by name.
"""

import csv
import json
import platform
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import HfArgumentParser, ViTConfig, ViTForImageClassification

from adaperceiver import (
    AdaPerceiverConfig,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    OnceForAll,
)
from adaperceiver.adaptive_adaperceiver import interleaved
from adaperceiver.evaluation import checkouts


@dataclass
class Arguments:
    output: str = field(
        default="runs/benchmark", metadata={"help": "Folder for results.csv, results.json and ratios.png."}
    )
    repeats: int = field(default=5, metadata={"help": "Timed runs of each side of a comparison, at least."})
    seconds: float = field(default=20, metadata={"help": "Go on with a comparison for this long, if it is quick."})
    threads: int = field(default=2, metadata={"help": "Threads of torch."})
    smoke: bool = field(
        default=False, metadata={"help": "Shrink all models: shows that the script runs, not how fast."}
    )
    only: list[str] | None = field(default=None, metadata={"help": "Suites (or cases) to run, all by default."})
    against: str | None = field(default=None, metadata={"help": "Another checkout of this project to compare with."})


@dataclass
class Row:
    """One ratio of two medians, and what it is held against."""

    suite: str
    name: str
    ratio: float
    target: str  # e.g. "<= 1.05"
    milliseconds: dict[str, float]

    @property
    def met(self) -> bool:
        relation, bound = self.target.split()
        return self.ratio <= float(bound) if relation == "<=" else self.ratio >= float(bound)


def build(
    smoke: bool,
    half: bool = False,
    model_class: type[AdaPerceiverForImageClassification] = AdaPerceiverForImageClassification,
) -> AdaPerceiverForImageClassification:
    """The paper's model or one of half its width, with latents that matter: at init, blocks hardly change anything."""
    if smoke:
        config = AdaPerceiverConfig(hidden_size=64, num_attention_heads=4, num_labels=1000, feature_size=96)
    elif half:
        config = AdaPerceiverConfig(hidden_size=416, num_attention_heads=13, num_labels=1000, feature_size=640)
    else:
        config = AdaPerceiverConfig(num_labels=1000)
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gamma", "latent_token", "output_token", "classifier.weight")):
                parameter.normal_(std=0.5)
    return model


def build_vit(smoke: bool) -> ViTForImageClassification:
    size = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256} if smoke else {}
    return ViTForImageClassification(ViTConfig(num_labels=1000, **size)).eval()


def block_attention_suite(arguments: Arguments) -> list[Row]:
    """Block-masked attention against bidirectional attention of the same network: slicing must cost nothing."""
    model, rows = build(arguments.smoke), []
    for batch in (1, 8):
        pixel_values = torch.randn(batch, 3, 224, 224)
        for tokens in model.config.token_granularities:
            runs = {
                kind: lambda kind=kind: model(pixel_values, tokens=tokens, attention=kind)  # noqa: B023
                for kind in ("block", "bidirectional")
            }
            times = interleaved(
                runs, arguments.repeats, arguments.seconds, f"block attention, batch {batch}, {tokens} tokens"
            )
            ratio = times["block"] / times["bidirectional"]
            rows.append(Row("block_attention", f"batch {batch}, {tokens} tokens", ratio, "<= 1.05", times))
    return rows


def vit_suite(arguments: Arguments) -> list[Row]:
    """GFLOP/s against transformers' ViT, and peak memory beyond the weights against what it needs."""
    model, vit, rows = build(arguments.smoke), build_vit(arguments.smoke), []
    config = vit.config
    length, d, hidden = 197, config.hidden_size, config.intermediate_size
    vit_flops = 12 * (2 * length * (4 * d * d + 2 * d * hidden) + 4 * length**2 * d) + 2 * 196 * 768 * d
    for batch in (1, 8):
        pixel_values = torch.randn(batch, 3, 224, 224)
        runs = {"adaperceiver": lambda: model(pixel_values), "vit": lambda: vit(pixel_values)}  # noqa: B023
        times = interleaved(runs, arguments.repeats, arguments.seconds, f"ViT, batch {batch}")
        speed = {
            "adaperceiver": model.flops(batch_size=batch)["total"] / times["adaperceiver"] / 1e6,
            "vit": batch * vit_flops / times["vit"] / 1e6,
        }
        ratio = speed["adaperceiver"] / speed["vit"]
        name = f"GFLOP/s, batch {batch} ({speed['adaperceiver']:.0f} against {speed['vit']:.0f})"
        rows.append(Row("vit", name, ratio, ">= 0.9", times))
    memory = {
        name: peak_memory(network, lambda: network(pixel_values), pixel_values)  # noqa: B023
        for name, network in (("adaperceiver", model), ("vit", vit))
    }
    # What lives at once in an FFN: its input, norm and output, the hidden layer before and after the activation, and in
    # AdaPerceiver the input tokens, which are part of the output.
    units = model.config.ffn_hidden_size(model.config.hidden_size)
    needed = {"adaperceiver": 256 * (4 * model.config.hidden_size + 2 * units), "vit": length * (3 * d + 2 * hidden)}
    ratio = (memory["adaperceiver"] / needed["adaperceiver"]) / (memory["vit"] / needed["vit"])
    megabytes = f"{memory['adaperceiver']:.0f} against {memory['vit']:.0f} MB"
    rows.append(
        Row("vit", f"peak memory beyond the weights, by activation size, batch 8 ({megabytes})", ratio, "<= 1.0", {})
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


def axes_suite(arguments: Arguments) -> list[Row]:
    """Each axis must save time, not only FLOPs. Batch 8."""
    model, pixel_values = build(arguments.smoke), torch.randn(8, 3, 224, 224)
    width, depth = model.config.hidden_size // 2, model.config.num_hidden_layers // 3
    runs = {
        "full": lambda: model(pixel_values),
        "tokens": lambda: model(pixel_values, tokens=32),
        "width": lambda: model(pixel_values, width=width),
        "depth": lambda: model(pixel_values, depth=depth),
    }
    times = interleaved(runs, arguments.repeats, arguments.seconds, "tokens, width and depth")
    return [
        Row("axes", "32 tokens of 256", times["tokens"] / times["full"], "<= 0.22", times),
        Row("axes", f"width {width} of {2 * width}", times["width"] / times["full"], "<= 0.78", times),
        Row("axes", f"depth {depth} of {3 * depth}", times["depth"] / times["full"], "<= 0.38", times),
    ]


def probes_suite(arguments: Arguments) -> list[Row]:
    """Probing after every block, with nobody leaving, against not probing."""
    model, rows = build(arguments.smoke), []
    for batch in (1, 8):
        pixel_values = torch.randn(batch, 3, 224, 224)
        runs = {
            "probes": lambda: model(pixel_values, exit_threshold=1.0),  # noqa: B023
            "no probes": lambda: model(pixel_values),  # noqa: B023
        }
        times = interleaved(runs, arguments.repeats, arguments.seconds, f"probes, batch {batch}")
        rows.append(Row("probes", f"batch {batch}", times["probes"] / times["no probes"], "<= 1.03", times))
    return rows


@torch.no_grad()
def exit_suite(arguments: Arguments) -> list[Row]:
    """Early exit with a known pattern, against the time that the blocks of the images still running should take."""
    model, pixel_values = build(arguments.smoke, half=True), torch.randn(64, 3, 224, 224)
    last = model.config.num_hidden_layers
    thresholds = checkouts.exit_thresholds(
        torch.stack([outputs.logits.softmax(-1).amax(-1) for outputs in model.anytime(pixel_values)])
    )
    depths = model(pixel_values, exit_threshold=thresholds).exit_depth.tolist()
    runs = {
        "early exit": lambda: model(pixel_values, exit_threshold=thresholds),
        "all blocks": lambda: model(pixel_values),
        "one block": lambda: model(pixel_values, depth=1),
    }
    times = interleaved(runs, max(3, arguments.repeats // 2), arguments.seconds, "early exit")
    block = (times["all blocks"] - times["one block"]) / (last - 1) / 64  # of one image
    ideal = times["one block"] + block * (sum(depths) - 64)
    name = (
        f"batch 64, exit depths {min(depths)} to {max(depths)}, {sum(depths) / 64:.1f} on average, against the ideal"
    )
    return [Row("early_exit", name, times["early exit"] / ideal, "<= 1.08", {**times, "ideal": ideal})]


def groups_suite(arguments: Arguments) -> list[Row]:
    """Tokens per image, against separate runs of the images that agree."""
    model, pixel_values = build(arguments.smoke, half=True), torch.randn(64, 3, 224, 224)
    granularities = model.config.token_granularities
    tokens = torch.tensor([granularities[index % len(granularities)] for index in range(64)])

    def apart() -> None:
        for count in granularities:
            model(pixel_values[tokens == count], tokens=count)

    runs = {"together": lambda: model(pixel_values, tokens=tokens), "apart": apart}
    times = interleaved(runs, max(3, arguments.repeats // 2), arguments.seconds, "tokens per image")
    return [Row("tokens_per_image", "batch 64", times["together"] / times["apart"], "<= 1.10", times)]


def grid_suite(arguments: Arguments) -> list[Row]:
    """Predictions at all token counts, widths and depths, against one pass at each width."""
    model, pixel_values = build(arguments.smoke, half=True), torch.randn(8, 3, 224, 224)
    config = model.config
    runs = {
        "grid": lambda: [model.logits_grid(pixel_values, width=width) for width in config.widths],
        "passes": lambda: [model(pixel_values, width=width) for width in config.widths],
    }
    times = interleaved(runs, arguments.repeats, arguments.seconds, "grid")
    points = len(config.token_granularities) * len(config.widths) * config.num_hidden_layers
    return [
        Row(
            "grid",
            f"batch 8, {points} points, against one pass a width",
            times["grid"] / times["passes"],
            "<= 1.15",
            times,
        )
    ]


def once_for_all_suite(arguments: Arguments) -> list[Row]:
    """A training step over all tokens, widths and depths, against one of the full model alone: forward and backward."""
    pixel_values, labels = torch.randn(6, 3, 224, 224), torch.randint(0, 1000, (6,))
    model = build(arguments.smoke, half=True)
    rows = step_rows(arguments, model, "logits", ("<= 1.12", "<= 1.07"), pixel_values, labels=labels)
    model = build(arguments.smoke, half=True, model_class=AdaPerceiverForDistillation)
    features = torch.randn(6, 256, model.config.feature_size)
    name = f"256 x {model.config.feature_size} features"
    return rows + step_rows(arguments, model, name, ("<= 2.0", "<= 1.5"), pixel_values, teacher_features=features)


def step_rows(
    arguments: Arguments,
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
    times = interleaved(runs, max(3, arguments.repeats // 2), arguments.seconds, f"once for all, {name}")
    memory = {side: peak_memory(model, run, pixel_values, *targets.values()) for side, run in runs.items()}

    points = [(tokens, config.num_hidden_layers) for tokens in step.tokens]
    points += [(tokens, depth) for depth, tokens in enumerate(step.depth_tokens, start=1)]
    loop = sum(model.flops(tokens=tokens, depth=depth)["total"] for tokens, depth in points) / model.flops()["total"]
    what = (
        f"{len(points)} readouts of {name}, {config.num_hidden_layers} blocks of {config.hidden_size}, batch {batch}"
    )
    time_name = f"time, {what} (a loop: {loop:.1f} x the FLOPs)"
    memory_name = f"peak memory, {what} ({memory['joint']:.0f} against {memory['full model']:.0f} MB)"
    return [
        Row("once_for_all", time_name, times["joint"] / times["full model"], bounds[0], times),
        Row("once_for_all", memory_name, memory["joint"] / memory["full model"], bounds[1], {}),
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


def machine() -> str:
    model, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    return f"{model}, {torch.get_num_threads()} threads, torch {torch.__version__}, float32"


def draw(rows: list[Row], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.35 * len(rows) + 1.2))
    labels = [f"{row.suite}: {row.name}" for row in rows]
    axes.barh(labels, [row.ratio for row in rows], color=["#4c9a6a" if row.met else "#c0504d" for row in rows])
    for index, row in enumerate(rows):
        axes.plot([float(row.target.split()[1])] * 2, [index - 0.4, index + 0.4], color="black")
        axes.text(0.01, index, f"{row.ratio:.3f}", va="center", fontsize=8, color="white")
    axes.invert_yaxis()
    axes.set_xlabel("ratio (black: target)")
    axes.tick_params(axis="y", labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    torch.set_num_threads(arguments.threads)
    if arguments.smoke:
        arguments.repeats, arguments.seconds = 1, 0
    known = checkouts.CASES if arguments.against else SUITES
    unknown = [name for name in arguments.only or [] if name not in known]
    if unknown:
        raise SystemExit(f"--only must be among {', '.join(known)}, got {', '.join(unknown)}")
    output = Path(arguments.output)

    print(machine())
    if arguments.against:
        checkouts.compare(
            Path(arguments.against),
            output,
            arguments.only or checkouts.CASES,
            arguments.smoke,
            arguments.repeats,
            arguments.seconds,
        )
        return
    rows = []
    for name in arguments.only or SUITES:
        for row in SUITES[name](arguments):
            rows.append(row)
            print(
                f"{row.suite:17} {row.ratio:6.3f}  {row.target:8} {'met' if row.met else 'NOT met':8} {row.name}",
                flush=True,
            )

    output.mkdir(parents=True, exist_ok=True)
    records = [{**asdict(row), "met": row.met} for row in rows]
    (output / "results.json").write_text(json.dumps({"machine": machine(), "rows": records}, indent=2) + "\n")
    with open(output / "results.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["suite", "name", "ratio", "target", "met"])
        writer.writerows([row.suite, row.name, f"{row.ratio:.4f}", row.target, row.met] for row in rows)
    draw(rows, output / "ratios.png")
    print(f"Wrote results.csv, results.json and ratios.png to {output}.")


if __name__ == "__main__":
    main()
