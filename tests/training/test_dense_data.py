"""Masks, depth maps and label maps: every layout, pairs that stay pairs, and data that are bad in one way each."""

import io
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
import torch
from conftest import ROOT, assert_equal
from PIL import Image


pytest.importorskip("kornia", reason="augmentation needs kornia")
import datasets
from accelerate import Accelerator

from adaperceiver import AdaPerceiverConfig, image_processor_for
from adaperceiver.training import data, dense_data
from adaperceiver.training.arguments import Parser
from adaperceiver.training.dense_augmentation import DenseAugmentation, PairedAugment
from adaperceiver.training.dense_data import DenseDataArguments
from adaperceiver.training.scenes import MASK_LABELS, scene


pytestmark = pytest.mark.usefixtures("_own_cache")
SHARED = ROOT.parent / "shared" / "data"
real_samples = pytest.mark.skipif(not SHARED.is_dir(), reason=f"there are no real samples in {SHARED}")
HEIGHT, WIDTH = 12, 16


def encoded(pixels, form="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def picture(index, height=HEIGHT, width=WIDTH):
    return np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)


def classes(index, low=0, high=151):
    return np.random.default_rng(index).integers(low, high, (HEIGHT, WIDTH), dtype=np.uint8)


def metres(index):
    return np.random.default_rng(index).uniform(0.5, 9, (HEIGHT, WIDTH)).astype(np.float32)


def write_parquet(folder, targets, column="label", validation="validation", **others):
    """train.parquet and another, with a column of images and one of `targets`, PNG or arrays; returns the folder."""
    folder.mkdir(exist_ok=True)
    for split in ("train", validation):
        rows = {"image": [encoded(picture(index)) for index in range(len(targets))]}
        images = [{"bytes": image, "path": None} for image in rows["image"]]
        pictures = [
            target if not isinstance(target, np.ndarray) else {"bytes": encoded(target), "path": None}
            for target in targets
        ]
        features = datasets.Features(image=datasets.Image(), **{column: datasets.Image()})
        columns = {"image": images, column: pictures}
        for name, values in others.items():
            columns[name] = values
            features[name] = datasets.Value("string")
        rows = datasets.Dataset.from_dict(columns, features=features)
        with pyarrow.parquet.ParquetWriter(folder / f"{split}.parquet", features.arrow_schema) as writer:
            if targets:
                writer.write_table(rows.data.table.cast(features.arrow_schema))
    return str(folder)


def write_ade_tree(folder, count=3):
    for split, name in (("training", "ADE_train"), ("validation", "ADE_val")):
        for kind in ("images", "annotations"):
            (folder / kind / split).mkdir(parents=True)
        for index in range(count):
            stem = f"{name}_{index:08}"
            Image.fromarray(picture(index)).save(folder / "images" / split / f"{stem}.jpg")
            Image.fromarray(classes(index)).save(folder / "annotations" / split / f"{stem}.png")
    return folder


def write_shards(folder, count=3, **members):
    """`members` make the content of each file of a sample from its index."""
    folder.mkdir(exist_ok=True)
    for split in ("train", "validation"):
        with tarfile.open(folder / f"some-{split}-0000.tar", "w") as tar:
            for index in range(count):
                for extension, content in members.items():
                    content = content(index)
                    entry = tarfile.TarInfo(f"{index:05}.{extension.replace('_', '.')}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    return str(folder)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def write_label_map(path, count):
    path.write_text("".join(f"class {index}\n" for index in range(count)))
    return str(path)


def splits_of(kind, source, **options):
    """Training and validation data of an encoding."""
    args = DenseDataArguments(dataset=str(source), encoding=kind, **options)
    return dense_data.load_dense_splits(args, "depth-estimation" if kind == "nyuv2" else "image-segmentation")


def dense_scenes(train, validation, task):
    return dense_data.load_dense_splits(DenseDataArguments(train_samples=train, validation_samples=validation), task)


# ------------------------------------------------------------------------------------------------------------ layouts


def expected_ade(index):
    stored = classes(index).astype(int)
    return torch.from_numpy(np.where(stored == 0, 255, stored - 1)).to(torch.uint8)


def test_ade20k_comes_from_its_official_tree(tmp_path):
    tree = write_ade_tree(tmp_path / "ADEChallengeData2016")
    for source in (str(tree), str(tmp_path)):  # the folder, or the one it was unpacked to
        args = DenseDataArguments(dataset=source)
        for split, name in zip(dense_data.load_dense_splits(args, "image-segmentation"), ("train", "val")):
            assert split.column_names == ["image", "mask", "id"]
            assert split["id"] == [f"ADE_{name}_{index:08}" for index in range(3)]
            for index, sample in enumerate(split):
                assert_equal(sample["mask"], expected_ade(index))
                assert data.decode(sample["image"]).shape == (3, HEIGHT, WIDTH)
            dense_data.check_samples(split, "image-segmentation", 150)
            assert dense_data.mask_names(split)[:3] == ["wall", "building", "sky"]


def test_ade20k_comes_from_parquet_files_in_the_same_form(tmp_path):
    source = write_parquet(tmp_path / "data", [classes(index) for index in range(3)], "annotation")
    args = DenseDataArguments(dataset=source, encoding="ade20k", train_samples=2)
    train, validation = dense_data.load_dense_splits(args, "image-segmentation")
    assert (len(train), len(validation)) == (2, 3)
    assert set(train["id"]) < {f"train[{index}]" for index in range(3)}  # a file without names
    assert_equal(validation[2]["mask"], expected_ade(2))


def test_hub_ids_are_asked_for_where_their_files_are(tmp_path, monkeypatch):
    asked = []
    targets = {dense_data.ADE20K: classes(0), dense_data.NYUV2: None}

    def load(path, name=None, **options):
        asked.append((path, options))
        if targets[path] is None:
            return real_load(write_shards(tmp_path / "shards", jpg=lambda i: encoded(picture(i), "JPEG"), **depth_npy))
        return real_load(write_parquet(tmp_path / "ade", [targets[path]], "annotation"))

    depth_npy = {"depth_npy": lambda index: npy(metres(index))}
    real_load = datasets.load_dataset
    monkeypatch.setattr(data, "load_dataset", load)
    train, _ = dense_data.load_dense_splits(DenseDataArguments(dataset=dense_data.ADE20K), "image-segmentation")
    assert_equal(train[0]["mask"], expected_ade(0))
    train, _ = dense_data.load_dense_splits(DenseDataArguments(dataset=dense_data.NYUV2), "depth-estimation")
    assert_equal(train[1]["depth"], torch.from_numpy(metres(1)))
    assert asked == [
        ("zhoubolei/scene_parse_150", {"revision": "refs/convert/parquet", "data_dir": "scene_parsing"}),
        ("adams-story/nyu-depthv2-wds", {}),
    ]


@pytest.mark.parametrize("form", ["parquet", "folders"])
def test_camvid_leaves_its_last_class_out(form, tmp_path):
    masks = [classes(index, high=12) for index in range(3)]
    source = tmp_path / "camvid"
    if form == "parquet":
        write_parquet(source, masks, validation="val")
    else:
        for split in ("train", "val"):
            for folder, arrays in ((split, [picture(i) for i in range(3)]), (f"{split}annot", masks)):
                (source / folder).mkdir(parents=True)
                for index, array in enumerate(arrays):
                    Image.fromarray(array).save(source / folder / f"{index}.png")
    train, validation = splits_of("camvid", source)
    for split in (train, validation):
        dense_data.check_samples(split, "image-segmentation", 11)
        assert_equal(split[1]["mask"].numpy(), np.where(masks[1] == 11, 255, masks[1]))
    assert dense_data.mask_names(train)[8] == "car"


def write_nyu(folder, count=5, splits=True):
    h5py = pytest.importorskip("h5py", reason="the official file of NYUv2 is HDF5")
    folder.mkdir(exist_ok=True)
    with h5py.File(folder / "nyu_depth_v2_labeled.mat", "w") as file:  # MATLAB's order of axes
        file["images"] = np.stack([picture(index).transpose(2, 1, 0) for index in range(count)])
        file["depths"] = np.stack([metres(index).T for index in range(count)])
    if splits:
        savemat = pytest.importorskip("scipy.io", reason="the official split is a MATLAB file").savemat
        savemat(folder / "splits.mat", {"trainNdxs": np.array([[2], [4], [5]]), "testNdxs": np.array([[1], [3]])})
    return folder


def test_loading_copies_no_data(tmp_path):
    train, _ = splits_of("nyuv2", write_nyu(tmp_path / "nyu"))
    (file,) = {Path(entry["filename"]) for entry in train.cache_files}
    assert list(file.parent.glob("*.arrow")) == [file]


def test_nyuv2_comes_from_the_official_file_with_the_official_split(tmp_path):
    folder = write_nyu(tmp_path / "nyu")
    for source in (folder, folder / "nyu_depth_v2_labeled.mat"):
        args = DenseDataArguments(dataset=str(source), holdout=0.33)
        train, validation = dense_data.load_dense_splits(args, "depth-estimation")
        assert sorted([*train["id"], *validation["id"]]) == ["2", "4", "5"]  # one of the three is held out
        assert len(validation) == 1
        test = dense_data.load_dense_scored(args, "depth-estimation", None)
        assert test["id"] == ["1", "3"]
        assert_equal(test[1]["depth"], torch.from_numpy(metres(2)))
        assert_equal(data.decode(test[1]["image"]).permute(1, 2, 0).numpy(), picture(2))
    write_nyu(folder, count=4)
    with pytest.raises(ValueError, match="has 4 images and 4 depth maps, its split 3 and 2 up to number 5"):
        splits_of("nyuv2", folder)


def test_without_its_split_file_nyuv2_has_the_same_official_split(tmp_path, monkeypatch):
    test = [int(line) for line in (data.LABELS / "nyuv2_test.txt").read_text().split()]
    assert (len(test), test[0], test[-1]) == (654, 1, 1449)
    (tmp_path / "nyuv2_test.txt").write_text("2\n3\n")
    monkeypatch.setattr(dense_data, "LABELS", tmp_path)
    args = DenseDataArguments(dataset=str(write_nyu(tmp_path / "nyu", splits=False)))
    train, validation = dense_data.load_dense_splits(args, "depth-estimation")
    assert sorted([*train["id"], *validation["id"]]) == ["1", "4", "5"]
    assert dense_data.load_dense_scored(args, "depth-estimation", None)["id"] == ["2", "3"]


def test_a_missing_reader_is_named(tmp_path, monkeypatch):
    folder = write_nyu(tmp_path / "nyu", splits=False)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ValueError, match="pip install h5py"):
        splits_of("nyuv2", folder)


def test_depth_in_whole_numbers_needs_a_scale(tmp_path):
    millimetres = [(metres(index) * 1000).astype(np.uint16) for index in range(2)]
    codes = [picture(index)[..., 0] for index in range(2)]
    deep = write_parquet(tmp_path / "deep", millimetres, "depth")
    coarse = write_parquet(tmp_path / "coarse", codes, "depth")
    train, _ = splits_of("nyuv2", deep, depth_scale=0.001)
    assert_equal(train[1]["depth"].numpy(), (millimetres[1] * 0.001).astype(np.float32))
    train, _ = splits_of("nyuv2", coarse, depth_scale=10 / 255, depth_offset=0.5)
    assert_equal(train[1]["depth"].numpy(), ((codes[1] + 0.5) * (10 / 255)).astype(np.float32))
    for source, kind in ((deep, "uint16"), (coarse, "uint8")):
        train, _ = splits_of("nyuv2", source)
        with pytest.raises(
            ValueError, match=rf"train\[0\]: depth is stored in whole numbers \({kind}\).*--depth_scale"
        ):
            train[0]
        with pytest.raises(ValueError, match=r"2 of 2 samples .*: sample 0, id train\[0\]: .*--depth_scale"):
            dense_data.check_samples(train, "depth-estimation")


def test_scenes_have_masks_and_depth():
    train, validation = dense_scenes(3, 2, "depth-estimation")
    assert (len(train), len(validation)) == (3, 2)
    assert_equal(train[2]["depth"].numpy(), scene(2)["depth"])
    train, _ = dense_scenes(3, 2, "image-segmentation")
    assert_equal(train[2]["mask"].numpy(), scene(2)["mask"])
    assert dense_data.mask_names(train) == MASK_LABELS
    dense_data.check_samples(train, "image-segmentation", len(MASK_LABELS))


def test_any_other_data_are_told_by_columns_and_a_label_map(tmp_path):
    source = write_parquet(tmp_path / "data", [classes(0, 1, 5), classes(1, 0, 5)], "regions")
    args = DenseDataArguments(
        dataset=source,
        target_column="regions",
        image_column="image",
        label_map=write_label_map(tmp_path / "names.txt", 4),
        reduce_labels=True,
        ignored_class=3,
    )
    train, _ = dense_data.load_dense_splits(args, "image-segmentation")
    stored = classes(1, 0, 5)
    expected = np.where((stored == 0) | (stored == 3), 255, stored.astype(int) - 1)
    assert_equal(train[1]["mask"].numpy(), expected.astype(np.uint8))
    assert dense_data.mask_names(train) == [f"class {index}" for index in range(4)]


def test_the_stored_values_of_classes_may_be_named(tmp_path):
    masks = [np.full((HEIGHT, WIDTH), value, np.uint8) for value in (1, 2, 3)]
    source, names = write_parquet(tmp_path / "data", masks), write_label_map(tmp_path / "names.txt", 2)
    args = DenseDataArguments(dataset=source, label_map=names, mask_values=[2, 1], ignored_class=3)
    _, validation = dense_data.load_dense_splits(args, "image-segmentation")
    assert [int(sample["mask"][0, 0]) for sample in validation] == [1, 0, 255]
    args.ignored_class = None
    _, validation = dense_data.load_dense_splits(args, "image-segmentation")
    with pytest.raises(
        ValueError, match=r"the mask has class 3 \(192 pixels\), allowed are 2, 1, and 255 for ignored pixels"
    ):
        validation[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_values": [1]}, r"--mask_values must be one value for each of the 2 classes, .* got \[1\]"),
        ({"mask_values": [1, 1]}, "--mask_values must be one value for each of the 2 classes"),
        ({"mask_values": [1, 3], "ignored_class": 3}, "not ignored, got"),
        ({"mask_values": [1, 300]}, "--mask_values must be from 0 to 254, got"),
        ({"mask_values": [1, 2], "reduce_labels": True}, "--mask_values and --reduce_labels exclude each other"),
    ],
)
def test_mask_values_that_do_not_fit_are_refused(changes, message, tmp_path):
    source, names = write_parquet(tmp_path / "data", [classes(0)]), write_label_map(tmp_path / "names.txt", 2)
    with pytest.raises(ValueError, match=message):
        dense_data.load_dense_splits(
            DenseDataArguments(dataset=source, label_map=names, **changes), "image-segmentation"
        )


def test_masks_with_a_palette_are_read_by_their_indices(tmp_path):
    file, mask = io.BytesIO(), classes(0, high=11)
    image = Image.fromarray(mask)
    image.putpalette(list(range(255, -1, -1)) * 3)
    assert image.mode == "P"
    image.save(file, "PNG")
    train, _ = splits_of("camvid", write_parquet(tmp_path / "data", [{"bytes": file.getvalue(), "path": None}]))
    assert_equal(train[0]["mask"].numpy(), mask)


def test_an_image_on_its_side_fits_a_mask_that_stands_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    tree = write_ade_tree(tmp_path / "tree", count=1)
    path = tree / "images" / "training" / "ADE_train_00000000.jpg"
    Image.fromarray(picture(0).transpose(1, 0, 2).copy()).save(path, exif=exif)
    train, _ = splits_of("ade20k", tree)
    dense_data.check_samples(train, "image-segmentation", 150)
    image, mask = dense_data.read_dense(train[0])
    assert image.shape[1:] == mask.shape == (HEIGHT, WIDTH)


def test_an_image_folder_may_name_its_masks_in_a_table(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        Image.fromarray(picture(0)).save(tmp_path / split / "a.png")
        Image.fromarray(classes(0, high=3)).save(tmp_path / split / "a_mask.png")
        (tmp_path / split / "metadata.csv").write_text("file_name,mask_file_name\na.png,a_mask.png\n")
    names = write_label_map(tmp_path / "names.txt", 3)
    args = DenseDataArguments(dataset=str(tmp_path), label_map=names)
    train, _ = dense_data.load_dense_splits(args, "image-segmentation")
    assert_equal(train[0]["mask"].numpy(), classes(0, high=3))


def test_the_arguments_parse_like_those_of_the_other_scripts():
    line = "--dataset x --encoding nyuv2 --depth_scale 0.001 --reduce_labels --scale 0.5 2 --no_flip"
    args, augmentation = Parser([DenseDataArguments, DenseAugmentation]).parse(line.split())
    assert (args.encoding, args.depth_scale, args.reduce_labels) == ("nyuv2", 0.001, True)
    assert (augmentation.scale, augmentation.flip) == ([0.5, 2.0], False)


# ---------------------------------------------------------------------------------------------------------- label maps


@pytest.mark.parametrize(
    ("name", "count", "some"),
    [
        ("imagenet1k", 1000, {0: "tench", 134: "crane (bird)", 517: "crane (machine)", 999: "toilet tissue"}),
        ("imagenet12k", 11821, {0: "benthos"}),
        ("ade20k", 150, {0: "wall", 149: "flag"}),
        ("camvid", 11, {0: "sky", 10: "bicyclist"}),
    ],
)
def test_label_maps_name_every_class_once(name, count, some):
    names = data.read_label_map(name)
    assert len(names) == len(set(names)) == count
    assert {index: names[index] for index in some} == some


@pytest.mark.parametrize("streaming", [False, True])
def test_imagenet_shards_get_the_names_that_are_known_for_them(streaming, tmp_path, monkeypatch):
    jpeg = {"jpg": lambda index: encoded(picture(index), "JPEG"), "cls": lambda index: str(index + 7).encode()}
    folder = write_shards(tmp_path / "shards", **jpeg, json=lambda index: b'{"filename": "x"}')
    real_load = datasets.load_dataset
    monkeypatch.setattr(data, "load_dataset", lambda path, *args, **options: real_load(folder, **options))
    args = data.DataArguments(dataset="timm/imagenet-12k-wds", streaming=streaming)
    train, validation = data.load_splits(args)
    for split in (train, validation):
        samples = list(split)
        assert [sample["label"] for sample in samples] == [7, 8, 9]
        assert data.decode(samples[0]["image"]).shape == (3, HEIGHT, WIDTH)
        assert data.label_names(split) is None  # nothing that a teacher's names could be held against
        assert len(data.label_names(split, args)) == 11821


def test_a_label_map_of_another_length_is_an_error_with_both_numbers(tmp_path):
    rows = {"image": [{"bytes": encoded(picture(index)), "path": None} for index in range(3)], "label": [0, 4, 2]}
    named = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=list("abcde")))
    plain = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    three, five = (write_label_map(tmp_path / f"{count}.txt", count) for count in (3, 5))
    for number, features in enumerate((named, plain)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for split in ("train", "test"):
            datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / f"{split}.parquet")
        args = data.DataArguments(dataset=str(folder), label_map=three)
        train, _ = data.load_splits(args)
        with pytest.raises(ValueError, match=r"The label map has 3 names, but --dataset .* has 5 classes"):
            data.label_names(train, args)
        args.label_map = five
        assert data.label_names(train, args)[4] == "class 4"

    source = write_parquet(tmp_path / "ade", [classes(0)])
    with pytest.raises(ValueError, match=r"The label map has 5 names, but --dataset .* has 150 classes"):
        splits_of("ade20k", source, label_map=five)
    with pytest.raises(ValueError, match=r"The label map has 150 names, but the model has 151 classes"):
        dense_data.check_samples(splits_of("ade20k", source)[0], "image-segmentation", 151)


def test_a_bad_label_map_is_named(tmp_path):
    (tmp_path / "twice.txt").write_text("a\nb\na\n")
    (tmp_path / "gap.txt").write_text("a\n\nb\n")
    with pytest.raises(ValueError, match=r"twice\.txt .* line 3 repeats 'a' of line 1"):
        data.read_label_map(str(tmp_path / "twice.txt"))
    with pytest.raises(ValueError, match=r"gap\.txt .* line 2 is empty"):
        data.read_label_map(str(tmp_path / "gap.txt"))
    with pytest.raises(ValueError, match=r"--label_map must be a file or one of ade20k, camvid, .*, got ade21k"):
        data.read_label_map("ade21k")


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "task", "message"),
    [
        (
            {"dataset": "nowhere/at-all"},
            "depth-estimation",
            "--dataset nowhere/at-all, which is no file or folder here, could not",
        ),
        (
            {"dataset": "nyu.mat"},
            "depth-estimation",
            r"--dataset nyu\.mat, which is no file or folder here, could not be loaded",
        ),
        ({}, "image-segmentation", "--label_map must name its classes, 1 to 255 of them, got 0.*--encoding says so"),
        (
            {"encoding": "ade20k"},
            "depth-estimation",
            "is ade20k, which is for image-segmentation, not for depth-estimation",
        ),
        (
            {"encoding": "ade20k", "target_column": "x"},
            "image-segmentation",
            r"--target_column must be .*'label'\], got x",
        ),
        ({}, "depth-estimation", r"--target_column must be one of the columns \['image', 'label'\], got None"),
        ({"validation_split": "dev"}, "depth-estimation", r"must have the splits 'train' and 'dev', it has"),
    ],
)
def test_errors_name_the_argument_and_what_is_allowed(changes, task, message, tmp_path):
    source = write_parquet(tmp_path / "data", [classes(0)])
    with pytest.raises(ValueError, match=message):
        dense_data.load_dense_splits(DenseDataArguments(**{"dataset": source, **changes}), task)


def test_an_unknown_task_is_refused():
    with pytest.raises(ValueError, match="`task` must be one of image-segmentation, depth-estimation, got 'flow'"):
        dense_data.load_dense_splits(DenseDataArguments(), "flow")


def test_missing_files_are_named_before_anything_starts(tmp_path):
    tree = write_ade_tree(tmp_path / "tree")
    (tree / "annotations" / "training" / "ADE_train_00000001.png").unlink()
    with pytest.raises(ValueError, match=r"1 of 3 images in .*training have no mask; ADE_train_00000001\.jpg needs"):
        splits_of("ade20k", tree)
    (tree / "images" / "training" / "ADE_train_00000001.jpg").unlink()
    train, _ = splits_of("ade20k", tree)
    gone = tree / "images" / "training" / "ADE_train_00000002.jpg"
    gone.unlink()
    with pytest.raises(
        ValueError, match=rf"1 of 2 samples .*: sample 1, id ADE_train_00000002: there is no file {gone}"
    ):
        dense_data.check_samples(train, "image-segmentation", 150)
    (tree / "annotations" / "validation").rename(tree / "annotations" / "elsewhere")
    with pytest.raises(ValueError, match=r"there is no folder .*annotations.validation"):
        splits_of("ade20k", tree)


@pytest.mark.parametrize("unreadable", [b"no image", encoded(classes(1))[:60]], ids=["no image", "cut short"])
def test_a_target_that_cannot_be_read_is_named(unreadable, tmp_path):
    bad = {"bytes": unreadable, "path": None}
    train, _ = splits_of("ade20k", write_parquet(tmp_path / "data", [classes(0), bad], id=["good", "bad"]))
    with pytest.raises(
        ValueError, match=r"1 of 2 samples .*: sample 1, id bad: the mask (cannot be read|is cut short)"
    ):
        dense_data.check_samples(train, "image-segmentation", 150)


def test_a_class_out_of_range_is_named_with_its_sample(tmp_path):
    bad = classes(1)
    bad[3, 4] = 151
    train, _ = splits_of("ade20k", write_parquet(tmp_path / "data", [classes(0), bad], id=["good", "bad"]))
    message = r"bad: the mask has class 151 \(1 pixels\), allowed are 1 to 150, and 0 and 255 for ignored pixels"
    with pytest.raises(ValueError, match=rf"1 of 2 samples cannot be used: sample 1, id {message}"):
        dense_data.check_samples(train, "image-segmentation", 150)
    dense_data.check_samples(
        train, "image-segmentation", 150, decoded=1
    )  # one that was not looked into is named when it is used
    batches = data.MicroBatches(train, 2, augmenter(), seed=0, read=dense_data.read_dense)
    with pytest.raises(ValueError, match=message):
        batches[0]


@pytest.mark.parametrize(("value", "shown"), [(np.nan, "nan"), (np.inf, "inf"), (-1, "-1.0")])
def test_a_depth_that_is_none_is_named_with_its_sample(value, shown, tmp_path):
    def depth(index):
        values = metres(index)
        values[2, 5] = value if index == 1 else 0
        return npy(values)

    source = write_shards(tmp_path / "shards", jpg=lambda index: encoded(picture(index), "JPEG"), depth_npy=depth)
    train, _ = splits_of("nyuv2", source)
    assert train[0]["depth"][2, 5] == 0
    with pytest.raises(
        ValueError, match=rf"1 of 3 samples .*: sample 1, id 00001: depth must be 0 .*, got {shown} 1 times"
    ):
        dense_data.check_samples(train, "depth-estimation")


def test_a_mask_of_another_size_is_named_with_both_sizes(tmp_path):
    source = write_parquet(tmp_path / "data", [classes(0), classes(1)[:, :-2]], id=["good", "bad"])
    train, _ = splits_of("ade20k", source)
    message = r"bad: the image is 12x16 \(height x width\), its target 12x14"
    with pytest.raises(ValueError, match=rf"sample 1, id {message}"):
        dense_data.check_samples(train, "image-segmentation", 150, decoded=1)
    with pytest.raises(ValueError, match=message):
        dense_data.read_dense(train[1])


def test_a_mask_in_colours_is_refused(tmp_path):
    train, _ = splits_of("ade20k", write_parquet(tmp_path / "data", [picture(0)]))
    with pytest.raises(ValueError, match=r"the mask must be of shape \(height, width\), got \(12, 16, 3\)"):
        dense_data.check_samples(train, "image-segmentation", 150)


def test_an_empty_split_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r'--dataset .*data could not be loaded: .*"train" corresponds to no data'):
        splits_of("ade20k", write_parquet(tmp_path / "data", []))
    with pytest.raises(ValueError, match=r"--dataset .*tree has no samples in its train split"):
        splits_of("ade20k", write_ade_tree(tmp_path / "tree", count=0))
    train, _ = dense_scenes(1, 1, "image-segmentation")
    with pytest.raises(ValueError, match="no samples"):
        dense_data.check_samples(train.select([]), "image-segmentation")


def test_many_bad_samples_are_counted_and_a_few_named(tmp_path):
    train, _ = splits_of("camvid", write_parquet(tmp_path / "data", [np.full_like(classes(0), 200)] * 7))
    with pytest.raises(ValueError, match=r"^7 of 7 samples") as error:
        dense_data.check_samples(train, "image-segmentation", 11)
    *named, last = str(error.value).split("; ")
    assert len(named) == 5
    assert last == "and 2 more"


# -------------------------------------------------------------------------------------------------------- augmentation


def augmenter(task="image-segmentation", size=(60, 72), **changes):
    plain = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0, "flip": False}
    return PairedAugment(DenseAugmentation(**{**plain, **changes}), size, task)


def tiles(count=6, side=40):
    """Images in which the value of a pixel is ten times its class, in large tiles, and their masks."""
    masks = [np.random.default_rng(index).integers(1, 20, (4, 5)) for index in range(count)]
    masks = [torch.from_numpy(mask.repeat(side // 4, 0).repeat(side // 4, 1)).to(torch.uint8) for mask in masks]
    return [(mask * 10).expand(3, -1, -1) for mask in masks], masks


WAYS = [
    {},
    {"flip": True},
    {"keep_aspect": True},
    {"scale": [0.5, 1.5]},
    {"scale": [0.5, 1.5], "keep_aspect": True, "flip": True},
]


@pytest.mark.parametrize("changes", WAYS, ids=str)
@pytest.mark.parametrize("task", ["image-segmentation", "depth-estimation"])
def test_image_and_target_are_transformed_alike(changes, task):
    images, targets = tiles()
    if task == "depth-estimation":
        targets = [target / 4 for target in targets]
    views = augmenter(task, **changes)(images, targets, [1])
    assert views["images"].shape == (6, 3, 60, 72)
    assert views["labels"].shape == (6, 60, 72)
    assert views["labels"].dtype == (torch.int64 if task == "image-segmentation" else torch.float32)
    fill = 255 if task == "image-segmentation" else 0
    inside = views["labels"] != fill
    expected = views["labels"].float() * (10 if task == "image-segmentation" else 40) / 255
    # Near an edge of tiles, or of the image, pixels are mixtures; all others show their class.
    window = torch.nn.functional.unfold(torch.where(inside, expected, -1)[:, None], 5, padding=2)
    uniform = (window.amax(1) == window.amin(1)).unflatten(1, (60, 72))
    assert uniform.float().mean() > 0.2
    assert ((views["images"][:, 0] - expected).abs()[uniform & inside] < 0.01).all()
    assert inside.all() == ("scale" not in changes)
    values = views["labels"][inside].unique()
    assert torch.isin(values.float(), torch.stack(targets).float().unique()).all()  # no mixtures of classes


def test_the_whole_image_is_stretched_to_the_view_by_default():
    images, masks = tiles(count=2)
    views = augmenter(size=(40, 50))(images, masks, [0])
    assert_equal(views["labels"], torch.stack(masks).long())
    torch.testing.assert_close(views["images"], torch.stack(images) / 255)
    tall = augmenter(size=(80, 50))(images, masks, [0])["labels"]
    assert_equal(tall[:, ::2], torch.stack(masks).long())


def test_views_keep_the_aspect_if_asked_to():
    columns = torch.arange(50, dtype=torch.uint8).expand(40, 50)
    views = augmenter(size=(40, 20), keep_aspect=True)([columns.expand(3, -1, -1)] * 8, [columns] * 8, [3])["labels"]
    starts = views[:, 0, 0]
    assert_equal(views, (starts[:, None, None] + torch.arange(20)).expand(8, 40, 20))  # whole windows, not resized
    assert len(starts.unique()) > 3


def test_what_lies_outside_the_image_does_not_count():
    images, masks = tiles(count=3)
    for task, fill in (("image-segmentation", 255), ("depth-estimation", 0)):
        views = augmenter(task, scale=[0.5, 0.5])(images, [mask.float() for mask in masks], [2])
        inside = views["labels"] != fill
        assert_equal(inside.sum((1, 2)), torch.full((3,), 30 * 36))
        assert (views["images"].amax(1)[~inside] == 0).all()


@pytest.mark.parametrize("changes", [*WAYS[1:], {"brightness": 0.5, "hue": 0.3}], ids=str)
def test_views_depend_on_their_seed_and_on_nothing_else(changes):
    augment, pairs = augmenter(**changes), tiles()
    before = torch.random.get_rng_state()
    first = augment(*pairs, [1, 2])
    assert_equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    assert_equal(augment(*pairs, [1, 2]), first)
    if changes != {"keep_aspect": True}:  # tiles just fill the view: one way to place them, up to a few columns
        assert not torch.equal(augment(*pairs, [1, 3])["images"], first["images"])


def test_jitter_changes_the_colours_of_the_image_alone():
    plain = augmenter(flip=True, scale=[0.5, 2.0])(*tiles(), [4])
    colours = augmenter(flip=True, scale=[0.5, 2.0], brightness=0.25, contrast=0.25, saturation=0.25, hue=0.2)
    jittered = colours(*tiles(), [4])
    assert_equal(jittered["labels"], plain["labels"])
    assert (jittered["images"] - plain["images"]).abs().mean() > 0.01
    assert 0 <= jittered["images"].min() <= jittered["images"].max() <= 1


def test_a_scale_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"--scale must be two numbers above 0, the smaller first, got 2\.0 0\.5"):
        augmenter(scale=[2.0, 0.5])


# ------------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("task", ["image-segmentation", "depth-estimation"])
def test_a_micro_batch_does_not_depend_on_who_asks_for_it(task):
    train, _ = dense_scenes(10, 1, task)
    augment = augmenter(task, flip=True, scale=[0.5, 2.0], brightness=0.2)
    batches = data.MicroBatches(train, 4, augment, seed=3, read=dense_data.read_dense)
    alone = batches[5]
    loader = torch.utils.data.DataLoader(batches, sampler=range(4, 6), batch_size=None, num_workers=1)
    in_company = list(loader)[1]
    assert in_company.keys() == {"images", "labels", "places", "indices", "micro"}
    assert_equal(in_company, alone)
    assert_equal(alone["micro"], torch.tensor(5))
    epoch = torch.cat([batches[micro]["indices"] for micro in range(5)])
    assert sorted(epoch.tolist()) == sorted([*range(10)] * 2)


def test_pairs_that_cannot_be_read_are_left_out(tmp_path):
    cut = {"bytes": encoded(classes(1))[:60], "path": None}
    train, validation = splits_of(
        "ade20k", write_parquet(tmp_path / "data", [classes(0), cut, classes(2), classes(3)])
    )
    batches = data.MicroBatches(train, 4, augmenter(), seed=0, shuffle=False, read=dense_data.read_dense)
    assert batches[0]["places"].tolist() == batches[0]["indices"].tolist() == [0, 2, 3]
    assert len(batches[0]["images"]) == len(batches[0]["labels"]) == 3
    processor = image_processor_for(AdaPerceiverConfig(image_size=32, patch_size=8), "image-segmentation")
    ((pixel_values, targets),) = dense_data.dense_validation_batches(
        validation, processor, 4, Accelerator(cpu=True), "image-segmentation"
    )
    assert len(pixel_values) == len(targets) == 3


@pytest.mark.parametrize("task", ["image-segmentation", "depth-estimation"])
def test_validation_shows_whole_images_and_keeps_targets_as_they_are(task):
    _, validation = dense_scenes(1, 5, task)
    processor = image_processor_for(AdaPerceiverConfig(image_size=64, patch_size=8), task)
    size = (processor.size["height"], processor.size["width"])
    seen = []
    for rank in range(2):
        accelerator = SimpleNamespace(num_processes=2, process_index=rank, device=torch.device("cpu"))
        for pixel_values, targets in dense_data.dense_validation_batches(validation, processor, 2, accelerator, task):
            assert pixel_values.shape == (len(targets), 3, *size)
            seen += targets
    assert [target.shape for target in seen] == [(32, 32)] * 5  # the scenes are of 32 pixels, the model sees more
    column = dense_data.TARGETS[task]
    expected = [validation[index][column] for index in (0, 1, 4, 2, 3)]  # batches take turns
    assert_equal(seen, [target.to(dense_data.DTYPES[task]) for target in expected])


# -------------------------------------------------------------------------------------------------------- real samples


@real_samples
def test_real_ade20k_loads_and_passes_the_checks():
    args = DenseDataArguments(dataset=str(SHARED / "ade20k_small"), encoding="ade20k")
    train, validation = dense_data.load_dense_splits(args, "image-segmentation")
    assert (len(train), len(validation)) == (2021, 500)
    assert train[0]["id"] == "ADE_train_00000001"
    dense_data.check_samples(train, "image-segmentation", 150, decoded=300)
    dense_data.check_samples(validation, "image-segmentation", 150, decoded=300)
    names = dense_data.mask_names(train)
    shown = torch.cat([validation[index]["mask"].flatten() for index in range(0, 500, 10)]).long()
    counts = torch.bincount(shown[shown != 255], minlength=150)
    assert {names[index] for index in counts.topk(3).indices} >= {
        "wall",
        "building",
    }  # the two that are largest overall
    rows = [line.split("\t") for line in (SHARED / "ade20k_small" / "objectInfo150.txt").read_text().splitlines()[1:]]
    assert names == [row[4].split(",")[0].strip() for row in rows]


@real_samples
def test_real_nyuv2_loads_in_metres_with_the_official_split():
    args = DenseDataArguments(
        dataset=str(SHARED / "nyuv2"), encoding="nyuv2", depth_scale=9.99547 / 255, depth_offset=0.5
    )
    train, validation = dense_data.load_dense_splits(args, "depth-estimation")
    test = dense_data.load_dense_scored(args, "depth-estimation", None)
    assert (len(train), len(validation), len(test)) == (755, 40, 654)
    assert test["id"] == (data.LABELS / "nyuv2_test.txt").read_text().split()
    dense_data.check_samples(train, "depth-estimation", decoded=100)
    depths = torch.stack([train[index]["depth"] for index in range(0, 755, 20)])
    assert 0.7 < depths.min() < depths.median() < depths.max() < 10
    assert 2 < depths.median() < 3.5


@real_samples
def test_real_camvid_loads_and_its_sky_is_above_its_road():
    train, validation = splits_of("camvid", SHARED / "camvid")
    assert (len(train), len(validation)) == (367, 101)
    dense_data.check_samples(train, "image-segmentation", 11)
    names = dense_data.mask_names(train)
    masks = torch.stack([train[index]["mask"] for index in range(0, 367, 30)])
    rows = torch.arange(masks.shape[1])[None, :, None].expand_as(masks).float()
    assert rows[masks == names.index("sky")].mean() < 80 < 150 < rows[masks == names.index("road")].mean()


@real_samples
def test_real_pairs_become_the_micro_batches_of_the_paper():
    train, _ = splits_of("ade20k", SHARED / "ade20k_small")
    augment = PairedAugment(DenseAugmentation(), (518, 518), "image-segmentation")
    batch = data.MicroBatches(train, 2, augment, seed=0, read=dense_data.read_dense)[0]
    assert batch["images"].shape == (2, 3, 518, 518)
    assert batch["labels"].shape == (2, 518, 518)
    assert (batch["labels"][batch["labels"] != 255] < 150).all()


@real_samples
def test_real_pets_have_breeds_and_masks():
    source = str(SHARED / "pets")
    train, validation = data.load_splits(data.DataArguments(dataset=source, holdout=0.2))
    assert (len(train), len(validation)) == (2944, 736)
    assert np.bincount(validation["label"]).min() >= 18  # of about 99 images of each of 37 breeds
    args = DenseDataArguments(dataset=source, label_map="pets_masks", mask_values=[2, 1], ignored_class=3)
    masks, _ = dense_data.load_dense_splits(args, "image-segmentation")
    dense_data.check_samples(masks, "image-segmentation", 2, decoded=100)
    middle = torch.stack([masks[index]["mask"][60:68, 60:68] for index in range(0, 300, 10)])
    assert (middle == 1).sum() > 3 * (middle == 0).sum()  # the animal is in the middle


@real_samples
def test_real_photographs_of_several_data_sets_are_one_without_labels():
    names = ["mini_imagenet", "pets", "camvid", "nyuv2", "ade20k_small"]  # classes, classes, and three kinds of masks
    args = data.DataArguments(train_samples=100, validation_samples=10)
    train, validation = data.load_several(args, [str(SHARED / name) for name in names], labelled=False)
    assert (train.column_names, len(train), len(validation)) == (["image"], 500, 50)
    shapes = [data.decode(train[100 * index]["image"]).shape for index in range(5)]
    assert shapes[0] == (3, 84, 84)
    assert min(shapes[1][1:]) == 128
    assert shapes[2] == shapes[3] == (3, 240, 320)
