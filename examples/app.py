"""
A page to play with a checkpoint: drop a photograph, choose tokens, width and depth, and compare two choices.

    python examples/app.py [CHECKPOINT] [--masks CHECKPOINT] [--depth CHECKPOINT] [--images FOLDER_OR_PARQUET]

Without arguments it shows what `checkpoints/` holds. `write_space.py` makes a Space of this file.
"""

import argparse
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr
from PIL import Image
from transformers import (
    AutoModelForDepthEstimation,
    AutoModelForImageClassification,
    AutoModelForSemanticSegmentation,
)
from transformers.utils import logging

from adaperceiver.evaluation.answers import AXES, Answer, Checkpoint, classify, depth_map, features, mask
from adaperceiver.evaluation.pictures import draw_confidence
from adaperceiver.evaluation.style import BLUE, SERIES


HERE = Path(__file__).resolve().parent
KINDS = {  # of checkpoints, by the arguments that name them
    "checkpoint": ("AdaPerceiverForImageClassification", AutoModelForImageClassification),
    "masks": ("AdaPerceiverForSemanticSegmentation", AutoModelForSemanticSegmentation),
    "depth": ("AdaPerceiverForDepthEstimation", AutoModelForDepthEstimation),
}
REFUSED = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # what Pillow and the models raise
BY_AXES, BY_GFLOPS, BY_TIME = "tokens, width, depth", "GFLOPs", "milliseconds"
LAUNCH = {
    "theme": gr.themes.Default(primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["monospace"]),
    "css": f"""
        .bar {{background: var(--border-color-primary); border-radius: 3px; margin: 2px 0 10px}}
        .bar div {{background: {BLUE}; border-radius: 3px; height: 10px}}
        .cost span {{float: right}}
        .picture label {{position: static}}
        #photograph img {{width: 100%; height: 100%; object-fit: contain}}
    """,
    "max_file_size": "20mb",
}


def forgiving(preprocess: Callable) -> Callable:
    """The `preprocess` of an upload, with a message for a file that is no photograph."""

    def wrapped(payload: Any) -> str | None:
        try:
            return preprocess(payload)
        except REFUSED as error:
            raise message(error) from error

    return wrapped


def message(error: Exception) -> gr.Error:
    return gr.Error(f"No answer for this photograph: {error}", title="Sorry", print_exception=False)


def slider(low: float, high: float, value: float, step: float, **options: Any) -> gr.Slider:
    return gr.Slider(low, high, value, step=step, min_width=130, buttons=[], **options)


def upwards(value: float, step: float) -> float:
    """To whole steps, so that a budget at either end of a slider is enough."""
    return round(math.ceil(value / step) * step, 6)


class Side:
    """One side of the comparison: what is chosen, and what comes of it."""

    def __init__(self, name: str, checkpoints: dict[str, Checkpoint], start: dict[str, float]):
        self.name, self.main = name, checkpoints["checkpoint"]
        self.drawings: list[tuple[Callable, Checkpoint]] = []
        self.inputs = self.controls(start)
        with gr.Row():
            label = gr.Label(label="prediction", num_top_classes=3, elem_id=f"{name}-label")
            cost = gr.HTML(elem_id=f"{name}-cost", elem_classes="cost", container=True, padding=True, min_width=240)
        self.outputs = [label, cost, gr.Plot(show_label=False, elem_id=f"{name}-blocks")]
        masks, depth = checkpoints.get("masks"), checkpoints.get("depth")
        with gr.Row():
            if masks:
                names = masks.model.config.id2label.values()
                colors = {one: SERIES[index % len(SERIES)] for index, one in enumerate(names)}
                self.show(gr.AnnotatedImage, "mask", mask, masks, color_map=colors)
            if depth:
                self.show(gr.Image, "depth: near is dark", depth_map, depth)
            if dense := masks or depth:
                self.show(gr.Image, "features as colours", features, dense)

    def show(self, component: type, label: str, draw: Callable, checkpoint: Checkpoint, **options: Any) -> None:
        name = f"{self.name}-{draw.__name__}"
        self.outputs.append(component(label=label, elem_id=name, elem_classes="picture", buttons=[], **options))
        self.drawings.append((draw, checkpoint))

    def controls(self, start: dict[str, float]) -> list[Any]:
        """Sliders for the axes or for one budget, by what is chosen, and the exit threshold."""
        main, (gflops, times) = self.main, self.main.costs()
        gflops, times = [upwards(cost, 0.001) for cost in gflops], [upwards(cost, 0.1) for cost in times]
        choices = [BY_AXES, BY_GFLOPS, BY_TIME]
        by = gr.Radio(choices, value=BY_AXES, label=f"{self.name}: choose by", elem_id=f"{self.name}-by")
        with gr.Row():
            sliders = [slider(1, main.full[axis], start[axis], 1, label=axis) for axis in AXES]
        sliders += [
            slider(*gflops, gflops[1], 0.001, label="the best within … GFLOPs", visible=False),
            slider(*times, times[1], 0.1, label="the best within … ms, as measured here", visible=False),
        ]
        threshold = slider(
            0, 1, start["exit_threshold"], 0.01, label="exit threshold: stop when this confident (1: never)"
        )
        for one, name in zip((*sliders, threshold), (*AXES, "gflops", "ms", "threshold")):
            one.elem_id = f"{self.name}-{name}"

        def visible(chosen: str) -> list[Any]:
            return [gr.update(visible=chosen == one) for one in (*[BY_AXES] * len(AXES), BY_GFLOPS, BY_TIME)]

        by.change(visible, by, sliders, show_progress="hidden", api_visibility="private")
        return [by, *sliders, threshold]

    def answer(self, path: str | None, by: str, *values: float) -> list[Any]:
        if path is None:
            return [None] * len(self.outputs)
        *axes, max_gflops, max_latency_ms, threshold = values
        call: dict[str, Any] = {
            BY_AXES: dict(zip(AXES, axes)),
            BY_GFLOPS: {"max_gflops": max_gflops},
            BY_TIME: {"max_latency_ms": max_latency_ms},
        }[by]
        call |= {"exit_threshold": threshold} if threshold < 1 else {}
        try:
            with Image.open(path) as photograph:
                answer = classify(self.main, photograph, **call)
                point = {axis: getattr(answer, axis) for axis in AXES}
                points = [one.in_proportion(point, self.main.full) for _, one in self.drawings]
                shown = [draw(one, photograph, **here) for (draw, one), here in zip(self.drawings, points)]
        except REFUSED as error:
            raise message(error) from error
        chart = draw_confidence(answer.confidences, call.get("exit_threshold"), answer.exit_depth)
        return [answer.probabilities, self.cost(answer), chart, *shown]

    def cost(self, answer: Answer) -> str:
        full, early = self.main.full, " (early exit)" * (answer.exit_depth < answer.depth)
        where = (
            f"{answer.tokens} of {full['tokens']} tokens, width {answer.width} of {full['width']}, "
            f"{answer.exit_depth} of {full['depth']} blocks{early}"
        )
        bars = (
            f"{unit} <span><b>{here:.3g}</b> of {most:.3g} ({here / most:.0%})</span>"
            f"<div class='bar'><div style='width: {min(here / most, 1):.0%}'></div></div>"
            for unit, (here, most) in (("GFLOPs", answer.gflops), ("ms", answer.milliseconds))
        )
        return f"<p>{where}</p>{''.join(bars)}"


def listed(values: list[int]) -> str:
    return f"{', '.join(map(str, values[:-1]))} and {values[-1]}"


def build(checkpoints: dict[str, Checkpoint], examples: list[str]) -> gr.Blocks:
    main, size = checkpoints["checkpoint"], checkpoints["checkpoint"].pixels(Image.new("RGB", (400, 300))).shape[-2:]
    main.model.profile(image_size=tuple(size), progress=False)
    draw_confidence([1.0])  # so that the first visitor does not wait for matplotlib
    config, granularities = main.model.config, main.model.config.token_granularities
    few = {"tokens": granularities[len(granularities) // 2], "width": config.widths[0], "depth": main.full["depth"]}
    sides = {"A": {**few, "exit_threshold": 0.9}, "B": {**main.full, "exit_threshold": 1}}
    with gr.Blocks(title="AdaPerceiver", fill_width=True) as page:
        names, blocks = [*config.id2label.values()], main.full["depth"]
        gr.Markdown(
            "# AdaPerceiver: one network, many sizes\nThe same weights run with any number of tokens, at any width and depth. "
            f"Choose, and compare two choices. `{main.name}` has {main.model.num_parameters() / 1e6:.1f} M parameters and "
            f"{len(names)} classes ({', '.join(names[:10])}{', …' * (len(names) > 10)}); it is trained for "
            f"{listed(granularities)} tokens, widths {listed(config.widths)} and 1 to {blocks} blocks."
        )
        with gr.Row():
            with gr.Column(scale=3, min_width=240):
                options = {"sources": ["upload", "clipboard"], "height": 300, "buttons": [], "elem_id": "photograph"}
                first = examples[0] if examples else None
                photograph = gr.Image(first, type="filepath", image_mode=None, label="photograph", **options)
                photograph.preprocess = forgiving(photograph.preprocess)
                if examples:
                    gr.Examples(examples, photograph, label="or pick one", examples_per_page=12)
            for name, start in sides.items():
                with gr.Column(scale=5, min_width=360):
                    side = Side(name, checkpoints, start)
                inputs = [photograph, *side.inputs]
                options = {"show_progress": "hidden", "trigger_mode": "always_last", "concurrency_id": "model"}
                triggers = [page.load, *(one.change for one in inputs)]
                gr.on(triggers, side.answer, inputs, side.outputs, api_name=name, **options)
    return page


def shipped() -> dict[str, str]:
    """What `checkpoints/`, beside this file or one above, holds: of every kind, the one for the largest images."""
    found: dict[str, tuple[int, str]] = {}
    for path in sorted([*HERE.glob("checkpoints/*/config.json"), *HERE.parent.glob("checkpoints/*/config.json")]):
        config = json.loads(path.read_text(encoding="utf-8"))
        for kind, (architecture, _) in KINDS.items():
            if architecture in config["architectures"]:
                found[kind] = max(found.get(kind, (0, "")), (config["image_size"], str(path.parent)))
    return {kind: folder for kind, (_, folder) in found.items()}


def photographs(source: str | None, names: list[str], folder: Path) -> list[str]:
    """Photographs to pick from: those of `source`, or else of `images/` and of the samples that go with the checkpoints."""
    found = [Path(source)] if source else [HERE / "images", *sorted(HERE.glob("*_samples.parquet"))]
    paths: list[Path] = []
    for one in found:
        if one.is_dir():
            paths += sorted(
                path for path in one.iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp")
            )
        elif source or any(one.stem.removesuffix("_samples") in name for name in names):
            from pyarrow import parquet

            rows = parquet.read_table(one, columns=["image"]).slice(0, 8).to_pylist()
            for index, row in enumerate(rows):
                paths.append(folder / f"{one.stem}_{index}.png")
                paths[-1].write_bytes(row["image"]["bytes"])
    return [str(path) for path in paths]


def parse(arguments: list[str] | None = None) -> tuple[dict[str, str], str | None]:
    """The folders or hub ids of the checkpoints by kind, and the source of photographs."""
    parser = argparse.ArgumentParser(description="A page to play with AdaPerceiver checkpoints.")
    parser.add_argument("checkpoint", nargs="?", help="An image classifier: a folder or hub id, whose code will run.")
    parser.add_argument("--masks", help="A checkpoint for segmentation.")
    parser.add_argument("--depth", help="A checkpoint for depth estimation.")
    parser.add_argument("--images", help="A folder of photographs, or a parquet file with a column `image`.")
    args = parser.parse_args(arguments)
    if args.images and not Path(args.images).exists():
        parser.error(f"--images {args.images} does not exist.")
    given = {kind: getattr(args, kind) for kind in KINDS if getattr(args, kind)}
    chosen = given if "checkpoint" in given else {**shipped(), **given}
    if "checkpoint" not in chosen:
        parser.error("name a CHECKPOINT: checkpoints/ holds no image classifier.")
    return chosen, args.images


if __name__ == "__main__":
    folders, source = parse()
    logging.disable_progress_bar()
    loaded = {kind: Checkpoint(folder, KINDS[kind][1]) for kind, folder in folders.items()}
    with tempfile.TemporaryDirectory() as temporary:
        examples = photographs(source, [one.name for one in loaded.values()], Path(temporary))
        build(loaded, examples).launch(**LAUNCH)
