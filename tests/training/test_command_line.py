"""The command line of the training scripts: switches, lists, recipes, and one line for what cannot be used."""

import json
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
from conftest import EXAMPLES
from transformers import PreTrainedModel, ViTConfig

from adaperceiver import AdaPerceiverForImageClassification
from adaperceiver.training import data, dense_data
from adaperceiver.training.arguments import Parser, as_options, command_line


pytest.importorskip("kornia", reason="augmentation needs kornia")
import distill
import run_depth_estimation
import run_image_classification
import run_semantic_segmentation
import train_policy


SCRIPTS = [distill, run_image_classification, run_semantic_segmentation, run_depth_estimation, train_policy]
DENSE = [run_semantic_segmentation, run_depth_estimation]


@dataclass
class Arguments:
    flip: bool = True
    label_loss: bool = False
    reduce_labels: bool | None = None
    adaptive_axes: list[str] = field(default_factory=lambda: ["tokens"])


def parsed(*line):
    return Parser([Arguments]).parse(line)[0]


def test_booleans_are_switches_with_both_spellings_of_their_negation():
    assert parsed() == Arguments()
    assert parsed("--label_loss", "--no_flip") == Arguments(flip=False, label_loss=True)
    assert parsed("--label-loss", "--no-flip") == Arguments(flip=False, label_loss=True)
    assert parsed("--label_loss", "--no-label-loss", "--no_reduce_labels") == Arguments(reduce_labels=False)
    with pytest.raises(ValueError, match="No option takes the value True; switches"):
        parsed("--label_loss", "True")


def test_a_list_may_be_empty():
    assert parsed("--adaptive_axes").adaptive_axes == []
    assert parsed(*as_options({"adaptive_axes": [], "flip": False, "label_loss": True})) == Arguments(
        False, True, None, []
    )


@pytest.fixture
def _nothing_is_loaded(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("data or a model is loaded")

    monkeypatch.setattr(data, "stored_splits", refuse)
    monkeypatch.setattr(dense_data, "stored_pairs", refuse)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)


def line_of(script, arguments, monkeypatch, capsys):
    """What a script says about arguments that it cannot use."""
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        command_line(script.main)
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("error: ")
    return printed.removeprefix("error: ").strip()


BAD = [  # arguments, what is said of them, and the scripts, if not all
    (["--batch_size", 0], "--batch_size must be at least 1, got 0.", SCRIPTS),
    (["--clip_norm", -1], "--clip_norm must be above 0, got -1.0.", SCRIPTS),
    (["--train_samples", 0], "--train_samples must be at least 1, got 0.", SCRIPTS),
    (["--erasing", 2], "--erasing must be from 0 to 1, got 2.0.", SCRIPTS[:2]),
    (["--crop_scale", 1], "--crop_scale must be two numbers from 0 to 1, the smaller first, got 1.0.", SCRIPTS[:2]),
    (["--brightness", 2], "--brightness must be from 0 to 1, got 2.0.", DENSE),
    (["--adaptive_axes", "token"], "--adaptive_axes must be any of tokens, depth, width, got token.", SCRIPTS[:4]),
    (["--lerning_rate", 1], "There is no option --lerning_rate; did you mean --learning_rate?", SCRIPTS),
    (["--steps", "many"], "argument --steps: invalid int value: 'many'", SCRIPTS),
    (["--cost", "time"], "argument --cost: invalid choice: 'time'", [train_policy]),
    (["nothing.yaml"], "There is no recipe nothing.yaml; those at hand are ", SCRIPTS),
    (["--teacher", "no/such/folder"], "--teacher must be a folder with a config.json, or ", [distill]),
    (["--init_from", "no/such/folder"], "--init_from must be a folder with a config.json, or ", [distill]),
    (["--model", "no/such/folder"], "--model must be a folder with a config.json, or ", SCRIPTS[1:]),
    (["--dataset"], "--dataset must be at least one data set, got nothing.", [distill]),
    (
        ["--student", '{"hiden_size": 8}'],
        "--student has hiden_size, which is no field of AdaPerceiverConfig; did",
        [distill],
    ),
    (["--student", '{"hidden_size": "8"}'], "--student: Validation error for field 'hidden_size'", [distill]),
    (["--student", "student.json"], "--student must be JSON or a file that holds it, got student.json", [distill]),
    (["--student", "[1]"], "--student must be a mapping of fields of AdaPerceiverConfig, got [1].", [distill]),
    (
        ["--config_changes", '{"x": 8}'],
        "--config_changes has x, which is no field of AdaPerceiverConfig.",
        SCRIPTS[1:4],
    ),
    (["--config_changes", '{"hidden_size": 0}'], "--config_changes: `hidden_size` must be", SCRIPTS[1:4]),
    (["--image_size", 30, 32], "--image_size must be a height and a width, multiples of 8, got 30 32.", DENSE),
    (["--label_map", "nothing"], "--label_map must be a file or one of ade20k, ", SCRIPTS),
    (["--micro_batch_size", 7, "--batch_size", 8], "--batch_size must be a multiple of --micro_batch_size", SCRIPTS),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from conftest import TINY

    from adaperceiver import AdaPerceiverConfig

    folder = tmp_path_factory.mktemp("checkpoint")
    AdaPerceiverForImageClassification(AdaPerceiverConfig(**TINY)).save_pretrained(folder, save_code=False)
    return folder


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [(script, arguments, message) for arguments, message, scripts in BAD for script in scripts],
    ids=lambda value: getattr(value, "__name__", None) or "",
)
@pytest.mark.usefixtures("_nothing_is_loaded")
def test_what_cannot_be_used_is_said_in_one_line_before_anything_is_loaded(
    script, arguments, message, checkpoint, tmp_path, monkeypatch, capsys
):
    recipe = [] if str(arguments[0]).endswith(".yaml") else arguments
    first = arguments if not recipe else []
    common = ["--output_dir", tmp_path / "run", "--tracker", "none"]
    common += [] if script is distill else ["--model", checkpoint]
    assert line_of(script, [*first, *common, *recipe], monkeypatch, capsys).startswith(message)
    assert not list(tmp_path.glob("run*/**/*checkpoint*"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning_rate: 1", "which is no option of this script; did you mean learning_rate?"),
        ("stages: [{stepz: 1}]", "has stepz, which is no option of this script; did you mean steps?"),
        ("- steps", "must be a mapping, and its stages a list of mappings."),
        ("just words", "must be a mapping, and its stages a list of mappings."),
        ("stages: [1]", "must be a mapping, and its stages a list of mappings."),
        ("stages: {steps: 1}", "must be a mapping, and its stages a list of mappings."),
        ("steps: [1", "must be YAML or JSON: "),
        ("batch_size: 0", "--batch_size must be at least 1, got 0."),
        ("resume: maybe", "No option takes the value maybe; switches"),
    ],
)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.usefixtures("_nothing_is_loaded")
def test_recipes_are_checked_too(script, text, message, tmp_path, monkeypatch, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert message in line_of(script, [path, "--output_dir", tmp_path / "run"], monkeypatch, capsys)


def test_only_an_adaperceiver_is_fine_tuned(tmp_path, monkeypatch, capsys):
    ViTConfig().save_pretrained(tmp_path)
    for script in SCRIPTS[1:]:
        line = line_of(script, ["--model", tmp_path, "--output_dir", tmp_path / "run"], monkeypatch, capsys)
        assert line == f"--model must be an AdaPerceiver, got {tmp_path}, which is vit."


def test_a_later_stage_is_checked_before_the_first_one_runs(tmp_path, monkeypatch, capsys):
    path = tmp_path / "recipe.yaml"
    stages = [{"steps": 1}, {"student": {"widhts": [8]}}]
    path.write_text(json.dumps({"output_dir": str(tmp_path / "run"), "stages": stages}))
    assert "--student has widhts" in line_of(distill, [path], monkeypatch, capsys)
    assert not (tmp_path / "run").exists()


def test_an_error_in_a_loader_is_told_without_its_traceback(monkeypatch, capsys):
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            raise OSError("None of 4 images can be read.")

    def main(arguments):
        next(iter(torch.utils.data.DataLoader(Broken(), num_workers=1)))

    monkeypatch.setattr(distill, "main", main)
    assert line_of(distill, [], monkeypatch, capsys) == "None of 4 images can be read."


@pytest.mark.slow
def test_a_script_ends_with_one_line_and_exit_code_2(tmp_path):
    script = [sys.executable, str(EXAMPLES / "distill.py"), "--batch_size", "0"]
    result = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, "error: --batch_size must be at least 1, got 0.\n")
