"""Which images a script reads: what trains or chooses never reads the test split, and final scores are of nothing else."""

import datasets
import evaluate_model
import numpy as np
import pytest
import torch
from PIL import Image

from adaperceiver import AdaPerceiverForImageClassification, AdaPerceiverForSemanticSegmentation
from adaperceiver.training.arguments import as_options


pytest.importorskip("kornia", reason="augmentation needs kornia")
import calibrate
import distill
import evaluate_policies
import run_depth_estimation
import run_image_classification
import run_semantic_segmentation
import train_policy
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from adaperceiver.training import data, dense_data
from adaperceiver.training.dense_data import DenseDataArguments


pytestmark = pytest.mark.usefixtures("_own_cache")
NAMES = ["apple", "book", "cup"]
LABELS = {
    "num_labels": 3,
    "id2label": dict(enumerate(NAMES)),
    "label2id": {name: index for index, name in enumerate(NAMES)},
}
STRIDED = {"image_size": 16, "patch_size": 8, "num_hidden_layers": 1, "max_latent_tokens": 4}


@pytest.fixture
def source(tmp_path):
    """train.parquet, sorted by class, and test.parquet, with classes, masks and depth maps."""
    rng = np.random.default_rng(0)
    pixels = datasets.Image()
    features = datasets.Features(
        image=pixels, label=datasets.ClassLabel(names=NAMES), mask=pixels, depth=datasets.Array2D((16, 16), "float32")
    )
    for split, count in (("train", 60), ("test", 9)):
        columns = {
            "image": [Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)) for _ in range(count)],
            "label": sorted(index % 3 for index in range(count)),
            "mask": [Image.fromarray(rng.integers(0, 3, (16, 16), dtype=np.uint8)) for _ in range(count)],
            "depth": [rng.uniform(1, 5, (16, 16)).astype(np.float32) for _ in range(count)],
        }
        (tmp_path / "data").mkdir(exist_ok=True)
        datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "data" / f"{split}.parquet")
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    return str(tmp_path / "data")


@pytest.fixture
def checkpoint(tiny_model, tmp_path):
    tiny_model(AdaPerceiverForImageClassification, **STRIDED, **LABELS).save_pretrained(
        tmp_path / "model", save_code=False
    )
    return str(tmp_path / "model")


@pytest.fixture
def teacher(tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8, **LABELS)).save_pretrained(
        tmp_path / "vit"
    )
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    return str(tmp_path / "vit")


class TestSplitRead(Exception):
    """Raised by the trap below."""

    __test__ = False


@pytest.fixture
def _no_test_split(monkeypatch):
    """Whoever takes the test split of loaded data raises."""

    class Trap(dict):
        def __getitem__(self, name):
            if name == "test":
                raise TestSplitRead
            return super().__getitem__(name)

    load = data.load_any
    for module in (data, dense_data):
        monkeypatch.setattr(module, "load_any", lambda *args, **options: Trap(load(*args, **options)))


RUN = {"steps": 1, "batch_size": 4, "micro_batch_size": 4, "warmup_steps": 0, "workers": 0, "tracker": "none"}
RUN |= {"optimizer": "adamw"}
PLAIN = {"randaugment_magnitude": 0, "mixup_alpha": 0}


def options(script, source, checkpoint, teacher, tmp_path):
    common = {"output_dir": tmp_path / "run", "dataset": source, **RUN}
    student = {**STRIDED, "hidden_size": 16, "num_attention_heads": 2}
    return {
        "distill logits": {**common, **PLAIN, "teacher": teacher, "student": student},
        "distill cached features": {
            **common,
            **PLAIN,
            "teacher": teacher,
            "student": student,
            "distill": "features",
            "cached_views": 1,
        },
        "classify": {**common, **PLAIN, "model": checkpoint},
        "segment": {**common, "model": checkpoint, "label_map": tmp_path / "names.txt", "image_size": [16, 16]},
        "depth": {**common, "model": checkpoint, "image_size": [16, 16], "crop": "none"},
        "router": {**common, "model": checkpoint},
        "calibrate": {"model": checkpoint, "dataset": source, "max_drop": 0.99, "holdout": 0.5},
        "evaluate": {"model": checkpoint, "dataset": source, "output": tmp_path / "scores"},
        "policies": {"model": checkpoint, "dataset": source, "output": tmp_path / "scores", "timed_images": 0},
    }[script]


CHOOSING = {
    "distill logits": distill,
    "distill cached features": distill,
    "classify": run_image_classification,
    "segment": run_semantic_segmentation,
    "depth": run_depth_estimation,
    "router": train_policy,
    "calibrate": calibrate,
}
SCORING = {"evaluate": evaluate_model, "policies": evaluate_policies}


def run(name, script, tmp_path, values):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{}")
    positional = [] if name in ("calibrate", *SCORING) else [str(recipe)]
    script.main([*positional, *as_options(values)])


@pytest.mark.parametrize("name", CHOOSING)
@pytest.mark.usefixtures("_no_test_split")
def test_what_trains_or_chooses_never_reads_the_test_split(name, source, checkpoint, teacher, tmp_path):
    values = options(name, source, checkpoint, teacher, tmp_path)
    run(name, CHOOSING[name], tmp_path, values)  # the trap does not snap
    other = {"output_dir": tmp_path / "other"}
    with pytest.raises(ValueError, match="--validation_split test: test images are for final scores alone"):
        run(
            name,
            CHOOSING[name],
            tmp_path,
            {**values, "validation_split": "test", **(other if name != "calibrate" else {})},
        )


@pytest.mark.parametrize("name", SCORING)
@pytest.mark.usefixtures("_no_test_split")
def test_final_scores_are_of_the_test_split_or_of_what_is_named(name, source, checkpoint, teacher, tmp_path):
    values = options(name, source, checkpoint, teacher, tmp_path)
    with pytest.raises(TestSplitRead):
        run(name, SCORING[name], tmp_path, values)
    run(name, SCORING[name], tmp_path, {**values, "split": "validation"})


@pytest.mark.usefixtures("_no_test_split")
def test_dense_scores_too(source, tmp_path, tiny_model):
    tiny_model(AdaPerceiverForSemanticSegmentation, **STRIDED, **LABELS).save_pretrained(tmp_path / "dense")
    values = {"model": tmp_path / "dense", "dataset": source, "label_map": tmp_path / "names.txt"}
    values |= {"output": tmp_path / "scores"}
    with pytest.raises(TestSplitRead):
        run("evaluate", evaluate_model, tmp_path, values)
    run("evaluate", evaluate_model, tmp_path, {**values, "split": "validation"})


# ------------------------------------------------------------------------------------------------- held out, and subsets


def pixels(split):
    return {sample["image"]["bytes"] for sample in split}


def test_held_out_images_are_the_same_for_every_script_and_of_every_class(source):
    args = data.DataArguments(dataset=source, holdout=0.2)
    train, validation = data.load_splits(args)
    assert (len(train), len(validation)) == (48, 12)
    assert np.bincount(validation["label"]).tolist() == [4, 4, 4]
    assert not pixels(train) & pixels(validation)
    assert pixels(data.load_splits(args)[1]) == pixels(validation) == pixels(data.load_scored(args, "validation"))
    assert pixels(data.load_scored(args, None)).isdisjoint(pixels(train) | pixels(validation))
    args.holdout = None
    assert len(data.load_splits(args)[1]) == 3  # 5 % where the data have no validation split


def test_dense_data_are_held_out_at_random(source):
    args = DenseDataArguments(dataset=source, holdout=0.25)
    train, validation = dense_data.load_dense_splits(args, "depth-estimation")
    assert (len(train), len(validation)) == (45, 15)
    assert not {*train["id"]} & {*validation["id"]}
    assert len(dense_data.load_dense_scored(args, "depth-estimation", None)) == 9
    again, _ = dense_data.load_dense_splits(args, "depth-estimation")
    assert again["id"] == train["id"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"holdout": 1.0}, "--holdout must be above 0 and below 1, got 1.0"),
        (
            {"holdout": 0.1, "validation_split": "train"},
            "--holdout 0.1 and --validation_split train exclude each other",
        ),
        ({"streaming": True}, "needs a --validation_split: nothing can be held out of a stream"),
        ({"train_samples": 0}, "--train_samples must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_held_out_is_said(changes, message, source):
    with pytest.raises(ValueError, match=message):
        data.load_splits(data.DataArguments(dataset=source, **changes))


def test_a_subset_has_every_class_of_a_folder_that_is_sorted_by_class(tmp_path):
    for label, (name, count) in enumerate(zip(NAMES, (20, 10, 10))):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(count):
            shade = np.full((8, 8, 3), 60 * label + number, np.uint8)
            Image.fromarray(shade).save(tmp_path / "images" / name / f"{number}.png")
    args = data.DataArguments(dataset=str(tmp_path / "images"), train_samples=16, holdout=0.2)
    train, validation = data.load_splits(args)
    assert np.bincount(train["label"]).tolist() == [8, 4, 4]
    assert np.bincount(validation["label"]).tolist() == [4, 2, 2]


def test_strata_hold_for_any_beginning_of_the_order():
    labels = torch.tensor([0] * 90 + [1] * 9 + [2]).tolist()
    features = datasets.Features(label=datasets.ClassLabel(names=NAMES))
    split = datasets.Dataset.from_dict({"label": labels}, features=features)
    order = data.stratified_order(split, seed=0)
    assert sorted(order) == list(range(100))
    for count in (20, 50, 80):
        found = np.bincount(np.asarray(labels)[order[:count]], minlength=3) / count
        assert np.abs(found - [0.9, 0.09, 0.01]).max() <= 1.01 / count
    assert not np.array_equal(order, data.stratified_order(split, seed=1))
