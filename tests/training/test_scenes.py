"""The scenes that the training scripts run on by default: one generator for classes, masks and depth, and its teacher."""

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification

from adaperceiver.training.scenes import LABELS, MASK_LABELS, scene, scenes, teacher


@pytest.fixture(scope="module")
def many():
    return [scene(index) for index in range(500)]


@pytest.fixture(scope="module")
def validation():
    return scenes(12, split="validation")


def test_a_scene_is_the_same_whenever_it_is_made(many):
    for index in (499, 0, 250):
        again = scene(index)
        assert again.keys() == many[index].keys()
        assert all(np.array_equal(again[name], many[index][name]) for name in again)


def test_the_pixels_of_a_seed_stay_what_they_are():
    image = scene(3, seed=1, size=16)["image"]
    assert image[::5, ::5, 0].tolist() == [[30, 32, 41, 40], [42, 87, 91, 36], [31, 11, 25, 27], [21, 14, 19, 21]]


@pytest.mark.parametrize("other", [{"index": 1}, {"seed": 1}])
def test_another_index_or_seed_is_another_scene(other):
    assert not np.array_equal(scene(**{"index": 0, "seed": 0, **other})["mask"], scene(0)["mask"])


def test_a_larger_image_shows_the_same_scene():
    for index in range(20):  # the centres of the small image's pixels are among the large one's
        small, large = scene(index, size=32), scene(index, size=96)
        assert small["label"] == large["label"]
        assert (small["mask"] == large["mask"][1::3, 1::3]).mean() > 0.99
        assert np.isclose(small["depth"], large["depth"][1::3, 1::3]).mean() > 0.99


def test_the_label_is_the_kind_of_the_nearest_object(many):
    for one in many:
        objects = one["mask"] > 0
        nearest = objects & (one["depth"] == one["depth"][objects].min())
        assert set(one["mask"][nearest]) == {MASK_LABELS.index(LABELS[one["label"]])}
        assert nearest.sum() >= 12


def test_nothing_covers_the_nearest_object(many):
    squares = [one for one in many if LABELS[one["label"]] == "square"]
    for one in squares:
        objects = one["mask"] > 0
        rows, columns = np.nonzero(objects & (one["depth"] == one["depth"][objects].min()))
        assert len(rows) == (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
    assert len(squares) > 25


def test_objects_stand_in_front_of_the_background(many):
    for one in many:  # the depth of the background depends on the row alone
        background = np.where(one["mask"] == 0, one["depth"], 0).max(axis=1, keepdims=True)
        rows = (background > 0)[:, 0]
        assert (one["depth"] <= background * (1 + 1e-6))[rows].all()


def test_depth_is_metres_within_the_room(many):
    depth = np.stack([one["depth"] for one in many])
    assert depth.dtype == np.float32
    assert depth.min() > 0.5
    assert 9 < depth.max() <= 10


def test_kinds_are_even_among_labels_and_masks(many):
    shares = np.bincount([one["label"] for one in many], minlength=len(LABELS)) / len(many)
    assert 0.06 < shares.min() <= shares.max() < 0.14
    pixels = np.bincount(np.stack([one["mask"] for one in many]).ravel(), minlength=len(MASK_LABELS))
    assert len(pixels) == len(MASK_LABELS)
    assert 0.6 < pixels[0] / pixels.sum() < 0.9
    assert pixels.min() / pixels.sum() > 0.005


def test_the_dataset_holds_the_scenes_in_types_that_formats_keep(validation):
    assert validation.features["label"].names == LABELS
    formatted = validation.with_format("torch")
    for row, tensors, index in zip(validation, formatted, range(2**31, 2**31 + len(validation))):
        expected = scene(index)
        assert row["image"].mode == "RGB"
        assert row["mask"].mode == "L"
        assert np.array_equal(row["image"], expected["image"])
        assert np.array_equal(row["mask"], expected["mask"])
        assert row["label"] == expected["label"]
        assert tensors["depth"].dtype == torch.float32
        assert np.array_equal(tensors["depth"], expected["depth"])


def test_a_scene_does_not_depend_on_how_many_there_are(validation):
    assert scenes(5, split="validation")[:] == validation[:5]


def test_splits_share_no_image(many, validation):
    train = {one["image"].tobytes() for one in many}
    assert len(train) == len(many)
    assert train.isdisjoint(np.asarray(image).tobytes() for image in validation["image"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 1, "split": "test"}, "`split` must be one of train, validation, got 'test'"),
        ({"count": 0}, "`count` must be from 1 to 2147483648, got 0"),
    ],
)
def test_errors_name_the_argument_and_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenes(**arguments)


def test_the_teacher_is_an_ordinary_folder_that_is_trained_once(tmp_path, validation, capsys):
    state = torch.get_rng_state()
    folder = teacher(tmp_path / "new" / "teacher", count=64, epochs=1, batch_size=32)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(folder.parent.iterdir()) == [folder]
    assert "accuracy on 64 validation scenes" in capsys.readouterr().out

    model = AutoModelForImageClassification.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    assert list(model.config.id2label.values()) == LABELS
    assert model.num_parameters() < 200_000
    train = torch.stack([processor(scene(i)["image"], return_tensors="pt").pixel_values[0] for i in range(64)])
    torch.testing.assert_close(train.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-3)
    torch.testing.assert_close(train.std((0, 2, 3)), torch.ones(3), rtol=0, atol=1e-3)
    outputs = model(**processor(validation[:2]["image"], return_tensors="pt"), output_hidden_states=True)
    assert outputs.logits.shape == (2, len(LABELS))
    assert outputs.hidden_states[-1].shape[2:] == (8, 8)  # one feature per 4x4 pixels

    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert teacher(folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
