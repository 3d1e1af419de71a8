"""The official model's tiny reference: its weights under our names, its inputs, its outputs (see fixtures/README.md)."""

import re
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from adaperceiver import AdaPerceiverConfig, AdaPerceiverForImageClassification, AdaPerceiverPreTrainedModel


FIXTURES = Path(__file__).parent / "fixtures"

# fmt: off
NAMES = [  # official -> ours, applied one after the other
    (r"^patch_embed\.pos_embed$",              r"adaperceiver.embeddings.position_embeddings"),
    (r"^patch_embed\.embed\.proj\.",           r"adaperceiver.embeddings.patch_embeddings."),
    (r"^patch_embed\.",                        r"adaperceiver.embeddings."),
    (r"^process_latents\.token$",              r"adaperceiver.read.latent_token"),
    (r"^read_head\.",                          r"adaperceiver.read.cross_attention."),
    (r"^blocks\.(\d+)\.attn\.",                r"adaperceiver.layers.\1.attention."),
    (r"^blocks\.(\d+)\.ls([12])\.",            r"adaperceiver.layers.\1.layer_scale\2."),
    (r"^blocks\.",                             r"adaperceiver.layers."),
    (r"^output_latents\.token$",               r"adaperceiver.class_readout.output_token"),
    (r"^output_adapter\.ffn\.(weight|bias)$",  r"classifier.\1"),
    (r"^output_latents_feat\.proj\.",          r"adaperceiver.dense_readout.projection."),
    (r"^output_adapter_feat\.",                r"feature_adapter."),
    (r"^write_head_feat\.",                    r"adaperceiver.dense_readout.write."),
    (r"^write_head\.",                         r"adaperceiver.class_readout.write."),
    (r"^head\.bn\.",                           r"head.norm."),
    (r"\.cattn\.",                             r"."),
    (r"\.src_norm\.",                          r".source_norm."),
    (r"\.snk_norm\.",                          r".sink_norm."),
    (r"(attention|write)\.([qkv])\.",          r"\1.\2_proj."),
    (r"(attention|write)\.proj\.",             r"\1.o_proj."),
]
DENSE_NAMES = [  # what a segmentation or depth model of the official code calls by the classifier's names
    (r"^backbone\.",                           r""),
    (r"^output_latents\.proj\.",               r"output_latents_feat.proj."),
    (r"^output_adapter\.(norm|ffn\.fc)",       r"output_adapter_feat.\1"),
    (r"^write_head\.",                         r"write_head_feat."),
]
SEGMENTATION_NAMES = [*DENSE_NAMES, (r"^head\.conv_seg\.", r"head.classifier.")]
DEPTH_NAMES        = [*DENSE_NAMES, (r"^head\.conv_seg\.", r"head.bins.")]
# fmt: on

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


def our_name(name: str, names: list[tuple[str, str]] = NAMES) -> str:
    for pattern, replacement in names:
        name = re.sub(pattern, replacement, name)
    return name


def parameters(prefixes: list[str], names: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """The reference weights whose names in the file start with one of `prefixes`, under our names."""
    state_dict = {}
    for stored_name, tensor in load_file(FIXTURES / "weights.safetensors").items():
        prefix, name = stored_name.split(".", 1)
        if prefix in prefixes:
            name = our_name(name, names)
            state_dict[name] = tensor.view(1, 1, -1) if name.endswith("_token") else tensor
    return state_dict


def official_model(model_class: type[AdaPerceiverPreTrainedModel], **changes) -> AdaPerceiverPreTrainedModel:
    """Our model with the official model's weights; `changes` go to the config."""
    task = model_class.__name__.removeprefix("AdaPerceiverFor")
    prefixes, names = {
        "ImageClassification": (["trunk", "cls"], NAMES),
        "Distillation": (["trunk", "cls", "distill"], NAMES),
        "SemanticSegmentation": (["trunk", "dense", "seg"], SEGMENTATION_NAMES + NAMES),
        "DepthEstimation": (["trunk", "dense", "depth"], DEPTH_NAMES + NAMES),
    }[task]
    changes = {"num_labels": 5 if task == "SemanticSegmentation" else 10, **changes}
    model = model_class(AdaPerceiverConfig(**{**TINY, **changes}))
    model.load_state_dict(parameters(prefixes, names), strict=True)
    return model.eval()


@cache
def official_classifier() -> AdaPerceiverForImageClassification:
    return official_model(AdaPerceiverForImageClassification)
