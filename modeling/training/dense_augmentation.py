"""Random views of images with their masks or depth maps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import interpolate, pad
from transformers.hf_argparser import HfArg

from .augmentation import seed_of
from .checks import at_most_one, require
from .dense_targets import DTYPES, IGNORED


@dataclass
class DenseAugmentation:
    keep_aspect: bool = HfArg(default=False, help="Crop to the shape of the view instead of stretching.")
    scale: list[float] = HfArg(
        default_factory=lambda: [1.0, 1.0],
        help="Least and largest size; 1 just fills the view, above it is cropped, below it is padded.",
    )
    flip: bool = True
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = HfArg(default=0.1, help="0 to 0.5; the others are from 0 to 1.")

    def __post_init__(self):
        allowed = "two numbers above 0, the smaller first"
        require(self, allowed, lambda scale: len(scale) == 2 and 0 < scale[0] <= scale[1], "scale")
        at_most_one(self, "brightness", "contrast", "saturation")
        require(self, "from 0 to 0.5", lambda hue: 0 <= hue <= 0.5, "hue")


class PairedAugment:
    """
    Random views of images and their targets: the same window and flip for both, colours for the image alone.

    Images are resampled smoothly, targets by nearest neighbour; depths stay what they are, whatever the scale. Around the
    image a mask is 255 and a depth 0. Windows are taken by hand, since kornia's joint augmentation needs a batch of one size,
    and here every image has its own.
    """

    def __init__(self, args: DenseAugmentation, size: tuple[int, int], task: str):
        import kornia.augmentation as K

        self.args, self.size = args, size
        self.fill = IGNORED if task == "image-segmentation" else 0
        self.dtype = DTYPES[task]
        jitter = {name: getattr(args, name) for name in ("brightness", "contrast", "saturation", "hue")}
        joint = [K.RandomHorizontalFlip()] if args.flip else []
        joint += [K.ColorJitter(**jitter)] if any(jitter.values()) else []
        self.joint = K.AugmentationSequential(*joint, data_keys=["input", "mask"]) if joint else None

    def __call__(
        self, images: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], seed: Sequence[int]
    ) -> dict[str, torch.Tensor]:
        """
        (3, height, width) uint8 and (height, width) each -> `images` (images, 3, *size) in 0 to 1 and `labels` (images,
        *size), int64 or float32.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(*seed))
            views, labels = zip(*(self.view(*pair) for pair in zip(images, targets)))
            views, labels = torch.stack(views), torch.stack(labels)[:, None]
            if self.joint is not None:
                views, labels = self.joint(views, labels)
        return {"images": views.clamp(0, 1), "labels": labels[:, 0].to(self.dtype)}

    def view(self, image: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A window of both, in the size of the view; targets as float32, which holds classes exactly."""
        low, high = self.args.scale
        ratio = low + (high - low) * torch.rand(()).item()
        factors = [ratio * wanted / side for wanted, side in zip(self.size, target.shape)]
        if self.args.keep_aspect:
            factors = [max(factors)] * 2
        window, resized = [], []
        margins: list[int] = []
        for wanted, side, factor in zip(self.size, target.shape, factors):
            length = min(side, max(round(wanted / factor), 1))  # of the window; the whole side if it fits
            start = int(torch.randint(side - length + 1, ()))
            window.append(slice(start, start + length))
            resized.append(wanted if length < side else min(wanted, max(round(side * factor), 1)))
            before = int(torch.randint(wanted - resized[-1] + 1, ()))
            margins = [before, wanted - resized[-1] - before, *margins]  # `pad` counts from the last side
        image = interpolate(image[None][(..., *window)] / 255, resized, mode="bilinear", antialias=True)[0]
        target = interpolate(target[None, None][(..., *window)].float(), resized, mode="nearest-exact")[0, 0]
        return pad(image, margins), pad(target, margins, value=self.fill)
