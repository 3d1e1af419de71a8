"""Side by side: what the example scripts share for measuring time."""

import random
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


def exit_thresholds(confidences: torch.Tensor) -> list[float]:
    """
    A threshold for each image that makes it leave at a depth of our choice: one where its confidence has a new maximum, or
    the last. `confidences` are those of the readouts after every block, `(depths, images)`.
    """
    generator, thresholds, last = random.Random(0), [], len(confidences)
    for image in confidences.T.tolist():
        records = [depth for depth in range(1, last) if image[depth - 1] > max([0.0, *image[: depth - 1]]) + 1e-4]
        depth = generator.choice([*records, last])
        thresholds.append(1.0 if depth == last else (image[depth - 1] + max([0.0, *image[: depth - 1]])) / 2)
    return thresholds
