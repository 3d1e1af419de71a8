"""
A folder that runs an AdaPerceiver at any of its operating points without PyTorch; `session.py` lies in it and runs it.

All graphs read one file of weights. A narrower network is the first rows of its tensors, a shallower one the first segments
of blocks, and the number of latents is an axis of unknown length, so no operating point adds weights.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from transformers.image_processing_utils import BaseImageProcessor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..adaptive_adaperceiver import AXES, BUDGETS, OperatingPoint, write_json
from ..layers_adaperceiver import Rope, rotary_embedding
from ..modeling_adaperceiver import AdaPerceiverPreTrainedModel
from . import session
from .export import differences, judge, preprocessing_of, size_of
from .graphs import WEIGHTS, WeightFile, chain, export_part, quantize, tidy, weights_of
from .int8 import input_ranges, int8_weights


MASKED = "adaperceiver_masked"  # the attention that is exported


def masked_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    block_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with a mask for its scores, which works for any number of latents where slices would fix it."""
    scores = query @ (key * scaling).transpose(2, 3)
    scores = scores if block_mask is None else scores + block_mask
    return (scores.softmax(dim=-1) @ value).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(MASKED, masked_attention)


@contextmanager
def exported_attention(model: AdaPerceiverPreTrainedModel) -> Iterator[None]:
    implementation = model.config._attn_implementation
    try:
        model.config._attn_implementation = MASKED
        yield
    finally:
        model.config._attn_implementation = implementation


# ----------------------------------------------------------------------------------------------------------------- parts


class Embed(nn.Module):
    def __init__(self, model: AdaPerceiverPreTrainedModel):
        super().__init__()
        self.embeddings = model.base_model.embeddings

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input_tokens": self.embeddings(pixel_values)}


class Read(nn.Module):
    def __init__(self, model: AdaPerceiverPreTrainedModel):
        super().__init__()
        self.read = model.base_model.read

    def forward(self, input_tokens: torch.Tensor, rope: Rope) -> dict[str, torch.Tensor]:
        return {"latents": self.read(input_tokens, rope)}


class Block(nn.Module):
    def __init__(self, model: AdaPerceiverPreTrainedModel):
        super().__init__()
        self.layer = model.base_model.layers[0]
        self.width = model.config.max_width

    def forward(self, latents: torch.Tensor, rope: Rope, block_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"next": self.layer(latents, rope, None, self.width, block_mask=block_mask)}


class Readout(nn.Module):
    """Latents (and input tokens, for dense predictions) to what the head predicts."""

    def __init__(self, model: AdaPerceiverPreTrainedModel, image_size: Sequence[int]):
        super().__init__()
        base, self.image_size = model.base_model, tuple(image_size)
        object.__setattr__(self, "model", model)  # for its methods; what it is made of follows, and no blocks
        own = [(name, part) for name, part in model.named_children() if part is not base]
        readouts = [(name, getattr(base, name)) for name in ("class_readout", "dense_readout")]
        for name, part in [*own, *readouts]:
            self.add_module(name, part)

    @property
    def is_dense(self) -> bool:
        return self.dense_readout is not None

    def forward(
        self, latents: torch.Tensor, rope: Rope, input_tokens: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        model = self.model
        encoded = model.base_model.write(latents, input_tokens, rope)
        predictions = {}
        if model.class_targets:
            predictions["logits"] = model.classifier(encoded.pooler_output)
        if model.dense_targets:
            pixel_values = torch.empty(1, model.config.num_channels, *self.image_size, device="meta")  # for its shape
            targets = dict.fromkeys(model.dense_targets)
            predictions |= model.predict_dense(encoded.output_tokens, pixel_values, targets)[0]
        return predictions


# ---------------------------------------------------------------------------------------------------------------- writing


def write_bundle(
    model: AdaPerceiverPreTrainedModel,
    processor: BaseImageProcessor,
    folder: Path,
    depths: Sequence[int] = (),
    calibration: Sequence[torch.Tensor] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """
    Fill `folder` and return its manifest. Depths are `exit_after` of `model`, every `exit_every`-th from there, its last one
    and `depths`. With `calibration`, batches of pixel values, products with weights run in int8.
    """
    config, base = model.config, model.base_model
    check(model)
    image_size = size_of(processor, config.image_size)
    after, every = (getattr(model.adaptive_config, name) or 1 for name in ("exit_after", "exit_every"))
    last = config.num_hidden_layers
    depths = sorted({*range(after, last, every), *depths, last})
    ranges = None if calibration is None else input_ranges(model, calibration)

    say("exporting the parts")
    parts = exported_parts(model, image_size)
    files: dict[str, tuple[str, tuple[int, int, int] | None]] = {
        f"{name}.onnx": (name, None) for name in ("embed", "read", "readout")
    }
    segments = list(zip([0, *depths], depths))
    for width, (start, stop) in product(config.widths, segments):
        files[f"blocks_{width}_{start}_{stop}.onnx"] = ("block", (width, start, stop))

    # Where the tensors of each part are in the model, and how they are stored.
    prefix = "" if base is model else f"{model.base_model_prefix}."
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own_names = {
        part: {name: names[id(parameter)] for name, parameter in module.named_parameters()}
        for part, (module, _, _, _) in parts.items()
    }

    def name_in_model(part: str, argument: str) -> str:
        if part == "block":  # 3.layer.norm1.weight
            index, _, name = argument.partition(".layer.")
            return f"{prefix}layers.{index}.{name}"
        own = max((name for name in own_names[part] if argument.startswith(name)), key=len)
        return own_names[part][own] + argument.removeprefix(own)

    tensors: dict[str, np.ndarray] = {}
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for part, (_, proto, transposed, quantized) in parts.items():
        if ranges is not None:
            quantized += quantize(proto.graph, transposed, skipped=("class_readout.", "classifier."))
        for argument in weights_of(proto.graph):
            argument = argument.removeprefix(WEIGHTS)
            own = argument
            for suffix in (".int8", ".input_scale", ".input_zero", ".scale"):
                own = own.removesuffix(suffix)
            for index in range(last) if part == "block" else [None]:
                name = name_in_model(part, own if index is None else f"{index}.{own}")
                is_transposed = f"{WEIGHTS}{own}" in transposed
                tensor = (state[name].T if is_transposed else state[name]).numpy()
                if own in quantized:
                    tensors |= int8_weights(name, tensor, 1 if is_transposed else 0, ranges or {})
                else:
                    tensors[name] = tensor
    file = WeightFile(folder / "weights.bin")
    file.write(tensors)

    say(f"writing {len(files)} graphs")
    for file_name, (part, segment) in files.items():
        _, proto, _, _ = parts[part]
        units = None
        if segment is not None:
            width, start, stop = segment
            proto, units = chain(proto, start, stop), config.ffn_hidden_size(width)
        graph = onnx.ModelProto()
        graph.CopyFrom(proto)
        file.attach(graph, partial(name_in_model, part), partial(rows, units=units))
        onnx.save(graph, folder / file_name)

    readout, outputs = parts["readout"][0], [value.name for value in parts["readout"][1].graph.output]
    manifest = {
        "format": session.FORMAT,
        "model_class": type(model).__name__,
        "int8": calibration is not None,
        "network": {
            "num_channels": config.num_channels,
            "image_size": list(image_size),
            "max_latent_tokens": config.max_latent_tokens,
            "token_granularities": config.token_granularities,
            "head_size": config.head_size,
            "rope_theta": config.rope_theta,
            "attention": model.adaptive_config.attention or config.attention_type,
        },
        "largest": {"tokens": config.max_latent_tokens, "width": config.max_width, "depth": last},
        "widths": config.widths,
        "depths": depths,
        "graphs": {name.removesuffix(".onnx"): name for name in files},
        "outputs": outputs,
        "dense": readout.is_dense,
        "labels": [config.id2label[index] for index in range(config.num_labels)],
        "defaults": defaults_of(model),
        "exit": exits_of(model, image_size, after, every) if model.exits_early else None,
        "points": points_of(model, image_size, depths),
        "accuracy": None if model.accuracy_table is None else model.accuracy_table.metric,
        "preprocessing": preprocessing_of(processor),
    }
    shutil.copy(session.__file__, folder / "session.py")
    write_manifest(manifest, folder)
    return manifest


def write_manifest(manifest: dict[str, Any], folder: Path) -> None:
    write_json(manifest, folder / session.MANIFEST)


def check(model: AdaPerceiverPreTrainedModel) -> None:
    """Raise if a bundle of `model` would not run as `model` does."""
    if not (model.class_targets or model.dense_targets):
        raise ValueError(f"A bundle needs a model with a head, got {type(model).__name__}.")
    if model.adaptive_config.policy not in (None, "fixed"):
        raise ValueError(
            f'A bundle has no router: set `adaptive_config.policy` to "fixed", it is {model.adaptive_config.policy!r}.'
        )
    if model.training or model.dtype != torch.float32 or model.device.type != "cpu":
        raise ValueError(
            f"A bundle is made of a model in evaluation mode, in float32 on a CPU; this one is in "
            f"{'training' if model.training else 'evaluation'} mode, in {model.dtype} on {model.device}."
        )


def exported_parts(
    model: AdaPerceiverPreTrainedModel, image_size: Sequence[int]
) -> dict[str, tuple[nn.Module, onnx.ModelProto, set[str], list[str]]]:
    """For each part of the network: its module, its graph, and which of its weights are stored transposed or in int8."""
    config = model.config
    images, tokens = (
        2,
        max(config.max_latent_tokens, 2),
    )  # not 1, which the exporter takes for a size that never changes
    batch, length = torch.export.Dim("batch"), torch.export.Dim("tokens")
    patches = image_size[0] * image_size[1] // config.patch_size**2
    rope = rotary_embedding(config, tokens, torch.device("cpu"))
    pixel_values = torch.randn(images, config.num_channels, *image_size)
    input_tokens = torch.randn(images, patches, config.hidden_size)
    latents, mask = torch.randn(images, tokens, config.hidden_size), torch.zeros(tokens, tokens)
    dynamic = {
        "pixel_values": {0: batch},
        "input_tokens": {0: batch},
        "latents": {0: batch, 1: length},
        "block_mask": {0: length, 1: length},
        "rope": {0: length},
    }
    readout = Readout(model, image_size)
    outputs = [*(["logits"] if model.class_targets else []), *([dense_output(model)] if model.dense_targets else [])]
    calls: dict[str, tuple[nn.Module, dict[str, torch.Tensor], list[str]]] = {
        "embed": (Embed(model), {"pixel_values": pixel_values}, ["input_tokens"]),
        "read": (Read(model), {"input_tokens": input_tokens, "rope": rope}, ["latents"]),
        "block": (Block(model), {"latents": latents, "rope": rope, "block_mask": mask}, ["next"]),
        "readout": (
            readout,
            {"latents": latents, "rope": rope, **({"input_tokens": input_tokens} if readout.is_dense else {})},
            outputs,
        ),
    }
    parts: dict[str, tuple] = {}
    with exported_attention(model):
        for name, (part, inputs, output_names) in calls.items():
            proto = export_part(part.eval(), inputs, dynamic, output_names)
            parts[name] = (part, proto, tidy(proto.graph), [])
    return parts


def dense_output(model: AdaPerceiverPreTrainedModel) -> str:
    """The name of the dense prediction in the output of `model`."""
    return {"depth-estimation": "predicted_depth", "image-segmentation": "logits"}.get(model.task, "features")


def rows(name: str, units: int | None) -> int | None:
    """How many rows of a tensor a network with `units` hidden units has; None for all."""
    _, is_ffn, tail = name.partition(".ffn.")
    nests = tail.startswith(("fc1.", "gate.")) or tail in ("fc2.weight", "fc2.weight.int8")
    return units if is_ffn and nests else None


# --------------------------------------------------------------------------------------------------------------- manifest


def defaults_of(model: AdaPerceiverPreTrainedModel) -> dict[str, Any]:
    own = model.adaptive_config.to_dict()
    kept = (*AXES, *BUDGETS, *(["exit_threshold"] if model.exits_early else []))
    return {name: own[name] for name in kept if name in own}


def exits_of(
    model: AdaPerceiverPreTrainedModel, image_size: tuple[int, int], after: int, every: int
) -> dict[str, Any]:
    """Where images may exit, the temperatures of the probes, and the GFLOPs of one probe by tokens."""
    config, cost = model.config, {}
    for tokens in config.token_granularities:
        point = OperatingPoint(tokens, config.max_width, 2, config.attention_type)
        with_probe = model.flops_at(point._replace(exit_threshold=0.5), image_size, 1)["total"]
        cost[str(tokens)] = (with_probe - model.flops_at(point, image_size, 1)["total"]) / 1e9
    temperatures = model.adaptive_config.exit_temperatures or None
    return {"after": after, "every": every, "temperatures": temperatures, "gflops": cost}


def points_of(
    model: AdaPerceiverPreTrainedModel, image_size: tuple[int, int], depths: Sequence[int]
) -> list[dict[str, Any]]:
    """The trained operating points of the bundle, best first, with GFLOPs per image, and scores where these are known."""
    config, table = model.config, model.accuracy_table
    points = [dict(zip(AXES, values)) for values in product(config.token_granularities, config.widths, depths)]
    if table is None:
        points.sort(key=lambda point: (point["depth"], point["width"], point["tokens"]), reverse=True)
    else:
        points = [point for point in table.best_first() if point in points]
        scores = {tuple(point[axis] for axis in AXES): point["value"] for point in table.points}
    for point in points:
        resolved = OperatingPoint(**point, attention=model.adaptive_config.attention or config.attention_type)
        if table is not None:
            point["value"] = scores[tuple(point[axis] for axis in AXES)]
        point["gflops"] = model.flops_at(resolved, image_size, 1)["total"] / 1e9
    return points


# --------------------------------------------------------------------------------------------------------------- checking


@torch.no_grad()
def verify_bundle(
    model: AdaPerceiverPreTrainedModel, bundle: session.AdaptiveSession, images: torch.Tensor | None = None
) -> dict[str, float]:
    """
    Compare a bundle with `model` at its largest and smallest points, between the trained token counts, and with early exit: in
    float32 on random images, in int8 on `images`, which are some of its kind. Raises if they differ.
    """
    config, manifest = model.config, bundle.manifest
    off = {"exit_threshold": False} if model.exits_early else {}
    points: list[dict[str, Any]] = [
        {axis: manifest["largest"][axis] for axis in AXES},
        {"tokens": config.token_granularities[0], "width": config.widths[0], "depth": manifest["depths"][0]},
        {**manifest["largest"], "tokens": config.token_granularities[0] + 1},
    ]
    points = [{**off, **point} for point in points]
    if images is None:
        images = torch.randn(4, config.num_channels, *manifest["network"]["image_size"])
        if model.exits_early and len(manifest["depths"]) > 1:
            points.append({**manifest["largest"], "exit_threshold": between(model, bundle, images)})
    compared = []
    for point in points:

        def predict(pixel_values: np.ndarray, point: dict[str, Any] = point) -> dict[str, np.ndarray]:
            return bundle(pixel_values, **point).outputs

        def ours(pixel_values: torch.Tensor, point: dict[str, Any] = point) -> dict[str, torch.Tensor]:
            outputs = model(pixel_values, policy="fixed", **point)
            return {name: outputs[name] for name in manifest["outputs"]}

        compared.append(differences(ours, predict, images))
    return judge(compared, manifest["int8"])


def between(model: AdaPerceiverPreTrainedModel, bundle: session.AdaptiveSession, images: torch.Tensor) -> float:
    """A threshold that some of `images` reach at the first probe, and that lies in the widest gap, clear of all of them."""
    _, outputs = next(bundle.every_depth(images.numpy()))
    temperatures = bundle.manifest["exit"]["temperatures"]
    logits = outputs["logits"] / (temperatures[bundle.manifest["depths"][0] - 1] if temperatures else 1.0)
    confidence = np.sort(session.softmax(logits, axis=1).max(axis=1))
    widest = int(np.diff(confidence).argmax())
    return float(confidence[widest : widest + 2].mean())
