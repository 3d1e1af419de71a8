"""The official model's tiny reference: its weights under our names, its inputs, its outputs (see fixtures/README.md)."""

from functools import cache
from pathlib import Path

import torch
from convert_official_checkpoint import TASKS
from safetensors.torch import load_file

from adaperceiver import AdaPerceiverConfig, AdaPerceiverForImageClassification, AdaPerceiverPreTrainedModel
from adaperceiver.official_adaperceiver import rename


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
# The `config.json` of such a model, as the official classes write it.
OFFICIAL = {
    "act_layer": "gelu",
    "attn_drop": 0.0,
    "attn_layer": "flex",
    "block_mask": "block",
    "depth": 4,
    "drop_path": 0.0,
    "embed_dim": 64,
    "ffn_layer": "mlp",
    "ffn_ratio": 2.57,
    "head_drop": 0.0,
    "img_size": 32,
    "in_channels": 3,
    "ls_init_values": 1e-05,
    "mask_token_grans": [4, 8, 16],
    "mat_dims": [32, 48, 64],
    "max_latent_tokens": 16,
    "norm_layer": "layernorm",
    "num_classes": 10,
    "num_heads": 4,
    "patch_size": 4,
    "process_token_init": "learned",
    "proj_bias": True,
    "proj_drop": 0.0,
    "qkv_bias": True,
    "rope_theta": 10000,
    "use_embed_ffn": True,
    "use_output_ffn": False,
}


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
    task = next(task for task, task_class in TASKS.items() if task_class is model_class)
    changes = {"num_labels": 5 if task == "segmentation" else 10, **changes}
    model = model_class(AdaPerceiverConfig(**{**TINY, **changes}))
    model.load_state_dict(rename(official_tensors(task), task), strict=True)
    return model.eval()


@cache
def official_classifier() -> AdaPerceiverForImageClassification:
    return official_model(AdaPerceiverForImageClassification)
