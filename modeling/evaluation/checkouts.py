"""
Whether a change made anything slower: `benchmark.py --against CHECKOUT` compares this checkout with another one.

Each has a worker process (this file, run as a script) that imports `adaperceiver` from it. The workers take turns, so that
both never run at the same moment, and the turns are compared pair by pair, each by its fastest call.
Whatever runs in a worker may use only what both checkouts have: public calls of the model.
"""

import functools
import importlib.util
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch


CASES = ("plain", "early_exit", "no_exit", "grid", "training_step")
BATCHES = (1, 8)
FIELDS = ("image_size", "patch_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_latent_tokens")
SIZES = {
    "medium": (112, 14, 416, 21, 13, 128),  # half the paper's width, image side and latents; all of its blocks
    "small": (88, 8, 192, 8, 6, 64),  # shows overheads
}
SMOKE = {"tiny": (32, 8, 32, 4, 4, 16)}
COLUMNS = ("case", "batch", "this_ms", "other_ms", "ratio", "lower_quartile", "upper_quartile")
SLOWER = 1.02
TOLERANCE = 1e-4  # of outputs
TURN = 0.1  # seconds that a worker repeats a quick call for, so that the change of turns does not matter


def load(checkout: Path) -> None:
    """Make `import adaperceiver` mean this checkout, whatever is installed."""
    folders = [checkout / "modeling", checkout]  # `adaperceiver.configuration` lies beside `modeling`
    spec: Any = importlib.util.spec_from_file_location(
        "adaperceiver", folders[0] / "__init__.py", submodule_search_locations=[str(folder) for folder in folders]
    )
    sys.modules["adaperceiver"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["adaperceiver"])


def build(size: tuple[int, ...]) -> torch.nn.Module:
    """A classifier whose weights depend only on their names and shapes, and matter: at init, blocks hardly do."""
    from adaperceiver import AdaPerceiverConfig, AdaPerceiverForImageClassification

    model = AdaPerceiverForImageClassification(AdaPerceiverConfig(num_labels=10, **dict(zip(FIELDS, size))))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim > 1 or name.endswith("gamma"):
                parameter.normal_(std=0.5 if name.endswith(("gamma", "token")) else 0.02, generator=generator)
    return model


def exit_thresholds(confidences: torch.Tensor) -> list[float]:
    """
    A threshold for each image that makes it exit at a depth of our choice: one where its confidence has a new maximum, or
    the last. `confidences` are those of the readouts after every block, `(depths, images)`.
    """
    generator, thresholds = random.Random(0), []
    for image in confidences.T.tolist():
        before = [max([0.0, *image[:index]]) for index in range(len(image) - 1)]
        records = [(at + highest) / 2 for at, highest in zip(image, before) if at > highest + 1e-4]
        thresholds.append(generator.choice([*records, 1.0]))
    return thresholds


def cases(model: torch.nn.Module, batch: int) -> dict[str, Callable[[], torch.Tensor]]:
    """What `CASES` names, each giving its output. The training step runs in training mode."""
    from adaperceiver import OnceForAll

    config, generator = model.config, torch.Generator().manual_seed(0)
    pixel_values = torch.randn(batch, 3, config.image_size, config.image_size, generator=generator)
    labels = torch.randint(config.num_labels, (batch,), generator=generator)
    step = OnceForAll.draw(config, ["tokens", "width", "depth"], batch, generator)
    logits = model.eval().logits_grid(pixel_values, granularities=[config.max_latent_tokens])
    thresholds = exit_thresholds(logits.softmax(-1).amax(-1)[:, 0])

    def training_step() -> torch.Tensor:
        model.zero_grad()
        loss = model(pixel_values, labels=labels, once_for_all=step).loss
        loss.backward()
        return loss.detach()

    evaluate = torch.no_grad()
    return {
        "plain": evaluate(lambda: model(pixel_values).logits),
        "early_exit": evaluate(lambda: model(pixel_values, exit_threshold=thresholds).logits),
        "no_exit": evaluate(lambda: model(pixel_values, exit_threshold=1.0).logits),
        "grid": evaluate(lambda: model.logits_grid(pixel_values)),
        "training_step": training_step,
    }


def work(checkout: str, descriptor: str, threads: str) -> None:
    """Answer requests `(size, batch, case, seconds)` with the fastest call's milliseconds, or with the output if `seconds` is None."""
    connection = Connection(int(descriptor))
    load(Path(checkout))
    torch.set_num_threads(int(threads))
    model = functools.cache(lambda size: build({**SIZES, **SMOKE}[size]))
    runs = functools.cache(lambda size, batch: cases(model(size), batch))
    while True:
        try:
            size, batch, case, seconds = connection.recv()
        except EOFError:  # no more work
            return
        run = runs(size, batch)[case]
        model(size).train(case == "training_step")
        if seconds is None:
            output = run()
            if case == "training_step":
                gradients = [p.grad.norm() for _, p in sorted(model(size).named_parameters()) if p.grad is not None]
                output = torch.stack([output, *gradients])
            connection.send(output.numpy())
            continue
        times: list[float] = []
        begin = time.perf_counter()
        while not times or time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
        connection.send(min(times))  # other work on the machine only ever adds


class Worker:
    """A checkout in a process of its own, which ends with this one."""

    def __init__(self, checkout: Path):
        self.checkout = checkout
        self.connection, theirs = Pipe()
        subprocess.Popen(
            [sys.executable, __file__, str(checkout), str(theirs.fileno()), str(torch.get_num_threads())],
            pass_fds=[theirs.fileno()],
            # Threads that wait must not spin while the other worker has its turn.
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        )
        theirs.close()

    def ask(self, *request: Any) -> Any:
        try:
            self.connection.send(request)
            return self.connection.recv()
        except (EOFError, ConnectionError):
            raise ChildProcessError(f"The worker of {self.checkout} has stopped; its error is above.") from None


def compare(other: Path, output: Path, names: Iterable[str], smoke: bool, repeats: int, seconds: float) -> None:
    """
    Print how fast the cases run here and in the checkout `other`, and which are slower here; write against.csv to `output`.

    At least `repeats` pairs of turns for each case, and more until `seconds` have passed.
    """
    from .tables import write_csv  # here, since a worker runs this file as a script

    if not all((other / package / "__init__.py").exists() for package in ("modeling", "configuration")):
        raise ValueError(
            f"--against must be a checkout of this project, with modeling/ and configuration/, got {other}"
        )
    this, that = Worker(Path(__file__).parents[2]), Worker(other.resolve())
    keys = [(size, batch, case) for size in (SMOKE if smoke else SIZES) for batch in BATCHES for case in names]

    worst = 0.0
    for key in keys:
        here, there = this.ask(*key, None), that.ask(*key, None)
        difference = float(abs(here - there).max()) if here.shape == there.shape else float("inf")
        if not difference <= TOLERANCE:  # nor NaN
            size, batch, case = key
            raise ValueError(f"{case} of the {size} model, batch {batch}: outputs differ by {difference:.1e}.")
        worst = max(worst, difference)
    print(f"this: {this.checkout}\nother: {that.checkout}\noutputs differ by at most {worst:.1e}\n")

    print(f"{'case':22} {'batch':>5} {'this ms':>9} {'other ms':>9} {'ratio':>6}  quartiles of the ratio")
    rows, slower = [], []
    for size, batch, case in keys:
        times: dict[Worker, list[float]] = {this: [], that: []}
        order, begin = [this, that], time.perf_counter()
        while len(times[that]) < repeats or time.perf_counter() - begin < seconds:
            for worker in order:
                times[worker].append(worker.ask(size, batch, case, TURN))
            order.reverse()  # neither side always follows the other
        ratios = torch.tensor(times[this]) / torch.tensor(times[that])
        low, ratio, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        medians = (statistics.median(times[this]), statistics.median(times[that]))
        rows.append(dict(zip(COLUMNS, [f"{size} {case}", batch, *(f"{x:.3f}" for x in (*medians, ratio, low, high))])))
        print("{:22} {:5} {:>9} {:>9} {:>6}  {} to {}".format(*rows[-1].values()), flush=True)
        if ratio > SLOWER:
            slower.append(f"{size} {case}, batch {batch}" + (" (1 is within the quartiles)" if low <= 1 else ""))
    print("\nMore than 2 % slower than the other checkout:", "; ".join(slower) or "none")

    write_csv(rows, output / "against.csv")
    print(f"Wrote against.csv to {output}.")


if __name__ == "__main__":
    work(*sys.argv[1:])
