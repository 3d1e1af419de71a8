"""Figures."""

import json
from collections.abc import Sequence
from pathlib import Path


def draw_curves(folders: Sequence[Path], path: Path) -> None:
    """The losses of runs that followed each other, and the first score of their evaluations, as a figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, losses = plt.subplots(figsize=(8, 4.5))
    scores, before, evaluated = losses.twinx(), 0, []
    for folder in folders:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps, values = zip(*((before + line["step"], line["loss"]) for line in lines if "loss" in line))
        losses.plot(steps, values, lw=0.8, label=folder.name)
        evaluated += [(before + line["step"], *list(line.items())[1]) for line in lines if "loss" not in line]
        before = steps[-1]
        losses.axvline(before, color="grey", lw=0.5)
    if evaluated:
        scores.plot([step for step, _, _ in evaluated], [value for _, _, value in evaluated], "ko-", ms=4, lw=0.5)
        scores.set_ylabel(f"{evaluated[-1][1]} (dots)")
    losses.set_xlabel("step")
    losses.set_ylabel("loss")
    losses.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
