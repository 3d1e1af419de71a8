"""What every test shares: offline, seeded, on two threads, with one tiny model."""

import os
import subprocess
import sys
from pathlib import Path


os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it once, at its import
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads that spin are ten times slower on a busy machine

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from adaperceiver import (
    AdaPerceiverBackbone,
    AdaPerceiverConfig,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverModel,
)


ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

TINY = {  # granularities 2, 4, 6, 8, 12, 16; widths 16, 24, 32; a 4x4 grid of patches
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_latent_tokens": 16,
    "feature_size": 24,
    "num_depth_bins": 8,
    "num_labels": 10,
}

MODEL_CLASSES = [
    AdaPerceiverModel,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverBackbone,
]


@pytest.fixture(autouse=True)
def _repeatable():
    torch.set_num_threads(2)
    torch.manual_seed(0)


@pytest.fixture
def tiny_config():
    return AdaPerceiverConfig(**TINY)


@pytest.fixture
def tiny_model():
    """Build a tiny model whose every parameter matters: at init, latents and layer scales are next to nothing."""

    def build(model_class, **changes):
        model = model_class(AdaPerceiverConfig(**{**TINY, **changes})).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        return model

    return build


@pytest.fixture
def _own_cache(monkeypatch, tmp_path_factory):
    """What `datasets` keeps goes to a folder of this run."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "cache")


def images(batch=2, height=32, width=32):
    return torch.randn(batch, 3, height, width)


def aligned(model):
    """Safetensors maps weights at odd addresses, where kernels may sum in another order: copy them to fresh memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def assert_equal(actual, expected):
    """Bit for bit; tensors, or tuples of them."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_close(actual, expected, tolerance=5e-6):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def counted_flops(model, pixel_values, **point):
    """What torch's own counter finds in one call. Use eager attention: torch does not count its fused one on CPU."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(pixel_values, **point)
    return counter.get_total_flops()


def run(code, folder, python=sys.executable):
    """What a fresh Python prints, started in `folder`, away from the repository."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-c", code]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def command_line(**arguments) -> list[str]:
    return [text for name, value in arguments.items() for text in (f"--{name}", str(value))]


def run_script(name: str, folder: Path, **arguments) -> subprocess.CompletedProcess:
    """Run a script of `examples/` as a user does, in `folder`."""
    command = [sys.executable, str(EXAMPLES / name), *command_line(**arguments)]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
