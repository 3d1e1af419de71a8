"""Charts of scores, costs and runs."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .grid import pareto
from .style import BLACK, BLUE, GREEN, LIGHT, RED, new_figure, save, styled


AXIS_LABELS = {"gflops": "GFLOPs per image", "ms": "ms per image"}


@contextmanager
def panels(path: Path, columns: int = 1, size: tuple[float, float] = (6, 4.5)) -> Iterator[Sequence[Any]]:
    """`columns` axes side by side, to draw on; the figure is saved to `path` at the end."""
    with styled():
        figure = new_figure(size[0] * columns, size[1])
        axes = figure.subplots(1, columns, squeeze=False)[0]
        yield axes
        for one in axes:
            if one.get_legend_handles_labels()[0]:
                one.legend()
        save(figure, path)


def scatter(axes: Any, rows: Sequence[dict[str, Any]], x: str, y: str, **style: Any) -> None:
    axes.scatter([row[x] for row in rows], [row[y] for row in rows], **{"s": 12, **style})


def line(axes: Any, rows: Sequence[dict[str, Any]], x: str, y: str, **style: Any) -> None:
    rows = sorted(rows, key=lambda row: row[x])
    axes.plot([row[x] for row in rows], [row[y] for row in rows], **{"markersize": 4, **style})


def draw_grid(
    rows: Sequence[dict[str, Any]],
    baselines: Sequence[dict[str, Any]],
    trained: Sequence[int],
    score: str,
    higher_is_better: bool,
    folder: Path,
) -> list[str]:
    """The figures that the rows of `evaluate_grid` allow; their names. `trained` are the trained token counts."""
    fixed, early = ([row for row in rows if (row["exit_threshold"] is not None) == exits] for exits in (False, True))
    largest = {axis: max(row[axis] for row in fixed) for axis in ("tokens", "width", "depth")}
    largest["tokens"] = max((count for count in trained if count <= largest["tokens"]), default=largest["tokens"])
    drawn = ["pareto.png"]

    costs = [cost for cost in AXIS_LABELS if all(cost in row for row in fixed)]
    with panels(folder / "pareto.png", len(costs)) as columns:
        for cost, axes in zip(costs, columns):
            scatter(axes, fixed, cost, score, color=LIGHT, label="all points")
            if early and cost == "gflops":  # their time depends on the images
                scatter(axes, early, cost, score, color=RED, label="early exit")
            front = pareto([row for row in rows if cost in row], cost, score, higher_is_better)
            line(axes, front, cost, score, color=BLACK, label="Pareto front")
            for row in baselines:
                if cost in row:
                    scatter(axes, [row], cost, score, marker="*", s=90, label=row["model"])
            axes.set(xlabel=AXIS_LABELS[cost], ylabel=score)

    on_grid = [row for row in fixed if row["tokens"] in trained]
    for x, by, at_largest in (("tokens", "width", "depth"), ("depth", "tokens", "width")):
        chosen = [row for row in on_grid if row[at_largest] == largest[at_largest]]
        if len({row[x] for row in chosen}) > 1:
            drawn.append(f"tokens_{'width' if x == 'tokens' else x}.png")
            with panels(folder / drawn[-1]) as (axes,):
                for value in sorted({row[by] for row in chosen}):
                    of_value = [row for row in chosen if row[by] == value]
                    line(axes, of_value, x, score, marker="o", label=f"{by} {value}")
                axes.set(xlabel=x, ylabel=score, title=f"{at_largest} {largest[at_largest]}")

    between = [row for row in fixed if all(row[axis] == largest[axis] for axis in ("width", "depth"))]
    if any(row["tokens"] not in trained for row in between):
        drawn.append("extrapolation.png")
        with panels(folder / drawn[-1]) as (axes,):
            line(axes, between, "tokens", score, color=LIGHT)
            for is_trained, label, color in ((True, "trained", BLACK), (False, "not trained", RED)):
                chosen = [row for row in between if (row["tokens"] in trained) == is_trained]
                scatter(axes, chosen, "tokens", score, s=36, label=label, color=color, zorder=3)
            axes.set(xlabel="tokens", ylabel=score, title="interpolation and extrapolation")
    return drawn


def draw_policies(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy against GFLOPs, and histograms of exit depths and tokens; the oracle is the last row."""
    kinds, oracle = {"fixed": BLUE, "early exit": RED, "router": GREEN}, rows[-1]
    with panels(path, 3, (5, 4.5)) as (accuracy, depths, tokens):
        for kind, color in kinds.items():
            chosen = [row for row in rows if row["policy"].startswith(kind)]
            if chosen:
                scatter(accuracy, chosen, "gflops", "accuracy", s=36, color=color, label=kind)
        # Drawn to scale, the oracle would press the others into one line.
        accuracy.set_title(f"oracle: {oracle['accuracy']:.1%} at {oracle['gflops']:.3g} GFLOPs", fontsize=10)
        accuracy.set(xlabel="GFLOPs per image (mean)", ylabel="accuracy")
        for axes, name, label in ((depths, "exit_depths", "exit depth"), (tokens, "tokens", "tokens")):
            varied = [row for row in rows if sum(share > 0 for share in (row[name] or {}).values()) > 1]
            for row in varied[-6:]:
                axes.plot(list(map(str, row[name])), list(row[name].values()), label=row["policy"])
            axes.set(xlabel=label, ylabel="share of images")


def draw_ratios(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A bar for each ratio of the benchmark, and a mark at its target."""
    with panels(path, size=(9, 0.35 * len(rows) + 1.2)) as (axes,):
        for index, row in enumerate(rows):
            color = {True: GREEN, False: RED, None: LIGHT}[row["met"]]
            axes.barh(f"{row['suite']}: {row['name']}", row["ratio"], color=color)
            axes.text(0.01, index, f"{row['ratio']:.3f}", va="center", fontsize=8, color="white")
            if row["target"] is not None:
                axes.plot([float(row["target"].split()[1])] * 2, [index - 0.4, index + 0.4], color="black")
        axes.invert_yaxis()
        axes.set_xlabel("ratio (black: target)")
        axes.tick_params(axis="y", labelsize=8)


def draw_curves(folders: Sequence[Path], path: Path) -> None:
    """The losses of runs that followed each other, and the first score of their evaluations."""
    with panels(path, size=(8, 4.5)) as (losses,):
        before, evaluated = 0, []
        for folder in folders:
            records = [json.loads(record) for record in (folder / "metrics.jsonl").read_text().splitlines()]
            steps, values = zip(*((before + one["step"], one["loss"]) for one in records if "loss" in one))
            losses.plot(steps, values, lw=0.8, label=folder.name)
            evaluated += [(before + one["step"], *list(one.items())[1]) for one in records if "loss" not in one]
            before = steps[-1]
            losses.axvline(before, color="grey", lw=0.5)
        if evaluated:
            scores = losses.twinx()
            scores.plot([step for step, _, _ in evaluated], [value for _, _, value in evaluated], "ko-", ms=4, lw=0.5)
            scores.set_ylabel(f"{evaluated[-1][1]} (dots)")
        losses.set(xlabel="step", ylabel="loss")
