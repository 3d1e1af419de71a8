"""The image processor: any image in, predictions back at the size of the image."""

import numpy as np
import PIL.Image
import pytest
import torch
from conftest import TINY, assert_equal
from transformers import AutoImageProcessor, BitImageProcessorPil
from transformers.image_utils import OPENAI_CLIP_MEAN
from transformers.modeling_outputs import DepthEstimatorOutput, SemanticSegmenterOutput
from transformers.utils import is_torchvision_available

from adaperceiver import (
    AdaPerceiverConfig,
    AdaPerceiverImageProcessor,
    AdaPerceiverImageProcessorPil,
    image_processor_for,
)


GREYS = np.tile(np.arange(0, 240, 4, dtype=np.uint8), (40, 1))  # 40 x 60
GREY = PIL.Image.fromarray(GREYS)
PICTURE = PIL.Image.effect_mandelbrot((90, 70), (-2.0, -1.2, 1.0, 1.2), 50).convert("RGB")


@pytest.fixture
def processor(tiny_config):
    return image_processor_for(tiny_config, "image-classification")


@pytest.fixture
def segmentation_processor(tiny_config):
    return image_processor_for(tiny_config, "image-segmentation")  # 72 x 72


def pixels(processor, image, **kwargs):
    return processor(image, return_tensors="pt", **kwargs).pixel_values


@pytest.mark.parametrize(
    ("changes", "task", "size", "crop"),
    [
        ({}, "image-classification", {"shortest_edge": 256}, 224),
        ({}, "image-feature-extraction", {"shortest_edge": 256}, 224),
        ({"image_size": 168}, "image-classification", {"shortest_edge": 192}, 168),
        ({"image_size": 112}, "image-classification", {"shortest_edge": 112}, 112),
        ({"image_size": 32, "patch_size": 4}, "image-classification", {"shortest_edge": 32}, 32),
        ({}, "image-segmentation", {"height": 518, "width": 518}, None),
        ({}, "depth-estimation", {"height": 448, "width": 602}, None),
        ({"patch_size": 16}, "image-segmentation", {"height": 512, "width": 512}, None),
        ({"patch_size": 16}, "depth-estimation", {"height": 448, "width": 608}, None),
        ({"image_size": 518}, "image-segmentation", {"height": 518, "width": 518}, None),
        ({"image_size": 32, "patch_size": 8}, "image-segmentation", {"height": 72, "width": 72}, None),
    ],
)
def test_sizes_are_the_papers_in_whole_patches(changes, task, size, crop):
    processor = image_processor_for(AdaPerceiverConfig(**changes), task)
    assert dict(processor.size) == size
    assert processor.do_center_crop == (crop is not None)
    assert processor.do_reduce_labels == (task == "image-segmentation")
    if crop is not None:
        assert dict(processor.crop_size) == {"height": crop, "width": crop}


@pytest.mark.parametrize("task", ["image-classification", "image-segmentation", "depth-estimation"])
def test_the_normalisation_is_that_of_the_config(task):
    own = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    processor = image_processor_for(AdaPerceiverConfig(**own), task)
    assert {name: list(getattr(processor, name)) for name in own} == own
    assert list(image_processor_for(AdaPerceiverConfig(), task).image_mean) == OPENAI_CLIP_MEAN


def test_other_tasks_are_refused_with_those_allowed(tiny_config):
    with pytest.raises(
        ValueError, match=r"`task` must be one of image-feature-extraction, .*, got 'object-detection'"
    ):
        image_processor_for(tiny_config, "object-detection")


def test_plain_images_come_out_as_from_transformers():
    stock = BitImageProcessorPil(size={"shortest_edge": 256})  # with the normalisation of CLIP, which is the paper's
    assert_equal(pixels(AdaPerceiverImageProcessorPil(), PICTURE), pixels(stock, PICTURE))


IN_OTHER_MODES = {
    "RGB": GREY.convert("RGB"),
    "LA": GREY.convert("LA"),
    "RGBA": GREY.convert("RGBA"),
    "P": GREY.convert("P"),
    "CMYK": GREY.convert("RGB").convert("CMYK"),
    "I;16": PIL.Image.fromarray(GREYS.astype(np.uint16) * 257),
    "I": GREY.convert("I"),
    "I, 16 bits": PIL.Image.fromarray(GREYS.astype(np.int32) * 257),
    "F": GREY.convert("F"),
    "F, up to 1": PIL.Image.fromarray((GREYS / 255).astype(np.float32)),
    "array": GREYS[..., None],
    "array, 16 bits": GREYS[..., None].astype(np.uint16) * 257,
    "tensor": torch.from_numpy(np.stack([GREYS] * 3)),
}


@pytest.mark.parametrize("image", IN_OTHER_MODES.values(), ids=IN_OTHER_MODES)
def test_an_image_looks_the_same_in_every_mode(processor, image):
    assert_equal(pixels(processor, image), pixels(processor, GREY))


def test_black_and_white_images_are_black_and_white(processor):
    stripes = PIL.Image.fromarray(GREYS > 100)
    assert stripes.mode == "1"
    assert_equal(pixels(processor, stripes), pixels(processor, stripes.convert("L")))


def test_white_shows_through_transparent_images(processor):
    clear = PIL.Image.new("RGBA", (40, 40), (200, 0, 0, 0))
    assert_equal(pixels(processor, clear), pixels(processor, PIL.Image.new("RGB", (40, 40), "white")))


@pytest.mark.parametrize("value", [-1, 65536, float("nan")])
def test_brightness_without_meaning_is_refused(processor, value):
    image = PIL.Image.fromarray(np.full((4, 4), value, dtype=np.float32))
    with pytest.raises(ValueError, match="mode F must have values from 0 to 65535, got"):
        processor(image)


def test_images_are_turned_upright_from_files_and_in_memory(processor, tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise to be seen
    PICTURE.save(tmp_path / "turned.png", exif=exif)
    upright = pixels(processor, PICTURE.transpose(PIL.Image.Transpose.ROTATE_270))
    assert_equal(pixels(processor, PIL.Image.open(tmp_path / "turned.png")), upright)
    assert_equal(pixels(processor, str(tmp_path / "turned.png")), upright)


@pytest.mark.parametrize("task", ["image-classification", "image-segmentation", "depth-estimation"])
def test_images_of_any_size_come_out_at_the_size_of_the_model(tiny_config, task):
    processor = image_processor_for(tiny_config, task)
    size = {"image-classification": (32, 32), "image-segmentation": (72, 72), "depth-estimation": (64, 88)}[task]
    mixed = [PIL.Image.new("RGB", sides, "red") for sides in [(1, 1), (1, 7), (7, 1), (3, 3), (300, 2)]]
    assert pixels(processor, [*mixed, PICTURE, GREYS[None]]).shape == (7, 3, *size)


CLASSES = np.kron(np.array([[0, 1], [150, 255]], dtype=np.uint8), np.ones((35, 45), dtype=np.uint8))  # 70 x 90


def in_palette(classes):
    image = PIL.Image.fromarray(classes).convert("P")
    image.putdata(classes.flatten().tolist())
    return image


@pytest.mark.parametrize("form", [np.array, PIL.Image.fromarray, in_palette, torch.from_numpy, np.int64])
def test_label_maps_keep_to_their_classes_and_follow_their_images(segmentation_processor, form):
    labels = segmentation_processor(PICTURE, form(CLASSES), return_tensors="pt").labels
    expected = torch.tensor([[255, 0], [149, 255]]).repeat_interleave(36, 0).repeat_interleave(36, 1)
    assert_equal(labels, expected[None])
    kept = segmentation_processor(PICTURE, form(CLASSES), do_reduce_labels=False, return_tensors="pt").labels
    assert kept.unique().tolist() == [0, 1, 150, 255]


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ([CLASSES, CLASSES], "must be one per image, got 2 for 1 images"),
        (CLASSES.astype(int) + 1, "classes from 0 to 255, got shape .* with values 1 to 256"),
        (CLASSES[:-1], r"must be as large as their images, got \(\d+, \d+\) for an image of \(70, 90\)"),
        (PICTURE, r"must be of shape \(height, width\) .*, got shape \(70, 90, 3\)"),
    ],
)
def test_label_maps_that_cannot_be_are_refused(segmentation_processor, maps, message):
    with pytest.raises(ValueError, match=f"`segmentation_maps` .*{message}"):
        segmentation_processor(PICTURE, maps)


SIZES = [(70, 90), (1, 1), (5, 1)]


def test_segmentations_come_back_at_the_sizes_of_the_images(segmentation_processor):
    logits = torch.randn(3, 4, 8, 8)
    outputs = SemanticSegmenterOutput(logits=logits)
    maps = segmentation_processor.post_process_semantic_segmentation(outputs, target_sizes=SIZES)
    assert [tuple(segmentation.shape) for segmentation in maps] == SIZES
    same_size = segmentation_processor.post_process_semantic_segmentation(outputs)
    assert_equal(torch.stack(same_size), logits.argmax(1))


@pytest.mark.parametrize("sizes", [SIZES, torch.tensor(SIZES)], ids=["list", "tensor"])
def test_depths_come_back_at_the_sizes_of_the_images_within_their_range(processor, sizes):
    depths = torch.rand(3, 8, 8, dtype=torch.bfloat16)
    outputs = DepthEstimatorOutput(predicted_depth=depths)
    results = [item["predicted_depth"] for item in processor.post_process_depth_estimation(outputs, sizes)]
    assert [tuple(result.shape) for result in results] == SIZES
    assert all(result.dtype == torch.float32 for result in results)
    assert all(depth.min() <= result.min() <= result.max() <= depth.max() for depth, result in zip(depths, results))
    unchanged = processor.post_process_depth_estimation(outputs)
    assert_equal(torch.stack([item["predicted_depth"] for item in unchanged]), depths.float())
    with pytest.raises(
        ValueError, match=r"`target_sizes` must be one \(height, width\) per image, got 2 for 3 images"
    ):
        processor.post_process_depth_estimation(outputs, sizes[:2])


def test_the_auto_class_finds_a_saved_processor_in_both_backends(segmentation_processor, tmp_path):
    segmentation_processor.save_pretrained(tmp_path)
    for name, kind in {"torchvision": AdaPerceiverImageProcessor, "pil": AdaPerceiverImageProcessorPil}.items():
        loaded = AutoImageProcessor.from_pretrained(tmp_path, backend=name)
        assert type(loaded) is kind
        assert loaded.to_json_string() == segmentation_processor.to_json_string()
    assert AutoImageProcessor.from_pretrained(tmp_path).backend == segmentation_processor.backend


@pytest.mark.skipif(not is_torchvision_available(), reason="compares torchvision with Pillow")
@pytest.mark.parametrize("task", ["image-classification", "image-segmentation", "depth-estimation"])
def test_both_backends_agree(task):
    processor = image_processor_for(AdaPerceiverConfig(**TINY), task)
    pillow = AdaPerceiverImageProcessorPil.from_dict(processor.to_dict())
    assert (processor.backend, pillow.backend) == ("torchvision", "pil")
    sizes = [(90, 70), (70, 90), (500, 400), (40, 300), (300, 40), (49, 370), (1, 1)]
    for image in (GREY, *(PICTURE.resize(size) for size in sizes)):
        torch.testing.assert_close(pixels(processor, image), pixels(pillow, image), rtol=0, atol=0.03)
    maps = [backend(PICTURE, CLASSES, return_tensors="pt").labels for backend in (processor, pillow)]
    assert_equal(*maps)
