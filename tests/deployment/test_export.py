"""One operating point by transformers' exporters, in the formats of ONNX Runtime and OpenVINO, and the script as users run it."""

import json
import subprocess
import sys

import pytest
import torch


pytest.importorskip("onnx", reason="ONNX files are written with the extra [onnx]: make test-export")
pytest.importorskip("onnxscript", reason="ONNX files are written with the extra [onnx]: make test-export")
pytest.importorskip("onnxruntime", reason="ONNX files are run with the extra [onnx]: make test-export")

import export as script
from conftest import EXAMPLES, MODEL_CLASSES, ROOT, images

from adaperceiver import (
    AdaPerceiverBackbone,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForImageClassification,
    image_processor_for,
)
from adaperceiver.deployment import export as deployment
from adaperceiver.deployment.export import export, load, verify


CHECKPOINT = ROOT / "checkpoints" / "adaperceiver-tiny-cifar10"
SAMPLES = EXAMPLES / "cifar10_samples.parquet"


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_onnx_gives_every_output_of_every_head(model_class, tiny_model, tmp_path):
    model = tiny_model(model_class)
    network = model if model_class is AdaPerceiverBackbone else model.extract(tokens=8, width=24, depth=1)
    export(network, tmp_path, "onnx", (32, 32))
    assert verify(network, load(tmp_path), (32, 32))["largest_difference"] < 1e-4  # at batches of 1 and 3
    assert str(ROOT).encode() not in (tmp_path / "model.onnx").read_bytes()  # no paths of the exporting machine


@pytest.mark.parametrize("model_class", [AdaPerceiverForImageClassification, AdaPerceiverForDepthEstimation])
def test_onnx_takes_images_of_any_size(model_class, tiny_model, tmp_path):
    network = tiny_model(model_class).extract(tokens=8, depth=1)
    export(network, tmp_path, "onnx", (32, 32), dynamic_size=True)
    assert verify(network, load(tmp_path), (32, 32), dynamic_size=True)["largest_difference"] < 1e-4


def test_openvino_gives_what_the_model_gives(tiny_model, tmp_path):
    pytest.importorskip("openvino", reason="needs the extra [openvino]: make test-export")
    network = tiny_model(AdaPerceiverForDepthEstimation).extract(tokens=8, width=24, depth=1)
    export(network, tmp_path, "openvino", (32, 32))
    assert verify(network, load(tmp_path), (32, 32))["largest_difference"] < 1e-4


@pytest.mark.parametrize("file_format", ["onnx", "openvino"])
def test_int8_stays_close_and_is_smaller(file_format, tiny_model, tmp_path):
    pytest.importorskip("nncf", reason="int8 needs the extra [openvino]: make test-export")
    network = tiny_model(AdaPerceiverForImageClassification, hidden_size=64).extract(tokens=8, depth=1)
    export(network, tmp_path, file_format, (32, 32), calibration=[images(4), images(4)])
    compared = verify(network, load(tmp_path), (32, 32), images=images(8))
    assert 1e-4 < compared["relative_difference"] < 0.3
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 0.7 * 4 * network.num_parameters() + 100_000


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "export.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_writes_one_network_with_its_preprocessing_and_its_score(tmp_path):
    point = ["--tokens", 4, "--width", 32, "--depth", 2]
    data = ["--dataset", SAMPLES, "--split", "train", "--output", tmp_path / "small"]
    result = run(CHECKPOINT, *point, *data)
    assert result.returncode == 0, result.stderr
    names = {path.name for path in (tmp_path / "small").iterdir()}
    assert names >= {"model.onnx", "export.json", "preprocessor_config.json"}
    report = json.loads((tmp_path / "small" / "export.json").read_text())
    assert (report["tokens"], report["width"], report["depth"]) == (4, 32, 2)
    assert report["largest_difference"] < 1e-4
    (score,) = report["scores"]
    assert score["pytorch"] == score["exported"] > 0.8
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_the_script_writes_an_int8_bundle_that_is_calibrated_anew(tmp_path):
    data = ["--calibration", SAMPLES, "--dataset", SAMPLES, "--split", "train"]
    point = ["--calibration_images", 160, "--max_drop", 0.1, "--max_loss", 2]
    result = run(CHECKPOINT, "--bundle", "--int8", *data, *point, "--output", tmp_path / "bundle")
    assert result.returncode == 0, result.stderr
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert len(manifest["exit"]["temperatures"]) == 6
    report = json.loads((tmp_path / "bundle" / "export.json").read_text())
    assert 0 < report["early_exit"]["exit_threshold"] < 1
    fixed = [row for row in report["scores"] if not row["exit_threshold"]]
    assert len(fixed) == 4 + 2
    assert all(abs(row["pytorch"] - row["exported"]) < 0.02 for row in fixed)


def test_an_export_with_other_numbers_is_not_kept(tiny_model, monkeypatch, tmp_path):
    model = tiny_model(AdaPerceiverForImageClassification)
    model.save_pretrained(tmp_path / "model")
    image_processor_for(model.config, "image-classification").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(deployment, "export", lambda *arguments: None)
    monkeypatch.setattr(deployment, "load", lambda *arguments: lambda x: {"logits": torch.zeros(len(x), 10).numpy()})
    with pytest.raises(
        ValueError, match=r"The export differs from PyTorch by .*, more than 0\.0001; nothing was written"
    ):
        script.main([str(tmp_path / "model"), "--output", str(tmp_path / "export")])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--int8"], "--int8 and --calibration go together"),
        (["--bundle", "--tokens", 4], "--tokens, --width and --depth are of one network"),
        (["--depths", 2], "--depths, --exit_after and --exit_every are of a --bundle"),
        (["--depth", 7], "`depth` must be an integer from 1 to 6, got 7"),
        (["--format", "openvino", "--dynamic_size"], "`dynamic_size` needs the format \"onnx\", got 'openvino'"),
    ],
    ids=str,
)
def test_bad_arguments_of_the_script_are_named(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        script.main([str(CHECKPOINT), *map(str, arguments), "--output", str(tmp_path / "export")])
    assert not list(tmp_path.iterdir())
