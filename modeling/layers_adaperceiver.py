# Copyright 2026 The AdaPerceiver for Hugging Face authors.
# Licensed under the Apache License, Version 2.0.

"""
The layers of AdaPerceiver, in the order data flows: input tokens -> read -> blocks -> write.

An operating point comes in as arguments: `groups` cut the latents as the block mask does, `width` counts the units of the
FFNs, and depth is simply how many blocks are called. Nothing is kept between calls.

Beside its `forward`, each layer says its FLOPs: those of linear layers, convolutions and attention products, two per
multiply-add, each counted once.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .configuration_adaperceiver import AdaPerceiverConfig


Rope: TypeAlias = torch.Tensor  # cosines and sines of the latents' positions, (latents, head_size / 2, 2), float32
Group = tuple[int, int]  # latents start:stop, which see latents :stop


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether `layer(x)` is `x @ weight.T + bias`: no adapter, quantisation, offloading or hook stands in between."""
    if type(layer) is not nn.Linear or is_hooked(layer):
        return False
    # Quantised or sharded weights may be tensors of a class of their own, and so are those of a model being exported.
    own_class = type(layer.weight) not in (nn.Parameter, torch.Tensor)
    return not own_class or (torch.compiler.is_exporting() and not is_traceable_wrapper_subclass(layer.weight))


def is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module))


def may_place_results(states: torch.Tensor) -> bool:
    """Whether a product of `states` may be written to memory of our choice: in inference on CPU, as it is written here."""
    changed = torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
    return states.device.type == "cpu" and not changed


def aligned_linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """
    `nn.functional.linear`, but in inference on CPU the rows of the result start at multiples of 64 bytes in memory. BLAS
    writes them faster than the odd row lengths that hidden sizes such as 2138 give.
    """
    columns = weight.shape[0]
    if columns % 16 == 0 or not may_place_results(states):
        return nn.functional.linear(states, weight, bias)
    rows = states.shape[:-1].numel()  # not before: asked for while exporting, it would fix the batch size of the graph
    output = states.new_empty(rows, -(-columns // 16) * 16)[:, :columns]
    if bias is None:
        torch.mm(states.flatten(0, -2), weight.T, out=output)
    else:
        torch.addmm(bias, states.flatten(0, -2), weight.T, out=output)
    return output.unflatten(0, states.shape[:-1])


class AdaPerceiverFFN(nn.Module):
    """Two layers whose hidden units nest: a smaller width keeps the first ones. `gated` gives (Swi)GLU."""

    def __init__(
        self,
        config: AdaPerceiverConfig,
        max_width: int | None = None,
        out_features: int | None = None,
        gated: bool = False,
    ):
        super().__init__()
        self.config = config
        self.max_width = config.hidden_size if max_width is None else max_width
        hidden_units = config.ffn_hidden_size(self.max_width)
        self.fc1 = nn.Linear(config.hidden_size, hidden_units, bias=config.ffn_bias)
        self.gate = nn.Linear(config.hidden_size, hidden_units, bias=config.ffn_bias) if gated else None
        self.activation = ACT2FN[config.hidden_act]
        self.out_features = out_features or config.hidden_size
        self.fc2 = nn.Linear(hidden_units, self.out_features, bias=config.ffn_bias)

    def forward(self, states: torch.Tensor, width: int | tuple[int, ...] | None = None) -> torch.Tensor:
        """states: (batch, tokens, hidden_size); a tuple of widths holds one per image."""
        width = self.max_width if width is None else width
        first_layers = [self.fc1] if self.gate is None else [self.fc1, self.gate]

        # Images of one batch that differ in width run in slices if they come sorted; the sizes of the slices would make
        # a compiler start over.
        runs = [(width, states.shape[0])] if isinstance(width, int) else [(w, len(list(g))) for w, g in groupby(width)]
        sliced = len(runs) == 1 or (len(runs) == len(dict(runs)) and not torch.compiler.is_compiling())
        if sliced and all(is_plain_linear(layer) for layer in [*first_layers, self.fc2]):
            if len(runs) == 1:
                return self.slice(states, first_layers, runs[0][0])
            runs_of_states = states.split([count for _, count in runs])
            return torch.cat([self.slice(run, first_layers, width) for run, (width, _) in zip(runs_of_states, runs)])

        # Layers that must be called as they are: mask.
        hidden = self.activate(*(layer(states) for layer in first_layers))
        if width != self.max_width:
            units: Any = [self.config.ffn_hidden_size(width) for width, count in runs for _ in range(count)]
            units = units[0] if len(runs) == 1 else torch.tensor(units, device=states.device)[:, None, None]
            hidden = hidden * (torch.arange(hidden.shape[-1], device=states.device) < units)
        return self.fc2(hidden)

    def slice(self, states: torch.Tensor, first_layers: Sequence[nn.Linear], width: int) -> torch.Tensor:
        """The FFN of one width, by its first hidden units alone."""
        units = self.config.ffn_hidden_size(width)
        hidden = self.activate(
            *(
                aligned_linear(states, layer.weight[:units], None if layer.bias is None else layer.bias[:units])
                for layer in first_layers
            )
        )
        return nn.functional.linear(hidden, self.fc2.weight[:, :units], self.fc2.bias)

    def activate(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return self.activation(hidden) if gate is None else self.activation(gate) * hidden

    def flops(self, rows: int, width: int | None = None) -> int:
        units = self.config.ffn_hidden_size(self.max_width if width is None else width)
        return 2 * rows * units * (self.config.hidden_size * (1 if self.gate is None else 2) + self.out_features)


def convolution_flops(module: nn.Module, pixels: int) -> int:
    """Of a convolution over `pixels` positions of its input, or of a module in which several follow each other."""
    total = 0
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            pixels //= math.prod(layer.stride)
            total += 2 * pixels * layer.weight.numel()
    return total


class AdaPerceiverConvolution(nn.Conv2d):
    """A convolution with a folded batch norm, padded as TensorFlow pads, then ReLU6 unless it is `linear`."""

    def __init__(
        self, channels: int, out_channels: int, kernel: int, stride: int, groups: int = 1, linear: bool = False
    ):
        super().__init__(channels, out_channels, kernel, stride, groups=groups)
        self.linear = linear

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) -> (batch, out_channels, height / stride, width / stride), rounded up"""
        # The windows start at the first pixel; where the padding is odd, its larger half comes last.
        rows, columns = (
            max((-(-side // stride) - 1) * stride + kernel - side, 0)
            for side, stride, kernel in zip(maps.shape[-2:], self.stride, self.kernel_size)
        )
        if rows % 2 == 0 and columns % 2 == 0:  # what a convolution can do by itself
            padding = (rows // 2, columns // 2)
        else:
            maps = nn.functional.pad(maps, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
            padding = (0, 0)
        maps = nn.functional.conv2d(maps, self.weight, self.bias, self.stride, padding, groups=self.groups)
        return maps if self.linear else nn.functional.relu6(maps)


class AdaPerceiverInvertedResidual(nn.Module):
    """Expand, filter every channel by itself, project: the block of MobileNet v2 and EfficientNet-Lite."""

    def __init__(self, channels: int, out_channels: int, stride: int, kernel: int, expansion: int):
        super().__init__()
        hidden = channels * expansion
        self.expand = AdaPerceiverConvolution(channels, hidden, 1, 1) if expansion > 1 else None
        self.depthwise = AdaPerceiverConvolution(hidden, hidden, kernel, stride, groups=hidden)
        self.project = AdaPerceiverConvolution(hidden, out_channels, 1, 1, linear=True)
        self.residual = stride == 1 and channels == out_channels

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        update = maps if self.expand is None else self.expand(maps)
        update = self.project(self.depthwise(update))
        return maps + update if self.residual else update


class AdaPerceiverStem(nn.Sequential):
    """Convolutions in place of the patch convolution: the layers of `config.stem_layers`, then a projection."""

    def __init__(self, config: AdaPerceiverConfig):
        layers, channels = [], config.num_channels
        for out_channels, stride, *inverted in config.stem_layers:
            if not inverted:
                layers += [
                    nn.Conv2d(channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False),
                    nn.GroupNorm(1, out_channels, eps=config.layer_norm_eps),
                    ACT2FN[config.hidden_act],
                ]
            elif inverted[1] == 0:
                layers.append(AdaPerceiverConvolution(channels, out_channels, inverted[0], stride))
            else:
                layers.append(AdaPerceiverInvertedResidual(channels, out_channels, stride, *inverted))
            channels = out_channels
        super().__init__(*layers, nn.Conv2d(channels, config.hidden_size, kernel_size=1))
        self.inverted = any(len(layer) == 4 for layer in config.stem_layers)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        if self.inverted:  # filters over single channels run twice as fast with the channels last in memory
            pixel_values = pixel_values.contiguous(memory_format=torch.channels_last)
        return super().forward(pixel_values)

    def freeze(self) -> None:
        """Train the projection alone: the layers before it, copied from a trained network, stay as they are."""
        for layer in list(self)[:-1]:
            layer.requires_grad_(False)


class AdaPerceiverEmbeddings(nn.Module):
    """Pixels to input tokens: patches, plus positions, then the embed FFN."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        self.config = config
        patch = config.patch_size
        self.patch_embeddings: nn.Module
        if config.stem_layers is not None:
            self.patch_embeddings = AdaPerceiverStem(config)
        else:
            self.patch_embeddings = nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=patch, stride=patch)
        self.position_embeddings = nn.Parameter(torch.empty(1, config.grid_size**2, config.hidden_size))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.use_embed_ffn else None
        self.ffn = AdaPerceiverFFN(config) if config.use_embed_ffn else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def positions(self, rows: int, columns: int) -> torch.Tensor:
        """The position embedding, resampled as an image to a grid of `rows` x `columns` patches."""
        side = self.config.grid_size
        if rows == side and columns == side:
            return self.position_embeddings
        grid = self.position_embeddings.float().reshape(1, side, side, -1).permute(0, 3, 1, 2)
        grid = nn.functional.interpolate(grid, (rows, columns), mode="bicubic", antialias=True, align_corners=False)
        return grid.flatten(2).transpose(1, 2).to(self.position_embeddings.dtype)

    def forward(self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool | None = None) -> torch.Tensor:
        """pixel_values: (batch, channels, height, width) -> (batch, patches, hidden_size), in row-major order."""
        self.check(pixel_values, interpolate_pos_encoding)
        patches = self.patch_embeddings(pixel_values.to(self.position_embeddings.dtype))
        input_tokens = patches.flatten(2).transpose(1, 2) + self.positions(*patches.shape[-2:])
        if self.ffn is not None and self.norm is not None:
            input_tokens = self.ffn(self.norm(input_tokens))
        return self.dropout(input_tokens)

    def check(self, pixel_values: torch.Tensor | None, interpolate_pos_encoding: bool | None = None) -> None:
        channels, patch, side = self.config.num_channels, self.config.patch_size, self.config.image_size
        if pixel_values is not None and not isinstance(pixel_values, torch.Tensor):
            raise TypeError(
                f"`pixel_values` must be a tensor of shape (batch, {channels}, height, width), got {type(pixel_values).__name__}."
            )
        if pixel_values is None or pixel_values.ndim != 4 or pixel_values.shape[1] != channels:
            shape = None if pixel_values is None else tuple(pixel_values.shape)
            raise ValueError(f"`pixel_values` must be of shape (batch, {channels}, height, width), got {shape}.")
        sides = tuple(pixel_values.shape[-2:])
        if any(one % patch != 0 or one == 0 for one in sides):
            raise ValueError(
                f"`pixel_values` must have a height and a width that are multiples of the patch size {patch}, got "
                f"{sides[0]}x{sides[1]}."
            )
        if interpolate_pos_encoding is False and sides != (side, side):
            raise ValueError(
                f"`pixel_values` must be {side}x{side} with `interpolate_pos_encoding=False`, got {sides[0]}x{sides[1]}."
            )

    def flops(self, patches: int) -> int:
        flops = convolution_flops(self.patch_embeddings, patches * self.config.patch_size**2)
        return flops + (0 if self.ffn is None else self.ffn.flops(patches))


def rotary_embedding(config: AdaPerceiverConfig, tokens: int, device: torch.device) -> Rope:
    """
    Cosines and sines of the latent positions, float32. Computed once in every call rather than kept in a buffer, which a
    cast of the model would round.
    """
    channels = torch.arange(0, config.head_size, 2, dtype=torch.float32, device=device)
    frequencies = config.rope_theta ** (-channels / config.head_size)
    if tokens > config.max_latent_tokens:
        frequencies = frequencies / (tokens / config.max_latent_tokens)
    angles = torch.arange(tokens, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def rotate(states: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Turn neighbouring pairs of channels (2i, 2i + 1), in float32. states: (batch, heads, latents or 1, head_size)."""
    rope = rope[:, None]  # (latents, 1, head_size / 2, 2)
    pairs = states.transpose(1, 2).float().unflatten(-1, (-1, 2))  # (batch, latents or 1, heads, head_size / 2, 2)
    if torch.compiler.is_compiling():  # compilers fuse this, and export formats have no complex numbers
        (even, odd), (cos, sin) = pairs.unbind(-1), rope.unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:  # the same in one pass over memory
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rope))
    return turned.flatten(-2).to(states.dtype).transpose(1, 2)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    dropout: float = 0.0,
    groups: Sequence[Group] | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention that can show its weights, (batch, heads, queries, keys). `groups` as in `block_attention`."""
    queries, keys = query.shape[2], key.shape[2]
    # (start, stop, keys that these queries see)
    slices = [(0, queries, keys)] if groups is None else [(start, stop, stop) for start, stop in groups]
    rows = []
    for start, stop, seen in slices:
        scores = query[:, :, start:stop] @ key[:, :, :seen].transpose(2, 3) * scaling
        rows.append(nn.functional.pad(nn.functional.softmax(scores, dim=-1, dtype=torch.float32), (0, keys - seen)))
    weights = torch.cat(rows, dim=2).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    outputs = [weights[:, :, start:stop, :seen] @ value[:, :, :seen] for start, stop, seen in slices]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), weights


def block_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: Sequence[Group] | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Block-masked attention by slicing: the queries `start:stop` of a group attend to the keys `:stop`, and nothing is
    computed that a mask would throw away. Without `groups` every query sees every key.

    query: (batch, heads, queries, head_size); key and value: (batch, heads, keys, head_size).
    Returns (batch, queries, heads, head_size), and the weights if the implementation has them.
    """
    attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
        module.config._attn_implementation, eager_attention_forward
    )
    if attention_interface is eager_attention_forward:
        return eager_attention_forward(module, query, key, value, None, groups=groups, **kwargs)
    if groups is None or len(groups) == 1:
        return attention_interface(module, query, key, value, None, **kwargs)
    outputs = [
        attention_interface(module, query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], None, **kwargs)[0]
        for start, stop in groups
    ]
    return torch.cat(outputs, dim=1), None


class AdaPerceiverAttention(nn.Module):
    """The four projections of multi-head attention, and what self- and cross-attention share."""

    is_causal = False  # read by the attention implementations of transformers

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        self.config = config
        self.scaling = config.head_size**-0.5
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.proj_bias)

    def heads(self, states: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> (batch, heads, tokens, head_size)"""
        return states.unflatten(-1, (-1, self.config.head_size)).transpose(1, 2)

    def projection_flops(self, rows: int) -> int:
        """Of `rows` tokens by one of the four projections."""
        return 2 * rows * self.config.hidden_size**2

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        groups: Sequence[Group] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """-> (batch, queries, hidden_size), and the weights if the implementation has them"""
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        output, weights = block_attention(
            self, query, key, value, groups, scaling=self.scaling, dropout=dropout, **kwargs
        )
        return self.o_proj(output.flatten(2)), weights


class AdaPerceiverSelfAttention(AdaPerceiverAttention):
    """Latents attend to latents; RoPE on queries and keys."""

    def forward(
        self,
        latents: torch.Tensor,
        rope: Rope,
        groups: Sequence[Group] | None,
        past: list[torch.Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        latents: (batch, latents, hidden_size). `past` holds the keys and values of earlier latents, which these see as
        well, and takes in theirs; it is empty at first.
        """
        query = rotate(self.heads(self.q_proj(latents)), rope)
        key = rotate(self.heads(self.k_proj(latents)), rope)
        value = self.heads(self.v_proj(latents))
        if past is not None:
            past[:] = [torch.cat(pair, dim=2) for pair in zip(past, (key, value))] or [key, value]
            key, value = past
        return self.attend(query, key, value, groups, **kwargs)

    def flops(self, groups: Sequence[Group]) -> int:
        """Of one image whose latents are cut in `groups`."""
        seen = sum((stop - start) * stop for start, stop in groups)  # pairs of latents that see each other
        return self.projection_flops(4 * groups[-1][1]) + 4 * seen * self.config.hidden_size


class AdaPerceiverCrossAttention(AdaPerceiverAttention):
    """`readers + Attention(Norm(readers), Norm(source))`: latents read input tokens, output tokens read latents."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.sink_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.source_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self,
        readers: torch.Tensor,
        source: torch.Tensor,
        reader_rope: Rope | None = None,
        source_rope: Rope | None = None,
    ) -> torch.Tensor:
        """
        readers: (batch or 1, readers or 1, hidden_size); source: (batch, sources, hidden_size). A reader that is the same
        for all images, or for all positions of `reader_rope`, is projected once.
        """
        query = self.query(readers, reader_rope)
        key, value = self.key_value(source, source_rope)
        return readers + self.attend(query.expand(source.shape[0], -1, -1, -1), key, value)[0]

    def query(self, readers: torch.Tensor, rope: Rope | None = None) -> torch.Tensor:
        """-> (batch or 1, heads, readers, head_size)"""
        query = self.heads(self.q_proj(self.sink_norm(readers)))
        return query if rope is None else rotate(query, rope)

    def key_value(self, source: torch.Tensor, rope: Rope | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """-> twice (batch, heads, sources, head_size)"""
        source = self.source_norm(source)
        key, value = self.heads(self.k_proj(source)), self.heads(self.v_proj(source))
        return key if rope is None else rotate(key, rope), value

    def flops(self, queries: int, readers: int, sources: int) -> int:
        """Of `queries` that are projected, and of `readers` that attend to `sources` and are projected back."""
        return self.projection_flops(queries + readers + 2 * sources) + 4 * readers * sources * self.config.hidden_size


class AdaPerceiverRead(nn.Module):
    """Input tokens to latents. All latents start from one learned vector; the rotation of their queries tells them apart."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        self.latent_token = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.cross_attention = AdaPerceiverCrossAttention(config)

    def forward(self, input_tokens: torch.Tensor, rope: Rope) -> torch.Tensor:
        """(batch, patches, hidden_size) -> (batch, latents, hidden_size)"""
        return self.cross_attention(self.latent_token, input_tokens, reader_rope=rope)

    def flops(self, tokens: int, patches: int, images: int) -> int:
        """The query is one vector, projected once and turned to each position."""
        once = self.cross_attention.projection_flops(1)
        return once + images * self.cross_attention.flops(queries=0, readers=tokens, sources=patches)


class AdaPerceiverLayerScale(nn.Module):
    """`latents + gamma * update`, in one pass."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, latents: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(latents, update, self.gamma)


class AdaPerceiverDropPath(nn.Module):
    """Stochastic depth: in training, drop a residual branch for some images of the batch and scale up the others."""

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.probability == 0.0 or not self.training:
            return hidden_states
        keep = 1 - self.probability
        kept = torch.empty(hidden_states.shape[0], 1, 1, device=hidden_states.device).bernoulli_(keep)
        return hidden_states * (kept / keep).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"probability={self.probability:.3f}"


class AdaPerceiverBlock(GradientCheckpointingLayer):
    def __init__(self, config: AdaPerceiverConfig, index: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = AdaPerceiverSelfAttention(config)
        self.layer_scale1 = AdaPerceiverLayerScale(config) if config.layerscale_value else None
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.ffn = AdaPerceiverFFN(config, max_width=config.max_width, gated=config.use_swiglu_ffn)
        self.layer_scale2 = AdaPerceiverLayerScale(config) if config.layerscale_value else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        # grows linearly from 0 at the first block to the full rate at the last
        self.drop_path = AdaPerceiverDropPath(config.drop_path_rate * index / max(config.num_hidden_layers - 1, 1))

    def forward(
        self,
        latents: torch.Tensor,
        rope: Rope,
        groups: Sequence[Group] | None,
        width: int | tuple[int, ...],
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """(batch, latents, hidden_size) -> the same. `kwargs` go to the attention."""
        # The updates have no names, so that they are freed as soon as they are added.
        latents = self.add(latents, self.attention(self.norm1(latents), rope, groups, **kwargs)[0], self.layer_scale1)
        return self.add(latents, self.ffn(self.norm2(latents), width), self.layer_scale2)

    def add(self, latents: torch.Tensor, update: torch.Tensor, layer_scale: nn.Module | None) -> torch.Tensor:
        update = self.drop_path(self.dropout(update))
        return latents + update if layer_scale is None else layer_scale(latents, update)


class Folded(NamedTuple):
    """The class query as each latent's channels see it: the scores of normed latents x are `x @ query + bias`."""

    query: torch.Tensor  # (latents, heads, hidden_size)
    bias: torch.Tensor  # (latents, heads)


class AdaPerceiverClassReadout(nn.Module):
    """
    Latents to one output token per image, for classification.

    The value projection waits until the latents are pooled. The query is the same for every image, so the key projection
    and its RoPE are folded into it, once for all images and depths that are read out: about fifty times less work for each
    of them than the plain write. The folded query is made from the weights in every call, so that it can be neither saved
    nor stale.
    """

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        self.output_token = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.write = AdaPerceiverCrossAttention(config)

    def is_plain(self) -> bool:
        """Whether the layers need not be called as they are (for adapters, offloading, dropout on the weights)."""
        write = self.write
        dropout = self.training and write.config.attention_probs_dropout_prob > 0
        return not (dropout or is_hooked(self) or is_hooked(write)) and all(
            map(is_plain_linear, (write.k_proj, write.v_proj))
        )

    def fold(self, rope: Rope) -> Folded | None:
        """None where the layers must be called as they are."""
        if not self.is_plain():
            return None
        write, head_size = self.write, self.write.config.head_size
        backwards = torch.stack((rope[..., 0], -rope[..., 1]), dim=-1)  # where the keys would be turned forward
        query = rotate(write.query(self.output_token) * write.scaling, backwards)[0]  # (heads, latents, head_size)
        key_weight = write.k_proj.weight.unflatten(0, (-1, head_size))
        if may_place_results(query):  # in the order in which all readouts go through it
            folded = query.new_empty(query.shape[1], len(query), key_weight.shape[2])
            torch.bmm(query, key_weight, out=folded.transpose(0, 1))
        else:
            folded = (query @ key_weight).transpose(0, 1)
        if write.k_proj.bias is None:
            bias = folded.new_zeros(folded.shape[:2])
        else:
            bias = (query @ write.k_proj.bias.view(-1, head_size, 1))[..., 0].T
        return Folded(folded, bias)

    def forward(
        self,
        latents: torch.Tensor | Sequence[torch.Tensor],
        rope: Rope,
        folded: Folded | None = None,
        prefixes: Any = None,  # integers, or one list of them for each of several latents
    ) -> torch.Tensor:
        """
        (batch, latents, hidden_size) -> (batch, 1, hidden_size), or (batch, len(prefixes), hidden_size): one output token
        from each `latents[:, :prefix]`, for ascending `prefixes`. `folded` is that of this `rope`, if it is at hand.

        Several latents, with as many lists of prefixes, share the projections: (batch, all prefixes, hidden_size).
        """
        if isinstance(latents, torch.Tensor):
            prefixes = [[latents.shape[1]] if prefixes is None else prefixes]
            latents = [latents]
        readouts, write = list(zip(latents, prefixes)), self.write
        if folded is None and not self.is_plain():
            written = [
                write(self.output_token, latents[:, :stop], source_rope=rope[:stop])
                for latents, prefixes in readouts
                for stop in prefixes
            ]
            return torch.cat(written, dim=1)
        # One image that is read once shares nothing. (Exported graphs must not depend on the batch size.)
        if folded is None and (torch.compiler.is_exporting() or len(readouts) > 1 or latents[0].shape[0] > 1):
            folded = self.fold(rope)
        pooled = []
        for latents, prefixes in readouts:
            source = write.source_norm(latents[:, : prefixes[-1]])
            pooled.append(prefix_pool(self.scores(source, rope, folded), source, prefixes))
        pooled = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)  # (batch, prefixes, heads, hidden_size)
        value_weight = write.v_proj.weight.unflatten(0, (-1, write.config.head_size))
        value = value_weight @ pooled.flatten(0, 1).permute(1, 2, 0)  # (heads, head_size, batch * prefixes)
        value = value.flatten(0, 1).T.unflatten(0, pooled.shape[:2])
        if write.v_proj.bias is not None:
            value = value + write.v_proj.bias  # once, since the weights of a softmax sum to 1
        return self.output_token + write.o_proj(value)

    def scores(self, source: torch.Tensor, rope: Rope, folded: Folded | None) -> torch.Tensor:
        """Of normed latents, (batch, latents, hidden_size) -> (batch, heads, latents)"""
        write, count = self.write, source.shape[1]
        if folded is None:
            key = rotate(write.heads(write.k_proj(source)), rope[:count])
            return (write.query(self.output_token) * write.scaling @ key.transpose(2, 3))[:, :, 0]
        scores = source.transpose(0, 1) @ folded.query[:count].transpose(1, 2)  # (latents, batch, heads)
        return (scores + folded.bias[:count, None]).permute(1, 2, 0).contiguous()

    def flops(self, tokens: int, images: int, probes: int) -> tuple[int, int]:
        """Of the last readout, and of `probes` before it."""
        write, channels = self.write, tokens * self.write.config.hidden_size
        query = write.projection_flops(1 + tokens)  # and the keys, or what is folded into it
        for_heads = 2 * write.config.num_attention_heads * channels
        pool = for_heads + write.projection_flops(2)
        if images == 1 and probes == 0:
            return query + 2 * channels + pool, 0
        bias = 2 * channels * write.config.qkv_bias
        return query + bias + images * (for_heads + pool), probes * images * (for_heads + pool)


def prefix_pool(scores: torch.Tensor, source: torch.Tensor, prefixes: Sequence[int]) -> torch.Tensor:
    """
    `softmax(scores[..., :stop]) @ source[:, :stop]` for every `stop` of the ascending `prefixes`, in one pass: each group
    between two prefixes is visited once, and the sums are carried on under a running maximum.

    scores: (batch, heads, latents); source: (batch, latents, hidden_size)
    Returns (batch, prefixes, heads, hidden_size).
    """
    start, maximum, total, weighted, pooled = 0, None, 0.0, 0.0, []
    for stop in prefixes:
        group = scores[..., start:stop].float()
        new_maximum = group.detach().amax(dim=-1, keepdim=True)
        if maximum is not None:
            new_maximum = torch.maximum(maximum, new_maximum)
            decay = (maximum - new_maximum).exp()
            total, weighted = total * decay, weighted * decay
        weights = (group - new_maximum).exp()
        total = total + weights.sum(dim=-1, keepdim=True)
        weighted = weighted + weights.to(source.dtype) @ source[:, start:stop]
        pooled.append((weighted / total).to(source.dtype))
        start, maximum = stop, new_maximum
    return torch.stack(pooled, dim=1)


class AdaPerceiverDenseReadout(nn.Module):
    """Latents to one output token per input token, for dense prediction."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        self.projection = nn.Linear(config.hidden_size, config.hidden_size)
        self.write = AdaPerceiverCrossAttention(config)

    def forward(self, latents: torch.Tensor, input_tokens: torch.Tensor, rope: Rope) -> torch.Tensor:
        """(batch, latents, hidden_size), (batch, patches, hidden_size) -> (batch, patches, hidden_size)"""
        return self.write(self.projection(input_tokens), latents, source_rope=rope)

    def readers(self, input_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output tokens before they read, (batch, patches, hidden_size), and their queries: the same for all readouts."""
        readers = self.projection(input_tokens)
        return readers, self.write.query(readers)

    def read(
        self, readers: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        """Output tokens from the first `tokens` latents, by their keys and values: (batch, patches, hidden_size)"""
        return readers + self.write.attend(query, key[:, :, :tokens], value[:, :, :tokens])[0]

    def by_tokens(
        self, latents: torch.Tensor, readers: tuple[torch.Tensor, torch.Tensor], rope: Rope, prefixes: Sequence[int]
    ) -> Iterator[torch.Tensor]:
        """Output tokens from each `latents[:, :prefix]`, one after another; they share keys and values."""
        key, value = self.write.key_value(latents, rope)
        for prefix in prefixes:
            yield self.read(*readers, key, value, prefix)

    def flops(self, tokens: int, patches: int) -> int:
        """One readout of one image."""
        return self.write.projection_flops(patches) + self.write.flops(patches, patches, tokens)
