"""One look for all figures: colours that colour-blind readers can tell apart (Okabe and Ito), quiet axes, readable sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


BLACK, GREY, LIGHT = "#000000", "#6f6f6f", "#b8c4d6"
BLUE, SKY, GREEN, YELLOW, ORANGE, RED, PURPLE = (
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#f0e442",
    "#e69f00",
    "#d55e00",
    "#cc79a7",
)
SERIES = (BLUE, ORANGE, GREEN, RED, SKY, PURPLE, BLACK, YELLOW)  # in this order, with MARKERS
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
SEQUENCE = "viridis"  # of quantities; of differences, "magma"
STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "figure.dpi": 150,
    "font.size": 9,
    "grid.alpha": 0.3,
    "image.interpolation": "nearest",
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.markersize": 4,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


@contextmanager
def styled() -> Iterator[None]:
    """Whatever is drawn inside looks alike."""
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context({**STYLE, "axes.prop_cycle": cycler(color=SERIES, marker=MARKERS)}):
        yield


def new_figure(width: float, height: float) -> Any:
    """A figure in inches; pyplot would choose a backend for the whole process."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def picture_grid(rows: int, columns: int, side: float = 1.5) -> tuple[Any, Any]:
    """A figure, and its (rows, columns) axes, for pictures: no ticks, no frames."""
    figure = new_figure(side * columns, side * rows + 0.3)
    axes = figure.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        one.set(xticks=[], yticks=[])
        one.grid(False)
        for spine in one.spines.values():
            spine.set_visible(False)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
