"""
    python examples/benchmark_runtimes.py            # the paper's model with random weights
    python examples/benchmark_runtimes.py --smoke    # a tiny model, to see that it runs
    python examples/benchmark_runtimes.py --model MODEL --batch_sizes 1 8 64 --compiled --vit

Speed of one model in eager PyTorch, ONNX Runtime and OpenVINO, in float32 and int8, all through bundles; runtimes take turns,
so that what counts are ratios. Prints a table and the memory that operating points take, and writes runtimes.csv and .json to
`--output` with the machine's name. Weights do not change what a layer costs, so random ones will do.

Needs `pip install -e ".[onnx,openvino]"`.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import ViTConfig, ViTForImageClassification

from adaperceiver import AdaPerceiverConfig, AdaPerceiverForImageClassification, image_processor_for
from adaperceiver.deployment import benchmarks, export
from adaperceiver.deployment.bundle import write_bundle
from adaperceiver.deployment.session import MANIFEST, RUNTIMES, AdaptiveSession
from adaperceiver.evaluation.benchmarks import TINY, machine
from adaperceiver.evaluation.tables import write_table
from adaperceiver.training.arguments import Parser, command_line
from adaperceiver.training.checks import at_least


@dataclass
class Arguments:
    model: str | None = field(
        default=None, metadata={"help": "A classifier; the paper's with random weights if not given."}
    )
    output: str = field(default="runs/runtimes", metadata={"help": "Folder for the table."})
    bundles: str | None = field(
        default=None, metadata={"help": "Folder to keep the bundles in; those that it has already are measured again."}
    )
    tokens: list[int] | None = field(
        default=None, metadata={"help": "By default the first two granularities and all."}
    )
    batch_sizes: list[int] = field(default_factory=lambda: [1])
    segment: int = field(default=7, metadata={"help": "Blocks between the depths of the bundles."})
    repeats: int = 9
    threads: int = 2
    cpu_time: bool = field(
        default=False,
        metadata={"help": "CPU time in place of wall time: with --threads 1, what a busy machine disturbs least."},
    )
    compiled: bool = field(default=False, metadata={"help": "torch.compile as well; half a minute for every row."})
    vit: bool = field(default=False, metadata={"help": "ViT-B/16 as well, eager and by ONNX Runtime."})
    smoke: bool = field(
        default=False, metadata={"help": "A tiny model, once: shows that the script runs, not how fast."}
    )

    def __post_init__(self):
        at_least(self, 1, "segment", "repeats", "threads")


def load_model(args: Arguments) -> AdaPerceiverForImageClassification:
    if args.model is not None:
        return AdaPerceiverForImageClassification.from_pretrained(args.model, dtype=torch.float32).eval()
    return AdaPerceiverForImageClassification(
        AdaPerceiverConfig(num_labels=1000, **(TINY if args.smoke else {}))
    ).eval()


def vit_runs(folder: Path, threads: int) -> dict[str, Any]:
    """ViT-B/16 of transformers with random weights."""
    network = ViTForImageClassification(ViTConfig(num_labels=1000)).eval()
    export.export(network, folder, "onnx", (224, 224))
    exported = export.load(folder, threads)
    return {"ViT-B/16, eager": network, "ViT-B/16, onnxruntime": lambda pixel_values: exported(pixel_values.numpy())}


def main(arguments: list[str]) -> None:
    (args,) = Parser([Arguments]).parse(arguments)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = load_model(args)
    config = model.config
    last = config.num_hidden_layers
    model.adaptive_config = model.adaptive_config.update(exit_after=min(args.segment, last), exit_every=args.segment)
    processor = image_processor_for(config, "image-classification")
    counts = args.tokens or sorted({*config.token_granularities[:2], config.max_latent_tokens})
    points = [{"tokens": tokens, "width": config.max_width, "depth": last} for tokens in counts]
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folders = {precision: Path(args.bundles or temporary, precision) for precision in ("float32", "int8")}
        samples = [torch.randn(4, config.num_channels, config.image_size, config.image_size)]
        for precision, folder in folders.items():
            if not (folder / MANIFEST).is_file():
                folder.mkdir(parents=True, exist_ok=True)
                write_bundle(model, processor, folder, calibration=samples if precision == "int8" else None)
        sessions = {
            f"{runtime} {precision}": AdaptiveSession(folder, runtime, args.threads)
            for precision, folder in folders.items()
            for runtime in RUNTIMES
        }
        baselines = {}
        if args.vit:
            (Path(temporary) / "vit").mkdir()
            baselines = vit_runs(Path(temporary) / "vit", args.threads)
        repeats = 1 if args.smoke else args.repeats
        rows = []
        for row in benchmarks.compare(
            model, sessions, points, args.batch_sizes, repeats, args.compiled, args.cpu_time, baselines
        ):
            rows.append(row)
            print(
                f"batch {row['batch']:3}, {row['tokens']:4} tokens {row['runtime']:24} {row['ms']:9.2f} ms "
                f"{row['ratio']:6.2f} x eager",
                flush=True,
            )
        weights = 4 * model.num_parameters()
        for precision, folder in folders.items():
            size = sum(path.stat().st_size for path in folder.iterdir())
            print(f"{precision} bundle: {size / 1e6:.1f} MB, {size / weights:.3f} of the float32 weights", flush=True)
            for runtime in RUNTIMES:
                taken = benchmarks.memory(folder, runtime)
                print(
                    f"  {runtime}: {taken['full']} MB for the full model, {taken['second_tokens']} more for a second token "
                    f"count, {taken['second_width']} more for a second width",
                    flush=True,
                )
    write_table(rows, {"machine": machine(), "cpu_time": args.cpu_time}, Path(args.output), "runtimes")


if __name__ == "__main__":
    command_line(main)
