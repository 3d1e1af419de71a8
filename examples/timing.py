"""Side by side: what the example scripts share for measuring time."""

import statistics
import time
from collections.abc import Callable

import torch
from tqdm import tqdm


@torch.no_grad()
def interleaved(
    runs: dict[str, Callable], repeats: int, seconds: float = 0.0, name: str | None = None
) -> dict[str, float]:
    """
    Median milliseconds of each run; they take turns, so that a busy moment of the machine hits them alike.

    At least `repeats` rounds, and more until `seconds` have passed. `name` is that of the progress bar, if there is one.
    """
    times = {key: [] for key in runs}
    with tqdm(total=repeats, desc=name, disable=name is None, leave=False) as progress:
        for run in runs.values():
            run()  # the first call is slower
        begin, rounds = time.perf_counter(), 0
        while rounds < repeats or time.perf_counter() - begin < seconds:
            for key, run in runs.items():
                start = time.perf_counter()
                run()
                times[key].append(1e3 * (time.perf_counter() - start))
            rounds += 1
            progress.update()
    return {key: statistics.median(values) for key, values in times.items()}
