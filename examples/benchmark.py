"""
    python examples/benchmark.py            # the paper's model; about fifteen minutes on two idle cores
    python examples/benchmark.py --smoke    # a tiny model, to see that it runs; under a minute, nothing is judged
    python examples/benchmark.py --against CHECKOUT    # has a change made anything slower?

Speed, as ratios: what is compared runs interleaved in one process, and medians are divided. Prints a table, and writes it
with the machine's name as CSV, JSON and a figure to `--output`. `--only` picks suites by name.

With `--against`, the same calls of this checkout and of another one (a clone or a git worktree at another commit) take turns
instead, in a process each; what it prints goes to `--output` as against.csv, and `--only` picks cases by name.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from adaperceiver.evaluation import checkouts
from adaperceiver.evaluation.benchmarks import PAPER, SMOKE, SUITES, Benchmark, machine
from adaperceiver.evaluation.plots import draw_ratios
from adaperceiver.evaluation.tables import write_table
from adaperceiver.training.arguments import Parser, command_line
from adaperceiver.training.checks import at_least, check_output
from adaperceiver.training.devices import DeviceArguments


@dataclass
class Arguments:
    output: str = field(
        default="runs/benchmark", metadata={"help": "Folder for results.csv, results.json and ratios.png."}
    )
    repeats: int = field(default=5, metadata={"help": "Timed runs of each side of a comparison, at least."})
    seconds: float = field(default=20, metadata={"help": "Go on with a comparison for this long, if it is quick."})
    threads: int = field(default=2, metadata={"help": "Threads of torch."})
    smoke: bool = field(
        default=False,
        metadata={"help": "A tiny model, once, on one thread: shows that the script runs, not how fast."},
    )
    only: list[str] | None = field(default=None, metadata={"help": "Suites (or cases) to run, all by default."})
    against: str | None = field(default=None, metadata={"help": "Another checkout of this project to compare with."})

    def __post_init__(self):
        at_least(self, 1, "repeats", "threads")
        at_least(self, 0, "seconds")
        check_output(self, "output")


def main(arguments: list[str]) -> None:
    args, devices = Parser([Arguments, DeviceArguments]).parse(arguments)
    torch.set_num_threads(1 if args.smoke else args.threads)
    repeats, seconds = (1, 0) if args.smoke else (args.repeats, args.seconds)
    known = checkouts.CASES if args.against else SUITES
    names = list(known) if args.only is None else args.only
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(f"--only must be among {', '.join(known)}, got {', '.join(unknown) or 'nothing'}")
    output = Path(args.output)

    if args.against:
        if devices.device not in (None, "cpu") or devices.dtype not in (None, "float32"):
            raise ValueError("--against compares in float32 on the CPU: leave out --device and --dtype.")
        print(machine())
        checkouts.compare(Path(args.against), output, names, args.smoke, repeats, seconds)
        return
    chosen = devices.start()
    where = machine(None if str(chosen.device) == "cpu" and devices.dtype in (None, "float32") else str(chosen))
    print(where)
    scale = SMOKE if args.smoke else PAPER
    bench = Benchmark(scale, repeats, seconds, sys.stderr.isatty(), chosen.device, chosen.autocast)
    rows = []
    for name in names:
        for row in SUITES[name](bench):
            rows.append(row.record())
            print(row, flush=True)
        write_table(rows, {"machine": where}, output, "results", ["suite", "name", "ratio", "target", "met"])
    draw_ratios(rows, output / "ratios.png")
    print(f"results.csv, results.json and ratios.png are in {output}.")


if __name__ == "__main__":
    command_line(main)
