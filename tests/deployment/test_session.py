"""What the session of a bundle does by itself, without a runtime: images in, and no library but numpy and Pillow."""

import ast
import sys

import numpy as np
import PIL.Image
import pytest
from conftest import TINY

from adaperceiver import AdaPerceiverConfig, AdaPerceiverImageProcessorPil, image_processor_for
from adaperceiver.deployment import session
from adaperceiver.deployment.export import preprocessing_of


def photograph(mode="RGB", size=(50, 41)):
    """Noise in large patches: resampling it is neither trivial nor chaotic."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)
    image = PIL.Image.fromarray(pixels, "RGBA").resize(size, PIL.Image.Resampling.BICUBIC)
    if mode == "I;16":
        return PIL.Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    return image.convert(mode)


@pytest.mark.parametrize("task", ["image-classification", "image-segmentation", "depth-estimation"])
@pytest.mark.parametrize("size", [(50, 41), (41, 50), (32, 32), (20, 64), (400, 300)], ids=str)
def test_images_are_prepared_as_by_the_processor(task, size):
    config = AdaPerceiverConfig(**{**TINY, "image_size": 144})  # with a margin around the crop
    processor = AdaPerceiverImageProcessorPil(**image_processor_for(config, task).to_dict())
    image = photograph(size=size)
    expected = processor(image, return_tensors="np").pixel_values[0]
    np.testing.assert_allclose(session.prepare(image, preprocessing_of(processor)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "CMYK", "I;16", "F"])
def test_images_of_any_mode_are_prepared_as_by_the_processor(mode):
    image = photograph("L").convert("F") if mode == "F" else photograph(mode)
    processor = AdaPerceiverImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    expected = processor(image, return_tensors="np").pixel_values[0]
    np.testing.assert_allclose(session.prepare(image, preprocessing_of(processor)), expected, rtol=0, atol=1e-6)


def test_images_are_turned_as_their_camera_says_and_padded_where_they_are_too_small():
    image = photograph(size=(20, 12))
    image.getexif()[0x0112] = 6
    processor = AdaPerceiverImageProcessorPil(do_resize=False, crop_size={"height": 32, "width": 30})
    expected = processor(image, return_tensors="np").pixel_values[0]
    np.testing.assert_allclose(session.prepare(image, preprocessing_of(processor)), expected, rtol=0, atol=1e-6)


def test_arrays_are_images_too():
    image, options = photograph(), preprocessing_of(AdaPerceiverImageProcessorPil())
    np.testing.assert_array_equal(session.prepare(np.asarray(image), options), session.prepare(image, options))


def test_the_session_imports_nothing_that_a_bundle_does_not_bring():
    with open(session.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    needed = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert needed == {"numpy", "PIL", "onnxruntime", "openvino"}


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("cat.png", "`images` must be PIL images or arrays, got str"),
        (np.zeros((4, 4, 3)), r"`images` must be 8- or 16-bit arrays .* got float64 of shape \(4, 4, 3\)"),
    ],
    ids=str,
)
def test_what_is_no_image_is_named(image, message):
    with pytest.raises(ValueError, match=message):
        session.prepare(image, preprocessing_of(AdaPerceiverImageProcessorPil()))


def test_a_folder_without_a_bundle_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"`folder` must be a bundle, with a manifest\.json, got "):
        session.AdaptiveSession(tmp_path)
    with pytest.raises(ValueError, match="`runtime` must be one of onnxruntime, openvino, got 'tensorrt'"):
        session.AdaptiveSession(tmp_path, runtime="tensorrt")
