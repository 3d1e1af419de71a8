"""Every script takes --device and --dtype, says which it uses, and computes in it."""

import subprocess
import sys

import pytest
import torch
from conftest import EXAMPLES, ROOT

from adaperceiver.training.arguments import Parser
from adaperceiver.training.devices import DeviceArguments


CHECKPOINT, SAMPLES = ROOT / "checkpoints" / "adaperceiver-tiny-cifar10", EXAMPLES / "cifar10_samples.parquet"


def parsed(*line):
    return Parser([DeviceArguments]).parse(line)[0]


@pytest.fixture
def _two_gpus(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


def test_a_cpu_computes_in_float32_unless_it_is_told_otherwise(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    device = parsed().start()
    assert (device.device, device.dtype) == (torch.device("cpu"), torch.float32)
    with device.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with parsed("--dtype", "bfloat16").start().autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Runs on cpu (")
    assert first.endswith(") in float32.")
    assert second.endswith(") in bfloat16 autocast.")
    with pytest.raises(ValueError, match=r"--device must be one of cpu, got cuda\."):
        parsed("--device", "cuda")


@pytest.mark.usefixtures("_two_gpus")
def test_an_accelerator_is_taken_by_default_in_bfloat16_autocast(capsys):
    for line, device, dtype in (
        ([], "cuda", torch.bfloat16),
        (["--device", "cuda:1"], "cuda:1", torch.bfloat16),
        (["--device", "cpu"], "cpu", torch.float32),
        (["--dtype", "float32"], "cuda", torch.float32),
    ):
        found = parsed(*line).start()
        assert (str(found.device), found.dtype) == (device, dtype)
    assert "Runs on cuda:1 (a GPU) in bfloat16 autocast." in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"--device must be one of cpu, cuda, cuda:0, cuda:1, got cuda:2\."):
        parsed("--device", "cuda:2")


@pytest.mark.usefixtures("_two_gpus")
def test_one_device_for_several_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parsed("--device", "cuda").device == "cuda"
    with pytest.raises(ValueError, match=r"--device cuda:1 is one for 2 processes: give cuda\."):
        parsed("--device", "cuda:1")


COMMANDS = {
    "predict": [CHECKPOINT, "--dataset", SAMPLES],
    "evaluate_model": ["--model", CHECKPOINT, "--dataset", SAMPLES, "--split", "train", "--validation_samples", 8]
    + ["--tokens", 8, "--widths", 32, "--exit_thresholds", 0.9, "--latency_batch_size", 2],
    "evaluate_policies": ["--model", CHECKPOINT, "--dataset", SAMPLES, "--split", "train"]
    + ["--validation_samples", 16, "--timed_images", 2],
    "calibrate": ["--model", CHECKPOINT, "--dataset", SAMPLES, "--holdout", 0.5, "--max_drop", 0.2],
    "visualize": ["--model", CHECKPOINT, "--images", "image.png"],
    "demo": [],
    "benchmark": ["--smoke"],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", COMMANDS)
def test_scripts_run_in_the_precision_that_they_name(script, tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    Image.effect_mandelbrot((48, 40), (-2.0, -1.2, 1.0, 1.2), 100).convert("RGB").save(tmp_path / "image.png")
    options = [*COMMANDS[script], "--device", "cpu", "--dtype", "bfloat16", "--output", "out"]
    command = [sys.executable, str(EXAMPLES / f"{script}.py"), *map(str, options)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Runs on cpu (") == 1
    assert "in bfloat16 autocast." in result.stdout
    assert any((tmp_path / "out").iterdir())
