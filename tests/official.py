"""The official model's tiny reference: its weights under our names, its inputs, its outputs (see fixtures/README.md)."""

from functools import cache
from pathlib import Path

import convert_official_checkpoint as converter
import torch
from safetensors.torch import load_file

from adaperceiver import AdaPerceiverConfig, AdaPerceiverForImageClassification, AdaPerceiverPreTrainedModel


our_name = converter.our_name
FIXTURES = Path(__file__).parent / "fixtures"
PARTS = {  # of the weights, by task
    "classification": ("trunk", "cls"),
    "distillation": ("trunk", "cls", "distill"),
    "segmentation": ("trunk", "dense", "seg"),
    "depth": ("trunk", "dense", "depth"),
}
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "patch_size": 4,
    "image_size": 32,
    "max_latent_tokens": 16,
    "token_granularities": [4, 8, 16],
    "widths": [32, 48, 64],
    "feature_size": 80,
    "num_depth_bins": 16,
}
CONFIG = AdaPerceiverConfig(**TINY)


@cache
def recorded() -> dict[str, torch.Tensor]:
    """Inputs and outputs of the official model."""
    return load_file(FIXTURES / "io.safetensors")


def official_tensors(task: str) -> dict[str, torch.Tensor]:
    """The reference weights of `task` as the official model stores them."""
    tensors = {}
    for stored_name, tensor in load_file(FIXTURES / "weights.safetensors").items():
        part, name = stored_name.split(".", 1)
        if part in PARTS[task]:
            backbone = "dense" in PARTS[task] and part in ("trunk", "dense")
            tensors[f"backbone.{name}" if backbone else name] = tensor
    return tensors


def official_model(model_class: type[AdaPerceiverPreTrainedModel], **changes) -> AdaPerceiverPreTrainedModel:
    """Our model with the official model's weights; `changes` go to the config."""
    task = next(task for task, task_class in converter.TASKS.items() if task_class is model_class)
    changes = {"num_labels": 5 if task == "segmentation" else 10, **changes}
    model = model_class(AdaPerceiverConfig(**{**TINY, **changes}))
    model.load_state_dict(converter.rename(official_tensors(task), task), strict=True)
    return model.eval()


@cache
def official_classifier() -> AdaPerceiverForImageClassification:
    return official_model(AdaPerceiverForImageClassification)
