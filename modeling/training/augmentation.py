"""Random views of images."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers.hf_argparser import HfArg

from .checks import at_least, at_most_one, require


@dataclass
class AugmentationArguments:
    crop_scale: list[float] = HfArg(
        default_factory=lambda: [0.08, 1.0], help="Least and largest area of random resized crops."
    )
    flip: bool = True
    randaugment_ops: int = 2
    randaugment_magnitude: int = HfArg(default=15, help="0 to 30; 0 turns RandAugment off.")
    mixup_alpha: float = 1.0
    cutmix_alpha: float = 0.0
    erasing: float = HfArg(default=0.0, help="Probability of random erasing.")

    def __post_init__(self):
        allowed = "two numbers from 0 to 1, the smaller first"
        require(self, allowed, lambda scale: len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1, "crop_scale")
        at_least(self, 1, "randaugment_ops")
        require(self, "from 0 to 30", lambda magnitude: 0 <= magnitude <= 30, "randaugment_magnitude")
        at_least(self, 0, "mixup_alpha", "cutmix_alpha")
        at_most_one(self, "erasing")


def seed_of(*numbers: int) -> int:
    """One seed from several numbers: that of the run and a step, say."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


class Augment:
    """Random views of images, by kornia: batched where sizes agree, seeded, in values from 0 to 1."""

    group = 8  # images that share the operations of one RandAugment draw

    def __init__(self, args: AugmentationArguments, image_size: int):
        import kornia.augmentation as K
        from kornia.augmentation.auto import RandAugment

        self.args, self.size = args, image_size
        self.crop = K.RandomResizedCrop((image_size, image_size), scale=tuple(args.crop_scale))
        self.flip = K.RandomHorizontalFlip() if args.flip else None
        magnitude = args.randaugment_magnitude
        self.randaugment = RandAugment(n=args.randaugment_ops, m=magnitude) if magnitude else None
        self.erasing = K.RandomErasing(p=args.erasing) if args.erasing else None
        alpha = args.cutmix_alpha
        self.cutmix = (
            K.RandomCutMixV2(beta=alpha, use_correct_lambda=True, data_keys=["input", "class"]) if alpha else None
        )

    def __call__(
        self, images: Sequence[torch.Tensor], labels: Sequence[int] | torch.Tensor, seed: Sequence[int]
    ) -> dict[str, torch.Tensor]:
        """
        (3, height, width) uint8 each -> `images` (images, 3, image_size, image_size). Where two were mixed, an image shows
        `share` of its own label and `1 - share` of `other_labels`.
        """
        labels = torch.as_tensor(labels)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(*seed))
            views = self.cropped(images)
            views = views if self.flip is None else self.flip(views)
            if self.randaugment is not None:
                views = torch.cat([self.randaugment(few) for few in views.split(self.group)])
            views = views if self.erasing is None else self.erasing(views)
            views, other_labels, share = self.mix(views.clamp(0, 1), labels)
        return {"images": views, "labels": labels, "other_labels": other_labels, "share": share}

    def cropped(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """Images of one size are cropped together."""
        by_size: dict[torch.Size, list[int]] = {}
        for place, image in enumerate(images):
            by_size.setdefault(image.shape, []).append(place)
        crops = [self.crop(torch.stack([images[place] for place in places]) / 255) for places in by_size.values()]
        return torch.cat(crops)[
            torch.argsort(torch.tensor([place for places in by_size.values() for place in places]))
        ]

    def mix(self, views: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mixup or CutMix (one of them by chance if both are on) with another image of the batch."""
        mixup, count = self.args.mixup_alpha, len(views)
        if self.cutmix is not None and (not mixup or torch.rand(()) < 0.5):
            views, mixed = self.cutmix(views, labels)  # (1, images, 3): label, other label, share of the first
            return views, mixed[0, :, 1].long(), mixed[0, :, 2]
        if not mixup:
            return views, labels, torch.ones(count)
        # kornia's Mixup draws from a range, not from Beta(alpha, alpha)
        share = torch.distributions.Beta(mixup, mixup).sample((count,))
        own = share[:, None, None, None]
        return own * views + (1 - own) * views.roll(1, dims=0), labels.roll(1), share
