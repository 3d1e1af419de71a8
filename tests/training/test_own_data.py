"""Data of one's own without a recipe: nothing is inherited from the rendered scenes, and each script says what it uses."""

import datasets
import numpy as np
import pytest
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from adaperceiver import AdaPerceiverForImageClassification
from adaperceiver.training.arguments import RECIPES, as_options, recipe_for


pytest.importorskip("kornia", reason="augmentation needs kornia")
import distill
import run_depth_estimation
import run_image_classification
import run_semantic_segmentation

from adaperceiver.training import dense_data, finetuning


pytestmark = pytest.mark.usefixtures("_own_cache")
NAMES = ["ant", "bee", "cat", "dog"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_latent_tokens": 8, "patch_size": 8}
QUICK = {"steps": 2, "batch_size": 8, "micro_batch_size": 8, "warmup_steps": 1, "workers": 0, "tracker": "none"}


@pytest.fixture
def sorted_folder(tmp_path):
    """train/ and validation/ with a folder of images for each class; nothing to train on of the last one."""
    rng = np.random.default_rng(0)
    for split, counts in (("train", (12, 12, 12, 0)), ("validation", (2, 2, 2, 2))):
        for name, count in zip(NAMES, counts):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (40, 56, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / split / name / f"{number}.png")
    return tmp_path / "images"


@pytest.fixture
def teacher(tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {name: i for i, name in enumerate(NAMES)}}
    ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8, **labels)).save_pretrained(
        tmp_path / "vit"
    )
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


@pytest.fixture
def checkpoint(tiny_model, tmp_path):
    tiny_model(AdaPerceiverForImageClassification, image_size=64).save_pretrained(tmp_path / "model", save_code=False)
    return tmp_path / "model"


def started(monkeypatch, module):
    """What a script trains on, instead of training."""
    found = {}

    def train(session, model, batches, *args, **kwargs):
        found.update(model=model, batch=batches[0], images=len(batches.dataset), dataset=batches.dataset)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "train", train)
    return found


def test_distillation_takes_neither_the_sizes_nor_the_first_images_of_the_scenes(
    sorted_folder, teacher, tmp_path, monkeypatch, capsys
):
    found = started(monkeypatch, distill)
    values = {"dataset": sorted_folder, "teacher": teacher, "output_dir": tmp_path / "run", **QUICK}
    with pytest.raises(KeyboardInterrupt):
        distill.main(as_options(values))
    assert found["images"] == 36
    assert found["batch"]["images"].shape == (8, 3, 96, 96)
    assert found["model"].config.hidden_size == 192
    printed = capsys.readouterr().out
    assert "images: 36 images of 4 classes to train on, 8 images to validate on." in printed
    assert "No training image shows 1 of the classes: dog." in printed
    assert "Images of 96 x 96 pixels (height x width); 2 steps of 8 images (8 at a time)." in printed
    with pytest.raises(KeyboardInterrupt):
        distill.main(as_options({**values, "train_samples": 9, "overwrite": True}))
    assert np.bincount(found["dataset"]["label"]).tolist() == [3, 3, 3]  # of a folder that is sorted by class


def test_a_checkpoint_keeps_its_sizes(sorted_folder, teacher, checkpoint, tmp_path, monkeypatch, capsys):
    found = started(monkeypatch, distill)
    values = {"dataset": sorted_folder, "teacher": teacher, "output_dir": tmp_path / "run", **QUICK}
    with pytest.raises(KeyboardInterrupt):
        distill.main(as_options({**values, "init_from": checkpoint}))
    assert found["model"].config.hidden_size == 32
    assert found["batch"]["images"].shape == (8, 3, 64, 64)
    assert "A new classifier of 4 classes" in capsys.readouterr().out


def test_fine_tuning_takes_all_images_and_the_size_of_the_model(
    sorted_folder, checkpoint, tmp_path, monkeypatch, capsys
):
    found = started(monkeypatch, finetuning)
    values = {"dataset": sorted_folder, "model": checkpoint, "output_dir": tmp_path / "run", **QUICK}
    with pytest.raises(KeyboardInterrupt):
        run_image_classification.main(as_options(values))
    assert found["images"] == 36
    assert found["batch"]["images"].shape == (8, 3, 64, 64)
    printed = capsys.readouterr().out
    assert "No training image shows 1 of the classes: dog." in printed
    assert "Images of 64 x 64 pixels" in printed


@pytest.mark.parametrize("kind", ["segmentation", "depth"])
def test_dense_data_are_not_shrunk_to_the_pixels_of_scenes(kind, checkpoint, tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    picture, target = datasets.Image(), {"segmentation": "mask", "depth": "depth"}[kind]
    columns = {"image": [Image.fromarray(rng.integers(0, 256, (120, 160, 3), dtype=np.uint8)) for _ in range(20)]}
    if kind == "segmentation":
        columns["mask"] = [Image.fromarray(rng.integers(0, 2, (120, 160), dtype=np.uint8)) for _ in range(20)]
    else:
        columns["depth"] = [rng.uniform(1, 5, (120, 160)).astype(np.float32) for _ in range(20)]
    features = {
        "image": picture,
        target: picture if kind == "segmentation" else datasets.Array2D((120, 160), "float32"),
    }
    rows = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    rows.to_parquet(tmp_path / "data" / "train.parquet")
    (tmp_path / "names.txt").write_text("wall\nfloor\nlamp\n")
    found = started(monkeypatch, finetuning)
    values = {"dataset": tmp_path / "data", "model": checkpoint, "output_dir": tmp_path / "run", **QUICK}
    script = run_depth_estimation
    if kind == "segmentation":
        script, values["label_map"] = run_semantic_segmentation, tmp_path / "names.txt"
    with pytest.raises(KeyboardInterrupt):
        script.main(as_options(values))
    assert found["images"] == 19
    assert min(found["batch"]["images"].shape[-2:]) > 96
    printed = capsys.readouterr().out
    assert "19 images" in printed
    assert "1 images to validate on" in printed
    assert ("No training image shows 1 of the classes: lamp." in printed) == (kind == "segmentation")


def test_the_recipe_of_the_scenes_is_for_scenes_alone():
    scenes, own = "scenes.yaml", "own.yaml"
    for arguments in ([], ["--dataset", "scenes"], ["--dataset=scenes", "--steps", "3"], ["--model", "x"]):
        assert recipe_for(arguments, scenes, own) == RECIPES / scenes
    for arguments in (["--dataset", "x"], ["--dataset=x"], ["--steps", "3", "--dataset", "a", "b", "--flip", "true"]):
        assert recipe_for(arguments, scenes, own) == RECIPES / own


@pytest.mark.parametrize(
    "script", [distill, run_image_classification, run_semantic_segmentation, run_depth_estimation]
)
@pytest.mark.parametrize("own", [False, True])
def test_help_shows_what_would_be_used(script, own, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.main([*(["--dataset", "x"] if own else []), "--help"])
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("own_" if own else "scenes") in shown.split("Its")[0]
    assert f"EMA_DECAY (default: {0.99 if own else 0.98})" in shown
    assert "--seed SEED (default: 0)" in shown


def test_masks_tell_which_classes_they_show():
    args = dense_data.DenseDataArguments(train_samples=6, validation_samples=1)
    train, _ = dense_data.load_dense_splits(args, "image-segmentation")
    expected = {int(value) for sample in train for value in sample["mask"].unique()}
    assert dense_data.check_samples(train, "image-segmentation") == expected
