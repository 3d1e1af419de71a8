"""
The official release: its config and tensor names, translated.

Its folders hold the arguments of the research code's classes as `config.json` (no `model_type`) beside `model.safetensors`.
`from_pretrained` of a model class loads them directly; saving writes our format.
"""

import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from .configuration_adaperceiver import AdaPerceiverConfig


logger = logging.getLogger(__name__)

# fmt: off
NAMES = [  # `task:official name` -> our name; applied one after the other
    (r"^segmentation:head\.conv_seg\.",        r"head.classifier."),
    (r"^depth:head\.conv_seg\.",               r"head.bins."),
    (r"^\w+:",                                 r""),
    (r"^head\.bn\.",                           r"head.norm."),
    # The backbone of a segmentation or depth model has a single write, and calls it by the classifier's name.
    (r"^backbone\.write_head\.",               r"write_head_feat."),
    (r"^backbone\.output_(latents|adapter)\.", r"output_\1_feat."),
    (r"^backbone\.",                           r""),
    (r"^patch_embed\.pos_embed$",              r"adaperceiver.embeddings.position_embeddings"),
    (r"^patch_embed\.embed\.proj\.",           r"adaperceiver.embeddings.patch_embeddings."),
    (r"^patch_embed\.",                        r"adaperceiver.embeddings."),
    (r"^process_latents\.token$",              r"adaperceiver.read.latent_token"),
    (r"^read_head\.",                          r"adaperceiver.read.cross_attention."),
    (r"^blocks\.(\d+)\.attn\.",                r"adaperceiver.layers.\1.attention."),
    (r"^blocks\.(\d+)\.ls([12])\.",            r"adaperceiver.layers.\1.layer_scale\2."),
    (r"^blocks\.",                             r"adaperceiver.layers."),
    (r"^output_latents\.token$",               r"adaperceiver.class_readout.output_token"),
    (r"^output_latents_feat\.proj\.",          r"adaperceiver.dense_readout.projection."),
    (r"^write_head\.",                         r"adaperceiver.class_readout.write."),
    (r"^write_head_feat\.",                    r"adaperceiver.dense_readout.write."),
    (r"^output_adapter\.ffn\.(weight|bias)$",  r"classifier.\1"),
    (r"^output_adapter_feat\.",                r"feature_adapter."),
    (r"\.cattn\.",                             r"."),
    (r"\.src_norm\.",                          r".source_norm."),
    (r"\.snk_norm\.",                          r".sink_norm."),
    (r"(attention|write)\.([qkv])\.",          r"\1.\2_proj."),
    (r"(attention|write)\.proj\.",             r"\1.o_proj."),
]
FIELDS = {  # official argument -> field of our config
    "embed_dim": "hidden_size",       "num_heads": "num_attention_heads",  "depth": "num_hidden_layers",
    "img_size": "image_size",         "patch_size": "patch_size",          "in_channels": "num_channels",
    "num_classes": "num_labels",      "output_feat_dim": "feature_size",   "ffn_ratio": "ffn_ratio",
    "qkv_bias": "qkv_bias",           "proj_bias": "proj_bias",            "rope_theta": "rope_theta",
    "ls_init_values": "layerscale_value", "mask_token_grans": "token_granularities", "mat_dims": "widths",
    "max_latent_tokens": "max_latent_tokens", "use_embed_ffn": "use_embed_ffn", "proj_drop": "hidden_dropout_prob",
    "attn_drop": "attention_probs_dropout_prob", "drop_path": "drop_path_rate", "head_drop": "head_dropout_prob",
}
CHOICES: dict[str, dict[Any, dict[str, Any]]] = {  # official argument -> its values that exist here, and what they mean
    "act_layer": {"gelu": {"hidden_act": "gelu"}, "relu": {"hidden_act": "relu"}, "silu": {"hidden_act": "silu"}},
    "norm_layer": {"layernorm": {}},
    "ffn_layer": {"mlp": {}},  # with swiglu the embed FFN and the output FFN are gated as well, which they cannot be here
    "block_mask": {"block": {}, "none": {"attention_type": "bidirectional"}},
    "attn_layer": {"flex": {}, "full": {"attention_type": "bidirectional"}},
    "process_token_init": {"learned": {}},
    "use_output_ffn": {False: {}},
}
# fmt: on
# Sizes that the tensors show where the config does not tell them, by our names: of the backbone, and of a dense head, whose
# sizes are no arguments of the official config.
SHOWN = {"num_classes": "classifier.bias", "output_feat_dim": "feature_adapter.ffn.fc2.bias"}
SHOWN_BY_HEAD = {"num_labels": "head.classifier.bias", "num_depth_bins": "head.bins.bias"}
LABELS = {1000: "imagenet1k", 11821: "imagenet12k"}  # which data a classifier of so many classes knows


def is_official(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of the official release."""
    return "model_type" not in config and {"embed_dim", "mask_token_grans", "max_latent_tokens"} <= config.keys()


def translate_config(config: Mapping[str, Any], source: str = CONFIG_NAME) -> dict[str, Any]:
    """The fields of our config; every argument of the official one is read, or refused by name."""
    unknown = [name for name in config if name not in FIELDS and name not in CHOICES]
    if unknown:
        raise ValueError(
            f"{source} has {', '.join(f'`{name}`' for name in unknown)}, which no AdaPerceiver is known to have."
        )
    fields = {ours: config[name] for name, ours in FIELDS.items() if name in config}
    for name, choices in CHOICES.items():
        if name in config:
            if config[name] not in list(choices):
                allowed = " or ".join(repr(value) for value in choices)
                raise ValueError(f"`{name}` in {source} must be {allowed} to be loaded here, got {config[name]!r}.")
            fields |= choices[config[name]]
    labels = label_names(fields.get("num_labels"))
    if labels is not None:
        fields |= {"id2label": dict(enumerate(labels)), "label2id": {name: index for index, name in enumerate(labels)}}
    return fields


def label_names(number: int | None) -> list[str] | None:
    """The names of ImageNet-1K's or ImageNet-12K's classes, by their number."""
    if number not in LABELS:
        return None
    path = Path(__file__).parent / "evaluation" / "labels" / f"{LABELS[number]}.txt"
    if not path.is_file():  # beside the code of a saved folder
        logger.warning(
            f"The {number} labels stay LABEL_0 and so on: the package adaperceiver has their names, a folder has not."
        )
        return None
    return path.read_text(encoding="utf-8").splitlines()


def infer_task(names: Iterable[str]) -> str:
    """What a model with tensors of these official names is for."""
    names = list(names)
    if any(name.startswith("backbone.") for name in names):
        return "segmentation" if any(name.startswith("head.bn.") for name in names) else "depth"
    return "distillation" if any("_feat." in name for name in names) else "classification"


def our_name(name: str, task: str = "classification") -> str:
    """Our name of the tensor that the official model for `task` calls `name`."""
    name = f"{task}:{name}"
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def rename(tensors: Mapping[str, torch.Tensor], task: str) -> dict[str, torch.Tensor]:
    """Official tensors under our names. Learned tokens and positions have three axes, (1, tokens, hidden_size), here."""
    ours: dict[str, torch.Tensor] = {}
    for official_name, tensor in tensors.items():
        name = our_name(official_name, task)
        if name in ours:
            raise ValueError(f"{official_name} is one of two tensors of the checkpoint that become {name}.")
        if name.endswith(("_token", "position_embeddings")):
            tensor = tensor[(None,) * (3 - tensor.ndim)]
        ours[name] = tensor
    return ours


def load_official(
    model_class: type,
    source: str | os.PathLike,
    official_config: Mapping[str, Any],
    hub_kwargs: dict,
    our_config: AdaPerceiverConfig | None = None,
    **fields,
) -> tuple[AdaPerceiverConfig, dict[str, torch.Tensor]]:
    """The `official_weights` of an official folder or hub id."""
    tensors = load_file(cached_file(source, SAFE_WEIGHTS_NAME, **hub_kwargs))
    where = f"the {CONFIG_NAME} of {source}"
    return official_weights(model_class, tensors, official_config, where, our_config, **fields)


def official_weights(
    model_class: type,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    source: str = CONFIG_NAME,
    our_config: AdaPerceiverConfig | None = None,
    **fields,
) -> tuple[AdaPerceiverConfig, dict[str, torch.Tensor]]:
    """
    The config for a model of `model_class`, and the official `tensors` under our names. What the official `config` leaves
    out is the paper's or, for numbers of labels, features and depth bins, what the tensors show; `fields` change the result,
    and `our_config` replaces it.

    Missing and unexpected tensors and shapes that differ are errors, all listed. But a model without a classifier takes
    what it needs from a distillation checkpoint: the class tensors are not used then, and a head is new.
    """
    task = infer_task(tensors)
    ours = rename(tensors, task)
    official_names = {our_name(name, task): name for name in tensors}
    if our_config is None:
        our_config = infer_config(model_class, ours, config, source, task, fields)
    with torch.device("meta"):
        model = model_class(our_config)
    if model.base_model is model:
        prefix = f"{model.base_model_prefix}."
        official_names = {name.removeprefix(prefix): official for name, official in official_names.items()}
        ours = {name.removeprefix(prefix): tensor for name, tensor in ours.items()}
    return our_config, fit(model, ours, official_names, task)


def infer_config(
    model_class: type,
    ours: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    source: str,
    task: str,
    fields: dict,
) -> AdaPerceiverConfig:
    shown = {argument: ours[name].numel() for argument, name in SHOWN.items() if name in ours}
    translated = translate_config({**shown, **config}, source)
    translated["output_tokens"] = {"classification": "class", "distillation": "both"}.get(task, "dense")
    if getattr(model_class, "readouts", None) is None:  # the labels are those of the classifier
        for name in ("num_labels", "id2label", "label2id"):
            translated.pop(name, None)
    translated |= {field: ours[name].numel() for field, name in SHOWN_BY_HEAD.items() if name in ours}
    try:
        return AdaPerceiverConfig(**{**translated, **fields})
    except StrictDataclassError as error:  # which says what is wrong, but not where
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from error


def fit(
    model: torch.nn.Module, ours: Mapping[str, torch.Tensor], official_names: Mapping[str, str], task: str
) -> dict[str, torch.Tensor]:
    """Those of the tensors `ours` that `model` has, if they fit; `official_names` are for the errors."""
    wanted = model.state_dict()
    missing, unexpected = wanted.keys() - ours.keys(), ours.keys() - wanted.keys()
    only_backbone = task == "distillation" and not hasattr(model, "classifier")
    may_be_new = {name for name in missing if only_backbone and name.startswith("head.")}
    unused = r"(adaperceiver\.class_readout|classifier|feature_adapter)\."
    may_be_unused = {name for name in unexpected if only_backbone and re.match(unused, name)}
    problems = [f"missing: {name}" for name in missing - may_be_new]
    problems += [f"unexpected: {official_names[name]}" for name in unexpected - may_be_unused]
    problems += [
        f"shape mismatch: {official_names[name]} is {tuple(ours[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in wanted.keys() & ours.keys()
        if ours[name].shape != wanted[name].shape
    ]
    if problems:
        lines = "\n  ".join(sorted(problems))
        raise ValueError(f"The {task} checkpoint does not fit {type(model).__name__}:\n  {lines}")
    for what, names in (("newly initialised", may_be_new), ("not used", may_be_unused)):
        if names:
            logger.warning(f"{type(model).__name__}: {what}: {', '.join(sorted(names))}.")
    return {name: ours[name] for name in wanted.keys() & ours.keys()}


__all__ = ["label_names", "load_official", "official_weights"]
