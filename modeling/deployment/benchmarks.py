"""Milliseconds and memory of the ways to run one network: PyTorch eager and compiled, bundles in float32 and int8."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .session import AdaptiveSession


EAGER = "eager"


@torch.no_grad()
def compare(
    model: nn.Module,
    sessions: dict[str, AdaptiveSession],
    points: Sequence[dict[str, int]],
    batch_sizes: Sequence[int],
    repeats: int,
    compiled: bool = False,
    cpu_time: bool = False,
    baselines: dict[str, Callable[[torch.Tensor], Any]] | None = None,
) -> Iterator[dict[str, Any]]:
    """
    Rows of milliseconds per call, by runtime, operating point and batch size. All runtimes of a point and a batch size take
    turns, and `ratio` is the time of the same point in eager PyTorch over that of the row: above 1 is faster. `baselines` run
    in every comparison. `cpu_time` counts what the process computes rather than how long it takes.
    """
    config = model.config
    for batch_size in batch_sizes:
        pixel_values = torch.randn(batch_size, config.num_channels, config.image_size, config.image_size)
        array = pixel_values.numpy()
        for point in points:
            runs: dict[Hashable, Callable[[], Any]] = {EAGER: partial(model, pixel_values, **point)}
            if compiled:
                network = torch.compile(model.extract(**point))
                runs["compiled"] = partial(network, pixel_values)
            runs |= {name: partial(session, array, **point) for name, session in sessions.items()}
            runs |= {name: partial(run, pixel_values) for name, run in (baselines or {}).items()}
            times = medians(runs, repeats, time.process_time if cpu_time else time.perf_counter)
            for name, ms in times.items():
                yield {
                    "batch": batch_size,
                    **point,
                    "runtime": name,
                    "ms": round(ms, 2),
                    "ratio": round(times[EAGER] / ms, 3),
                }


def medians(
    runs: dict[Hashable, Callable[[], Any]], repeats: int, clock: Callable[[], float]
) -> dict[Hashable, float]:
    """Median milliseconds of each run; they take turns."""
    times: dict[Hashable, list[float]] = {name: [] for name in runs}
    for round_ in range(1 + repeats):
        for name, run in runs.items():
            start = clock()
            run()
            if round_ > 0:  # the first call is slower
                times[name].append(1e3 * (clock() - start))
    return {name: statistics.median(values) for name, values in times.items()}


MEMORY = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from session import AdaptiveSession

def resident():
    with open("/proc/self/status") as file:
        pages = {line.split(":")[0]: line.split()[1] for line in file if line.startswith(("VmRSS", "RssAnon"))}
    return int(pages["RssAnon"]) // 1000, int(pages["VmRSS"]) // 1000

session = AdaptiveSession(sys.argv[1], sys.argv[2])
network, widths = session.manifest["network"], session.manifest["widths"]
pixel_values = np.zeros((1, network["num_channels"], *network["image_size"]), np.float32)
tokens = network["token_granularities"]
print(*resident())
for point in ({"tokens": tokens[-1]}, {"tokens": tokens[0]}, {"width": widths[0]}):
    session(pixel_values, exit_threshold=False, **point)
    print(*resident())
"""


def memory(folder: Path, runtime: str) -> dict[str, int]:
    """
    Megabytes of memory of its own (anonymous) that a process takes more for the full model of a bundle, for a second token
    count and for a second width. What is mapped from the file of weights is shared, and not counted.
    """
    command = [sys.executable, "-c", MEMORY, str(folder), runtime]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "MALLOC_ARENA_MAX": "1"}
    )
    before, *after = (int(line.split()[0]) for line in result.stdout.strip().splitlines())
    full, second_tokens, second_width = (late - early for early, late in zip([before, *after], after))
    return {"full": full, "second_tokens": second_tokens, "second_width": second_width}
