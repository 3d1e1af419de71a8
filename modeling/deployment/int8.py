"""Static quantisation: what the inputs of linear layers range over on calibration data, and weights in 8 bits."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

from ..modeling_adaperceiver import AdaPerceiverPreTrainedModel


Ranges = dict[str, tuple[float, float]]  # of the inputs of linear layers, by the name of their weight


@torch.no_grad()
def input_ranges(model: AdaPerceiverPreTrainedModel, batches: Iterable[torch.Tensor]) -> Ranges:
    """Over all images of `batches` (pixel values), at every width, and at every token count if fewer see other things."""
    ranges: Ranges = {}
    config = model.config
    nested = config.attention_type == "block"
    tokens = [config.max_latent_tokens] if nested else config.token_granularities

    def watch(name: str):
        def record(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            low, high = ranges.get(name, (0.0, 0.0))
            ranges[name] = (min(low, inputs[0].min().item()), max(high, inputs[0].max().item()))

        return record

    layers = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    hooks = [module.register_forward_pre_hook(watch(f"{name}.weight")) for name, module in layers]
    try:
        for pixel_values in batches:
            for width in config.widths:
                for count in tokens:
                    point = model.operating_point(
                        tokens=count, width=width, depth=config.num_hidden_layers, exit_threshold=False, policy="fixed"
                    )
                    model(pixel_values, operating_point=point)
    finally:
        for hook in hooks:
            hook.remove()
    if not ranges:
        raise ValueError("Quantisation needs at least one image to calibrate on, got none.")
    return ranges


def int8_weights(name: str, weight: np.ndarray, outputs: int, ranges: Ranges) -> dict[str, np.ndarray]:
    """
    The tensors that stand for `weight`, whose axis `outputs` (0 or 1) is that of its outputs: symmetric, with a scale for each
    output, and the rounding of its inputs to 0..255.
    """
    scale = np.maximum(np.abs(weight).max(axis=1 - outputs), 1e-12).astype(np.float32) / np.float32(127)
    rounded = np.round(weight / np.expand_dims(scale, 1 - outputs)).astype(np.int8)
    low, high = ranges[name]
    input_scale = np.float32(max(high - low, 1e-6) / 255)
    return {
        f"{name}.int8": rounded,
        f"{name}.scale": scale,
        f"{name}.input_scale": np.array(input_scale),
        f"{name}.input_zero": np.array(np.clip(np.round(-low / input_scale), 0, 255), dtype=np.uint8),
    }
