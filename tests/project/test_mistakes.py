"""What the scripts say of what they cannot use: one line that names it, and exit code 2, before a model is loaded."""

import json
import subprocess
import sys

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import torch
from conftest import EXAMPLES, TINY
from PIL import Image
from transformers import PreTrainedModel, ViTConfig

from adaperceiver import (
    AdaPerceiverConfig,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverModel,
)
from adaperceiver.training.arguments import command_line


for module in ("matplotlib", "scipy"):
    pytest.importorskip(module)
import benchmark
import calibrate
import convert_official_checkpoint
import demo
import evaluate_model
import evaluate_policies
import predict
import visualize


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder full of things that are no use."""
    folder = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = AdaPerceiverConfig(**TINY)
        AdaPerceiverForImageClassification(config).save_pretrained("classifier", save_code=False)
        AdaPerceiverForSemanticSegmentation(config).save_pretrained("segmenter", save_code=False)
        AdaPerceiverModel(config).save_pretrained("headless", save_code=False)
        ViTConfig().save_pretrained("vit")
        written = json.loads((folder / "classifier" / "config.json").read_text())
        for name, text in (("broken", "{ no json"), ("typed", json.dumps({**written, "hidden_size": "8"}))):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(text)
        (folder / "empty").mkdir()
        for name in ("text.pth", "text.safetensors", "text.png"):
            (folder / name).write_text("words\n")
        torch.save({"weight": torch.ones(2)}, "other.pth")
        pixels = Image.fromarray(np.zeros((32, 32, 3), np.uint8))
        pixels.save("black.png")

        def table(name, labels, kind="int64"):
            features = datasets.Features(image=datasets.Image(), label=datasets.Value(kind))
            rows = {"image": [pixels] * len(labels), "label": labels}
            rows = datasets.Dataset.from_dict(rows, features=features).data.table
            pyarrow.parquet.write_table(rows.cast(features.arrow_schema), f"{name}.parquet")

        table("good", [0, 1, 2, 3, 4, 5, 6, 9])
        table("beyond", [0, 1, 2, 3, 4, 5, 6, 10])
        table("negative", [0, 1, 2, 3, 4, 5, 6, -1])
        table("words", ["zero", "one"], "string")
        table("nothing", [])
        datasets.Dataset.from_dict({"picture": [1, 2]}).to_parquet("pictures.parquet")
    return folder


APP = ("app", "write_space")  # which stand alone, and are tested in tests/app
EVERY_SCRIPT = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in APP)
SCORING = [evaluate_model, evaluate_policies]
ON_DATA = [*SCORING, calibrate]
GOOD = "--model classifier --dataset good.parquet"
MISTAKES = [  # the command line, what is said of it, and the scripts
    ("", "the following arguments are required: --model", ON_DATA),
    ("--modle classifier", "the following arguments are required: --model", ON_DATA),
    ("--model classifier --batch 8", "There is no option --batch; did you mean --batch_size?", ON_DATA),
    (
        "--model nowhere",
        "--model must be a folder with a config.json, or the id of a model on the hub, got no",
        ON_DATA,
    ),
    ("--model empty", "--model must be a folder with a config.json, or the id of a model on the hub, got em", ON_DATA),
    (
        "--model broken",
        "--model must be a folder with a config.json, or the id of a model on the hub, got br",
        ON_DATA,
    ),
    ("--model typed", "--model: Validation error for field 'hidden_size'", ON_DATA),
    ("--model vit", "--model must be an AdaPerceiver, got vit, which is vit.", ON_DATA),
    (
        "--model headless",
        "--model headless must be a checkpoint with a head for image-classification",
        [evaluate_model],
    ),
    ("--model headless", "--model must be a checkpoint of AdaPerceiverForImageClassification or ", ON_DATA[1:]),
    ("--model segmenter", "--model must be a checkpoint of AdaPerceiverForImageClassification or ", ON_DATA[1:]),
    ("--model classifier --batch_size 0", "--batch_size must be at least 1, got 0.", ON_DATA),
    ("--model classifier --batch_size many", "argument --batch_size/--batch-size: invalid int value: 'many'", ON_DATA),
    ("--model classifier --output text.pth", "--output must be a folder that can be written, got text.pth.", ON_DATA),
    ("--model classifier --output text.pth/a/b", "--output must be a folder that can be written, got text", ON_DATA),
    ("--model classifier --validation_samples 0", "--validation_samples must be at least 1, got 0.", ON_DATA),
    ("--model classifier --label_map nothing", "--label_map must be a file or one of ade20k", ON_DATA),
    ("--model classifier --tokens", "`tokens` must be at least one value, got none.", [evaluate_model]),
    ("--model classifier --tokens", "--tokens must be at least one, got nothing.", [evaluate_policies]),
    ("--model classifier --tokens 0", "`tokens` must be an integer of at least 1, got 0.", [evaluate_model]),
    ("--model classifier --tokens 3", "--tokens must be among [2, 4, 6, 8, 12, 16], got [3].", [evaluate_policies]),
    ("--model classifier --tokens 0", "--tokens must be at least 1, got 0.", [calibrate]),
    ("--model classifier --width 99", "`width` must be an integer from 1 to 32, got 99.", [calibrate]),
    ("--model classifier --widths 99", "`width` must be an integer from 1 to 32, got 99.", [evaluate_model]),
    ("--model classifier --depths 0", "`depth` must be an integer from 1 to 2, got 0.", [evaluate_model]),
    ("--model classifier --exit_thresholds 7", "`exit_threshold` must be a number from 0 to 1, ", [evaluate_model]),
    ("--model classifier --exit_thresholds 7", "--exit_thresholds must be from 0 to 1, got 7.0.", [evaluate_policies]),
    (
        "--model segmenter --exit_thresholds 0.5",
        "--exit_thresholds are for classifiers, --model seg",
        [evaluate_model],
    ),
    ("--model segmenter --baselines vit", "--baselines are for classifiers, --model segmenter is", [evaluate_model]),
    ("--model classifier --baselines nowhere", "--baselines must be a folder with a config.json", [evaluate_model]),
    ("--model classifier --latency_batch_size -1", "--latency_batch_size must be at least 0", [evaluate_model]),
    ("--model classifier --save_table", "--save_table needs --split validation: ", [evaluate_model]),
    ("--model classifier --crop no", "argument --crop: invalid choice: 'no'", [evaluate_model]),
    ("--model classifier --timed_images -1", "--timed_images must be at least 0, got -1.", [evaluate_policies]),
    ("--model classifier --max_drop 0", "--max_drop must be between 0 and 1, got 0.0.", [calibrate]),
    ("--model classifier --confidence 1.5", "--confidence must be between 0 and 1, got 1.5.", [calibrate]),
    ("--model classifier --seed -1", "--seed must be at least 0, got -1.", [calibrate]),
    ("--model classifier --dataset nowhere", "--dataset nowhere, which is no file or folder here, could not", ON_DATA),
    ("--model classifier --dataset text.pth", "--dataset text.pth could not be loaded: ", ON_DATA),
    ("--model classifier --dataset empty", "--dataset empty could not be loaded: ", ON_DATA),
    ("--model classifier --dataset nothing.parquet", "--dataset nothing.parquet ", ON_DATA),
    ("--model classifier --dataset pictures.parquet --holdout 0.5", "--image_column must be one of the", [calibrate]),
    ("--model classifier --dataset pictures.parquet --split train", "--image_column must be one of the", SCORING),
    (f"{GOOD} --split train --image_column x", "--image_column must be one of the columns ['image', ", SCORING),
    (f"{GOOD} --split test", "--dataset good.parquet must have a split test, it has ['train'].", SCORING),
    (f"{GOOD} --split train --label_map camvid", "--dataset good.parquet has 11 classes, --model cla", SCORING),
    (
        "--model classifier --dataset beyond.parquet --split train",
        "--dataset beyond.parquet must have labels",
        SCORING,
    ),
    (
        "--model classifier --dataset negative.parquet --split train",
        "--dataset negative.parquet must have la",
        SCORING,
    ),
    (
        "--model classifier --dataset words.parquet --split train",
        "--dataset words.parquet must have integers",
        SCORING,
    ),
    ("--model classifier --dataset beyond.parquet --holdout 0.5", "--dataset beyond.parquet must have ", [calibrate]),
    ("--repeats 0", "--repeats must be at least 1, got 0.", [benchmark]),
    ("--threads 0", "--threads must be at least 1, got 0.", [benchmark]),
    ("--only everything", "--only must be among ", [benchmark]),
    ("--only", "--only must be among ", [benchmark]),
    ("--smok", "There is no option --smok; did you mean --smoke?", [benchmark]),
    ("--output text.pth", "--output must be a folder that can be written", [benchmark, demo]),
    ("--checkpoint nowhere --output new", "--checkpoint must be a file that exists, got nowhere.", ["convert"]),
    ("--checkpoint text.pth --output new", "text.pth is damaged, or holds more than tensors", ["convert"]),
    ("--checkpoint text.safetensors --output new", "text.safetensors is damaged, or holds more than", ["convert"]),
    ("--checkpoint other.pth --output new", "other.pth must hold tensors of an official AdaPerceiver", ["convert"]),
    ("--checkpoint other.pth --output vit", "--output must be a new or empty folder, got vit.", ["convert"]),
    ("--checkpoint other.pth", "the following arguments are required: --output", ["convert"]),
    ("--samples nowhere.parquet", "--samples must be a parquet file that exists, got nowhere.parquet.", [demo]),
    ("--samples pictures.parquet", "--samples pictures.parquet must have images and their classes, got ", [demo]),
    ("--samples words.parquet", "--samples words.parquet must have images and their classes, got ", [demo]),
    ("--checkpoint nowhere", "--checkpoint must be a folder with a config.json, or the id of", [demo]),
    ("--checkpoint segmenter", "--checkpoint must be a checkpoint of AdaPerceiverForImageClassification", [demo]),
    ("--model classifier", "the following arguments are required: --images", [visualize]),
    ("--model classifier --images", "--images must be at least one photograph, got nothing.", [visualize]),
    ("--model classifier --images nowhere.png", "--images nowhere.png is no photograph that can be", [visualize]),
    ("--model classifier --images text.png", "--images text.png is no photograph that can be read: ", [visualize]),
    ("--model nowhere --images black.png", "--model must be a folder with a config.json", [visualize]),
    ("--model vit --images black.png", "--model must be an AdaPerceiver, got vit, which is vit.", [visualize]),
    ("--model classifier --images black.png --exit_threshold 2", "--exit_threshold must be from 0 to 1", [visualize]),
    ("--model classifier --images black.png --output text.pth", "--output must be a folder that can ", [visualize]),
]
PREDICTING = [
    ("", "the following arguments are required: --model, --dataset"),
    ("classifier", "the following arguments are required: --dataset"),
    ("nowhere --dataset good.parquet", "--model must be a folder with a config.json, or the id of a model on the hub"),
    ("vit --dataset good.parquet", "--model must be an AdaPerceiver, got vit, which is vit."),
    ("headless --dataset good.parquet", "--model headless must be a checkpoint with a head for image-classification"),
    (
        "segmenter --dataset good.parquet --exit_threshold 0.5",
        "--exit_threshold is for classifiers, --model segmenter",
    ),
    ("classifier --dataset good.parquet --exit_threshold 2", "`--exit_threshold` must be a number from 0 to 1, got 2"),
    ("classifier --dataset good.parquet --width 99", "`--width` must be an integer from 1 to 32, got 99."),
    ("classifier --dataset good.parquet --policy router", "`--policy` must not be 'router' for a model without one"),
    ("classifier --dataset good.parquet --max_gflop 1", "There is no option --max_gflop; did you mean --max_gflops?"),
    ("classifier --dataset good.parquet --shard_size 0", "--shard_size must be at least 1, got 0."),
    ("classifier --dataset good.parquet --output text.pth", "--output must be a folder that can be written, got text"),
    ("classifier --dataset nowhere", "--dataset nowhere, which is no file or folder here, could not be loaded: "),
    ("classifier --dataset nothing.parquet", "--dataset nothing.parquet "),
    ("classifier --dataset pictures.parquet", "--image_column must be one of the columns ['picture'], got None."),
    ("classifier --dataset good.parquet --id_column x", "--id_column must be one of the columns ['image', 'label']"),
    ("classifier --dataset good.parquet --split test", "--split must be one of ['train'] of --dataset good.parquet"),
]
CASES = [
    (convert_official_checkpoint if script == "convert" else script, line, message)
    for line, message, scripts in MISTAKES
    for script in scripts
] + [(predict, line, message) for line, message in PREDICTING]


@pytest.mark.parametrize(("script", "line", "message"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_mistake_is_one_line_and_exit_code_2_before_a_model_is_loaded(
    script, line, message, here, monkeypatch, capsys
):
    def refuse(*args, **kwargs):
        raise AssertionError("a model is loaded")

    monkeypatch.chdir(here)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here / "cache")
    monkeypatch.setattr(sys, "argv", [script.__name__, *line.split()])
    before = {path.name for path in here.iterdir()} - {"cache"}
    with pytest.raises(SystemExit) as stopped:
        command_line(script.main)
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    # `datasets` shows bars as it prepares a file
    lines = [text for text in printed.err.splitlines() if text.strip() and "split: " not in text]
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {message}")
    assert {path.name for path in here.iterdir()} - {"cache"} == before


@pytest.mark.slow
@pytest.mark.parametrize("script", EVERY_SCRIPT)
def test_every_script_refuses_an_unknown_option_in_a_process_of_its_own(script, tmp_path):
    if script == "benchmark_runtimes":
        pytest.importorskip("onnx", reason="the runtimes have an environment of their own")
    command = [sys.executable, str(EXAMPLES / f"{script}.py"), "--no-such-option", "1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", EVERY_SCRIPT)
def test_every_script_is_run_by_command_line(script):
    main = (EXAMPLES / f"{script}.py").read_text().partition('if __name__ == "__main__":')[2]
    assert main.strip() == "command_line(main)"
