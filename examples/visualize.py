"""
Pictures of what happens inside a checkpoint, on your photographs.

    python examples/visualize.py --model MODEL --images photograph.jpg another.png --output runs/pictures

What a checkpoint can show depends on its head: every one what its first and last latents read; a classifier who exits when; a model
with dense output tokens its features as colours over tokens, width and depth, and what more tokens change in a mask or depth map.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from PIL import Image, UnidentifiedImageError
from transformers import AutoImageProcessor
from transformers.hf_argparser import HfArg

import adaperceiver
from adaperceiver.evaluation.grid import without_choices
from adaperceiver.evaluation.pictures import draw_changes, draw_exits, draw_features, draw_read
from adaperceiver.evaluation.style import save
from adaperceiver.training.arguments import Parser, command_line
from adaperceiver.training.checks import above_zero, at_most_one, check_checkpoint, check_config, check_output, require
from adaperceiver.training.devices import DeviceArguments


@dataclass
class Arguments:
    model: str = HfArg(help="A hub id or folder of an AdaPerceiver checkpoint with a head.")
    images: list[str] = HfArg(help="Photographs.")
    output: str = HfArg(default="runs/pictures", help="Folder for the figures.")
    exit_threshold: float = HfArg(default=0.9, help="For the gallery of exits (classification).")

    def __post_init__(self):
        require(self, "at least one photograph", len, "images")
        above_zero(self, "exit_threshold")
        at_most_one(self, "exit_threshold")
        check_output(self, "output")


def open_photograph(path: str) -> Image.Image:
    try:
        return Image.open(path).convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise ValueError(f"--images {path} is no photograph that can be read: {error}") from error


def ladder(config: Any) -> dict[str, dict[str, int]]:
    """The full model, then each axis at its smallest and halfway."""
    tokens, widths, last = config.token_granularities, config.widths, config.num_hidden_layers
    points: dict[str, dict[str, int]] = {"full model": {}}
    for axis, values in (("tokens", tokens), ("width", widths), ("depth", range(1, last + 1))):
        for value in sorted({values[0], values[len(values) // 2]} - {values[-1]}):
            points[f"{axis} {value}"] = {axis: value}
    return points


def main(arguments: list[str]) -> None:
    args, devices = Parser([Arguments, DeviceArguments]).parse(arguments)
    transformers.logging.disable_progress_bar()
    photographs = [open_photograph(path) for path in args.images]
    check_checkpoint("model", args.model, adaperceiver=True)
    config = check_config("model", {}, args.model)
    (architecture,) = config.architectures or [None]
    if not hasattr(adaperceiver, str(architecture)):
        raise ValueError(f"--model {args.model} must be a checkpoint of AdaPerceiver, it is of {architecture}.")
    device = devices.start()
    model = getattr(adaperceiver, architecture).from_pretrained(args.model).eval().to(device.device)
    model.adaptive_config = without_choices(model.adaptive_config)
    processor = AutoImageProcessor.from_pretrained(args.model)

    shown = (model, processor, photographs)
    with device.autocast():
        figures = {"read": draw_read(*shown, tokens=config.max_latent_tokens)}
        if model.base_model.dense_readout is not None:
            figures["features"] = draw_features(*shown, ladder(config))
        if isinstance(
            model, (adaperceiver.AdaPerceiverForSemanticSegmentation, adaperceiver.AdaPerceiverForDepthEstimation)
        ):
            figures["changes"] = draw_changes(*shown, config.token_granularities)
        if model.exits_early:
            figures["exits"] = draw_exits(*shown, args.exit_threshold)
    for name, figure in figures.items():
        save(figure, Path(args.output) / f"{name}.png")
    print(f"{', '.join(f'{name}.png' for name in figures)} are in {args.output}.")


if __name__ == "__main__":
    command_line(main)
