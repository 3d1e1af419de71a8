# Copyright 2026 The AdaPerceiver for Hugging Face authors.
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with the License.
# You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0 Unless required by applicable law or agreed
# to in writing, software distributed under the License is distributed on an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF
# ANY KIND, either express or implied. See the License for the specific language governing permissions and limitations under the
# License.

"""Images to pixel values, and predictions back to the size of the images: transformers' own processors, made to take any image."""

# First, since it checks the version of transformers.
from .configuration_adaperceiver import AdaPerceiverConfig, replace_links


# isort: split
import os
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from huggingface_hub.utils import httpx
from transformers.image_processing_backends import PilBackend, TorchvisionBackend
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.image_transforms import convert_to_rgb, get_resize_output_image_size
from transformers.image_utils import (
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
    ChannelDimension,
    ImageInput,
    PILImageResampling,
    SizeDict,
    load_image,
)
from transformers.models.segformer.image_processing_pil_segformer import SegformerImageProcessorPil
from transformers.processing_utils import ImagesKwargs, Unpack
from transformers.utils import TensorType, is_torchvision_available

from .tasks_adaperceiver import TASKS


IGNORE_INDEX = 255  # the label of ignored pixels
# What the paper's model (224 pixels) is evaluated at: (height, width) on ADE20K and NYUv2.
DENSE_SIZES = {"image-segmentation": (518, 518), "depth-estimation": (448, 602)}


def open_image(source: str, timeout: float | None = None) -> PIL.Image.Image:
    """Open a file or an address as it is stored: `load_image` would turn it to 8 bits, and 16-bit images to white."""
    if source.startswith(("http://", "https://")):
        return PIL.Image.open(BytesIO(httpx.get(source, timeout=timeout, follow_redirects=True).content))
    return PIL.Image.open(source) if os.path.isfile(source) else load_image(source)  # base64, or an error that says so


def to_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """The image upright, in 8-bit RGB, whatever its mode; white shows through where it is transparent."""
    image = PIL.ImageOps.exif_transpose(image)
    if image.mode[0] in "IF":  # I;16, I, F: more than 8 bits
        image = PIL.Image.fromarray(to_8_bits(np.asarray(image), image.mode))
    return PIL.Image.fromarray(convert_to_rgb(image, return_numpy=True))


def to_8_bits(values: np.ndarray, mode: str = "I;16") -> np.ndarray:
    """
    Scale to 0..255. Modes I and F do not say how bright white is: the first of 1 (F only), 255 and 65535 that no pixel
    exceeds.
    """
    low, high = values.min(), values.max()
    if not 0 <= low <= high <= 65535:
        raise ValueError(f"Images of mode {mode} must have values from 0 to 65535, got {low} to {high}.")
    whites = {"I": (255, 65535), "F": (1, 255, 65535)}.get(mode, (65535,))
    white = next(white for white in whites if high <= white)
    return np.round(values * (255 / white)).astype(np.uint8)


class AdaPerceiverImageProcessorKwargs(ImagesKwargs, total=False):  # type: ignore[call-arg]  # mypy sees no TypedDict
    """Arguments of the processor and of its call: those of every image processor of transformers, and one of Segformer's."""

    do_reduce_labels: bool


if TYPE_CHECKING:
    from transformers.image_processing_backends import TorchvisionBackend as Base
else:
    Base = object  # one backend or the other


class AdaPerceiverImageProcessing(Base):
    """
    What AdaPerceiver adds to a backend of transformers: images of any mode and orientation, label maps beside them, and
    both kinds of dense predictions. The defaults are those of the paper's classifier; `image_processor_for` has the others.
    """

    valid_kwargs = AdaPerceiverImageProcessorKwargs
    resample = PILImageResampling.BICUBIC
    image_mean = OPENAI_CLIP_MEAN
    image_std = OPENAI_CLIP_STD
    size = {"shortest_edge": 256}
    default_to_square = False
    crop_size = {"height": 224, "width": 224}
    do_resize = True
    do_center_crop = True
    do_rescale = True
    do_normalize = True
    do_convert_rgb = True
    do_reduce_labels = False

    def fetch_images(self, sources: Any) -> Any:
        """Open those of `sources` (an image, a path or an address, or lists of them) that are not images yet."""
        if isinstance(sources, str):
            return open_image(sources)
        return super().fetch_images(sources)

    def process_image(self, image: Any, do_convert_rgb: bool | None = None, **kwargs) -> Any:
        if isinstance(image, PIL.Image.Image):
            image = to_rgb(image) if do_convert_rgb else PIL.ImageOps.exif_transpose(image)
        elif str(image.dtype).endswith("uint16"):  # numpy's or torch's
            image = to_8_bits(np.asarray(image))
        return super().process_image(image, do_convert_rgb=do_convert_rgb, **kwargs)

    def preprocess(
        self,
        images: ImageInput,
        segmentation_maps: ImageInput | None = None,
        **kwargs: Unpack[AdaPerceiverImageProcessorKwargs],
    ) -> BatchFeature:
        """
        Images to `pixel_values`; `segmentation_maps`, one class from 0 to 255 per pixel, to `labels` of the same size.

        With `do_reduce_labels` pixels of class 0 are ignored (255), and the others move down by one.
        """
        return super().preprocess(images, segmentation_maps, **kwargs)

    def _preprocess_image_like_inputs(
        self,
        images: ImageInput,
        segmentation_maps: ImageInput | None,
        do_reduce_labels: bool,
        return_tensors: str | TensorType | None,
        **kwargs,
    ) -> BatchFeature:
        images = self._prepare_image_like_inputs(images, **kwargs)
        data = self._preprocess(images, return_tensors=None, **kwargs)
        if segmentation_maps is not None:
            maps = self._prepare_images_structure(segmentation_maps, expected_ndims=2)
            if len(maps) != len(data["pixel_values"]):
                raise ValueError(
                    f"`segmentation_maps` must be one per image, got {len(maps)} for {len(data['pixel_values'])} images."
                )
            maps = [label_map(segmentation_map, do_reduce_labels) for segmentation_map in maps]
            for image, labels in zip(images, maps):
                if tuple(image.shape[-2:]) != labels.shape:
                    raise ValueError(
                        f"`segmentation_maps` must be as large as their images, got {labels.shape} for an image of "
                        f"{tuple(image.shape[-2:])}."
                    )
            maps = self._prepare_image_like_inputs(maps, expected_ndims=2, input_data_format=ChannelDimension.FIRST)
            as_labels = {"resample": PILImageResampling.NEAREST, "do_rescale": False, "do_normalize": False}
            labels = self._preprocess(maps, return_tensors=None, **{**kwargs, **as_labels})["pixel_values"]
            data["labels"] = [np.asarray(label)[0].astype(np.int64) for label in labels]
        return BatchFeature(data=dict(data), tensor_type=return_tensors)

    post_process_semantic_segmentation = SegformerImageProcessorPil.post_process_semantic_segmentation

    def post_process_depth_estimation(
        self, outputs: Any, target_sizes: list[tuple[int, int]] | torch.Tensor | None = None
    ) -> list[dict[str, torch.Tensor]]:
        """
        One `{"predicted_depth": (height, width)}` per image, in metres and float32; resized (bilinear, which stays within
        the range of depths) to its `(height, width)` of `target_sizes`, if given.
        """
        depths = outputs.predicted_depth.float()
        if target_sizes is None:
            return [{"predicted_depth": depth} for depth in depths]
        if len(target_sizes) != len(depths):
            raise ValueError(
                f"`target_sizes` must be one (height, width) per image, got {len(target_sizes)} for {len(depths)} images."
            )
        sizes = [tuple(int(side) for side in size) for size in target_sizes]
        resized = [
            torch.nn.functional.interpolate(depth[None, None], size=size, mode="bilinear", align_corners=False)[0, 0]
            for depth, size in zip(depths, sizes)
        ]
        return [{"predicted_depth": depth} for depth in resized]

    def save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs) -> Any:
        replace_links(save_directory)
        return super().save_pretrained(os.fspath(save_directory), *args, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        # Whoever saves the processor (a pipeline, a trainer), the folder keeps pointing at this file.
        classes = {"torchvision": "AdaPerceiverImageProcessor", "pil": "AdaPerceiverImageProcessorPil"}
        references = {backend: f"image_processing_adaperceiver.{name}" for backend, name in classes.items()}
        return {**super().to_dict(), "auto_map": {"AutoImageProcessor": references}}


def label_map(segmentation_map: Any, reduce_labels: bool) -> np.ndarray:
    """A segmentation map (image, array or tensor) as 8-bit labels `(height, width)`, upright."""
    if isinstance(segmentation_map, PIL.Image.Image):
        segmentation_map = PIL.ImageOps.exif_transpose(segmentation_map)
    labels = np.asarray(segmentation_map)
    if labels.ndim != 2 or labels.min() < 0 or labels.max() > 255:
        raise ValueError(
            "`segmentation_maps` must be of shape (height, width) with classes from 0 to 255, got shape "
            f"{labels.shape} with values {labels.min()} to {labels.max()}."
        )
    labels = labels.astype(np.uint8)
    if reduce_labels:
        labels = np.where((labels == 0) | (labels == IGNORE_INDEX), IGNORE_INDEX, labels - 1).astype(np.uint8)
    return labels


class AdaPerceiverImageProcessorPil(AdaPerceiverImageProcessing, PilBackend):
    """Image processor of AdaPerceiver, on Pillow and numpy."""

    def resize(self, image: np.ndarray, size: SizeDict, resample: Any = None, **kwargs) -> np.ndarray:
        # The values are clipped after each axis, and Pillow starts with the cheaper one: with the width, as torch does.
        if size.shortest_edge and not size.longest_edge:
            sides = get_resize_output_image_size(
                image, size.shortest_edge, default_to_square=False, input_data_format=ChannelDimension.FIRST
            )
            size = SizeDict(height=sides[0], width=sides[1])
        if size.height and size.width:
            image = super().resize(image, SizeDict(height=image.shape[-2], width=size.width), resample, **kwargs)
        return super().resize(image, size, resample, **kwargs)


if is_torchvision_available():

    class AdaPerceiverImageProcessor(AdaPerceiverImageProcessing, TorchvisionBackend):
        """Image processor of AdaPerceiver, on torchvision."""

else:

    class AdaPerceiverImageProcessor(AdaPerceiverImageProcessorPil):  # type: ignore[no-redef]  # one of the two
        """Image processor of AdaPerceiver, on Pillow and numpy, since there is no torchvision here."""


def image_processor_for(config: AdaPerceiverConfig, task: str) -> BaseImageProcessor:
    """
    The preprocessing of the paper for the model of `config`, with the normalisation of `config` if it names one.

    - Classification and features: the shorter side to 256, the centre 224 x 224; in proportion for another `image_size`.
      Models of up to 128 pixels see small images whole: the shorter side to `image_size`, no margin.
    - Segmentation (as ADE20K, labels reduced) to 518 x 518 and depth (as NYUv2) to 448 x 602; in proportion for models of
      less than 224 pixels, and rounded to whole patches.
    """
    side, patch = config.image_size, config.patch_size
    if task not in TASKS:
        raise ValueError(f"`task` must be one of {', '.join(TASKS)}, got {task!r}.")
    named = {name: getattr(config, name) for name in ("image_mean", "image_std")}
    options = {name: list(values) for name, values in named.items() if values is not None}
    if task not in DENSE_SIZES:
        resized = side if side <= 128 else round(side * 256 / 224)
        crop_size = {"height": side, "width": side}
        return AdaPerceiverImageProcessor(size={"shortest_edge": resized}, crop_size=crop_size, **options)
    scale = min(1, side / 224)
    height, width = (max(1, round(scale * length / patch)) * patch for length in DENSE_SIZES[task])
    return AdaPerceiverImageProcessor(
        size={"height": height, "width": width},
        do_center_crop=False,
        do_reduce_labels=task == "image-segmentation",
        **options,
    )


__all__ = ["AdaPerceiverImageProcessor", "AdaPerceiverImageProcessorPil", "image_processor_for"]
