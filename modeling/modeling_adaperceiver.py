"""
AdaPerceiver: one vision transformer whose tokens, width and depth are chosen at every call.

Data flows down this file: pixels -> input tokens -> read -> blocks -> write -> head.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    DepthEstimatorOutput,
    ImageClassifierOutput,
    SemanticSegmenterOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_adaperceiver import AdaPerceiverConfig, AdaptiveConfig, OperatingPoint
from .loss_adaperceiver import (
    depth_loss,
    feature_distillation_loss,
    logit_distillation_loss,
    segmentation_loss,
)


Rope = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, each (latents, head_size / 2), float32
Group = tuple[int, int]  # latents start:stop, which see latents :stop

HUB_KWARGS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class AdaptiveKwargs(TransformersKwargs, total=False):
    """Keyword arguments of every model's call; see `AdaptiveConfig` for what they mean."""

    tokens: int | None
    width: int | Sequence[int] | torch.Tensor | None
    depth: int | None
    attention: str | None
    adaptive_config: AdaptiveConfig | None


@dataclass
class AdaPerceiverModelOutput(BaseModelOutputWithPooling):
    r"""
    last_hidden_state (`torch.FloatTensor` of shape `(batch, tokens, hidden_size)`):
        The latents after the last block that ran.
    pooler_output (`torch.FloatTensor` of shape `(batch, hidden_size)`, *optional*):
        The output token for classification, if the model writes one (`config.output_tokens`).
    output_tokens (`torch.FloatTensor` of shape `(batch, output tokens, hidden_size)`):
        What the latents wrote: one token per input token, or the single one for classification.
    input_tokens (`torch.FloatTensor` of shape `(batch, patches, hidden_size)`):
        The patch tokens, in row-major order, that the latents read from.
    """

    output_tokens: torch.FloatTensor | None = None
    input_tokens: torch.FloatTensor | None = None


@dataclass
class AdaPerceiverDistillationOutput(ImageClassifierOutput):
    r"""
    features (`torch.FloatTensor` of shape `(batch, patches, feature_size)`):
        Patch features in the teacher's space.
    """

    features: torch.FloatTensor | None = None


class AdaPerceiverFFN(nn.Module):
    """Two layers whose hidden units nest: a smaller width keeps the first ones. `gated` gives (Swi)GLU."""

    def __init__(self, config: AdaPerceiverConfig, out_features: int | None = None, gated: bool = False):
        super().__init__()
        self.config = config
        hidden_units = config.ffn_hidden_size(config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size, hidden_units, bias=config.ffn_bias)
        self.gate = nn.Linear(config.hidden_size, hidden_units, bias=config.ffn_bias) if gated else None
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(hidden_units, out_features or config.hidden_size, bias=config.ffn_bias)

    def forward(self, hidden_states: torch.Tensor, width: int | tuple[int, ...] | None = None) -> torch.Tensor:
        """hidden_states: (batch, tokens, hidden_size); a tuple of widths holds one per image."""
        if width is None or width == self.config.hidden_size:
            return self.fc2(self._hidden(hidden_states, self.fc1, self.gate))

        layers = [layer for layer in (self.fc1, self.gate, self.fc2) if layer is not None]
        if isinstance(width, int) and all(_is_plain_linear(layer) for layer in layers):
            units = self.config.ffn_hidden_size(width)
            hidden_states = self._hidden(hidden_states, *(layer and _first_rows(layer, units) for layer in (self.fc1, self.gate)))
            return nn.functional.linear(hidden_states, self.fc2.weight[:, :units], self.fc2.bias)

        # Images of one batch that differ in width, or layers that must be called as they are: mask.
        widths = (width,) if isinstance(width, int) else width
        units = torch.tensor([self.config.ffn_hidden_size(w) for w in widths], device=hidden_states.device)
        hidden_states = self._hidden(hidden_states, self.fc1, self.gate)
        kept = torch.arange(hidden_states.shape[-1], device=hidden_states.device) < units[:, None, None]
        return self.fc2(hidden_states * kept)

    def _hidden(self, hidden_states: torch.Tensor, fc1: Callable, gate: Callable | None) -> torch.Tensor:
        if gate is None:
            return self.activation(fc1(hidden_states))
        return self.activation(gate(hidden_states)) * fc1(hidden_states)


def _is_plain_linear(layer: nn.Module) -> bool:
    """Whether `layer(x)` is `x @ weight.T + bias`: no adapter, quantisation, offloading or hook stands in between."""
    hooked = layer._forward_pre_hooks or layer._forward_hooks or "forward" in vars(layer)
    return type(layer) is nn.Linear and not hooked


def _first_rows(layer: nn.Linear, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    bias = None if layer.bias is None else layer.bias[:rows]
    return lambda hidden_states: nn.functional.linear(hidden_states, layer.weight[:rows], bias)


class AdaPerceiverEmbeddings(nn.Module):
    """Pixels to input tokens: patches, plus positions, then the embed FFN."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        self.config = config
        self.patch_embeddings = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.position_embeddings = nn.Parameter(torch.empty(1, config.grid_size**2, config.hidden_size))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.use_embed_ffn else None
        self.ffn = AdaPerceiverFFN(config) if config.use_embed_ffn else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def positions(self, height: int, width: int) -> torch.Tensor:
        """The position embedding, resampled as an image to a grid of `height` x `width` patches."""
        side = self.config.grid_size
        if height == side and width == side:
            return self.position_embeddings
        grid = self.position_embeddings.float().reshape(1, side, side, -1).permute(0, 3, 1, 2)
        grid = nn.functional.interpolate(grid, size=(height, width), mode="bicubic", antialias=True, align_corners=False)
        return grid.flatten(2).transpose(1, 2).to(self.position_embeddings.dtype)

    def forward(self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool | None = None) -> torch.Tensor:
        """pixel_values: (batch, channels, height, width) -> (batch, patches, hidden_size), in row-major order."""
        self.check(pixel_values, interpolate_pos_encoding)
        patches = self.patch_embeddings(pixel_values.to(self.patch_embeddings.weight.dtype))
        height, width = patches.shape[-2:]
        input_tokens = patches.flatten(2).transpose(1, 2) + self.positions(height, width)
        if self.ffn is not None:
            input_tokens = self.ffn(self.norm(input_tokens))
        return self.dropout(input_tokens)

    def check(self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool | None) -> None:
        channels, patch, side = self.config.num_channels, self.config.patch_size, self.config.image_size
        if pixel_values is None or pixel_values.ndim != 4 or pixel_values.shape[1] != channels:
            shape = None if pixel_values is None else tuple(pixel_values.shape)
            raise ValueError(f"`pixel_values` must be of shape (batch, {channels}, height, width), got {shape}.")
        height, width = pixel_values.shape[-2:]
        if height % patch != 0 or width % patch != 0 or height == 0 or width == 0:
            raise ValueError(
                f"`pixel_values` must have a height and a width that are multiples of the patch size {patch}, got "
                f"{height}x{width}."
            )
        if interpolate_pos_encoding is False and (height, width) != (side, side):
            raise ValueError(
                f"`pixel_values` must be {side}x{side} with `interpolate_pos_encoding=False`, got {height}x{width}."
            )


def rotary_embedding(config: AdaPerceiverConfig, tokens: int, device: torch.device) -> Rope:
    """
    Cosines and sines of the latent positions, float32. Computed anew in every call rather than kept in a buffer, which
    a cast of the model would round.
    """
    channels = torch.arange(0, config.head_size, 2, dtype=torch.float32, device=device)
    frequencies = config.rope_theta ** (-channels / config.head_size)
    if tokens > config.max_latent_tokens:
        frequencies = frequencies / (tokens / config.max_latent_tokens)
    angles = torch.arange(tokens, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(states: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Turn neighbouring pairs of channels (2i, 2i + 1), in float32. states: (batch, heads, latents or 1, head_size)."""
    cos, sin = (table[:, None] for table in rope)  # (latents, 1, head_size / 2)
    pairs = states.transpose(1, 2).float().unflatten(-1, (-1, 2))  # (batch, latents or 1, heads, head_size / 2, 2)
    if torch.compiler.is_compiling():  # compilers fuse this, and export formats have no complex numbers
        even, odd = pairs.unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:  # the same in one pass over memory
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
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
        self, latents: torch.Tensor, rope: Rope, groups: Sequence[Group], **kwargs: Unpack[TransformersKwargs]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query = rotate(self.heads(self.q_proj(latents)), rope)
        key = rotate(self.heads(self.k_proj(latents)), rope)
        value = self.heads(self.v_proj(latents))
        return self.attend(query, key, value, groups, **kwargs)


class AdaPerceiverCrossAttention(AdaPerceiverAttention):
    """`sink + Attention(Norm(sink), Norm(source))`: latents read from input tokens, output tokens from latents."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.sink_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.source_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self,
        sink: torch.Tensor,
        source: torch.Tensor,
        sink_rope: Rope | None = None,
        source_rope: Rope | None = None,
    ) -> torch.Tensor:
        """
        sink: (batch or 1, sinks or 1, hidden_size); source: (batch, sources, hidden_size). A sink that is the same for
        all images, or for all positions of `sink_rope`, is projected once.
        """
        query = self.heads(self.q_proj(self.sink_norm(sink)))
        source = self.source_norm(source)
        key, value = self.heads(self.k_proj(source)), self.heads(self.v_proj(source))
        if sink_rope is not None:
            query = rotate(query, sink_rope)
        if source_rope is not None:
            key = rotate(key, source_rope)
        return sink + self.attend(query.expand(source.shape[0], -1, -1, -1), key, value)[0]


class AdaPerceiverRead(nn.Module):
    """Input tokens to latents. All latents start from one learned vector; the rotation of their queries parts them."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        self.latent_token = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.cross_attention = AdaPerceiverCrossAttention(config)

    def forward(self, input_tokens: torch.Tensor, rope: Rope) -> torch.Tensor:
        """(batch, patches, hidden_size) -> (batch, latents, hidden_size)"""
        return self.cross_attention(self.latent_token, input_tokens, sink_rope=rope)


class AdaPerceiverLayerScale(nn.Module):
    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.gamma


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

        def layer_scale() -> nn.Module:
            return AdaPerceiverLayerScale(config) if config.layerscale_value else nn.Identity()

        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = AdaPerceiverSelfAttention(config)
        self.layer_scale1 = layer_scale()
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.ffn = AdaPerceiverFFN(config, gated=config.use_swiglu_ffn)
        self.layer_scale2 = layer_scale()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        # grows linearly from 0 at the first block to the full rate at the last
        self.drop_path = AdaPerceiverDropPath(config.drop_path_rate * index / max(config.num_hidden_layers - 1, 1))

    def forward(
        self,
        latents: torch.Tensor,
        rope: Rope,
        groups: Sequence[Group],
        width: int | tuple[int, ...],
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """(batch, latents, hidden_size) -> the same"""
        update, _ = self.attention(self.norm1(latents), rope, groups, **kwargs)
        latents = latents + self.drop_path(self.layer_scale1(self.dropout(update)))
        update = self.ffn(self.norm2(latents), width)
        return latents + self.drop_path(self.layer_scale2(self.dropout(update)))


class AdaPerceiverClassReadout(nn.Module):
    """Latents to one output token per image, for classification."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        self.output_token = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.write = AdaPerceiverCrossAttention(config)

    def forward(self, latents: torch.Tensor, rope: Rope) -> torch.Tensor:
        """(batch, latents, hidden_size) -> (batch, 1, hidden_size)"""
        return self.write(self.output_token, latents, source_rope=rope)


class AdaPerceiverDenseReadout(nn.Module):
    """Latents to one output token per input token, for dense prediction."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        self.projection = nn.Linear(config.hidden_size, config.hidden_size)
        self.write = AdaPerceiverCrossAttention(config)

    def forward(self, latents: torch.Tensor, input_tokens: torch.Tensor, rope: Rope) -> torch.Tensor:
        """(batch, latents, hidden_size), (batch, patches, hidden_size) -> (batch, patches, hidden_size)"""
        return self.write(self.projection(input_tokens), latents, source_rope=rope)


class AdaPerceiverPreTrainedModel(PreTrainedModel):
    config: AdaPerceiverConfig
    base_model_prefix = "adaperceiver"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules = [
        "AdaPerceiverEmbeddings",
        "AdaPerceiverRead",
        "AdaPerceiverBlock",
        "AdaPerceiverClassReadout",
        "AdaPerceiverDenseReadout",
    ]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": AdaPerceiverBlock, "attentions": AdaPerceiverSelfAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AdaPerceiverEmbeddings):
            init.normal_(module.position_embeddings, std=0.02)
        elif isinstance(module, AdaPerceiverRead):
            init.normal_(module.latent_token, std=1e-6)
        elif isinstance(module, AdaPerceiverClassReadout):
            init.normal_(module.output_token, std=1e-6)
        elif isinstance(module, AdaPerceiverLayerScale):
            init.constant_(module.gamma, self.config.layerscale_value)

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.embeddings.patch_embeddings

    @property
    def adaptive_config(self) -> AdaptiveConfig:
        """Where the model runs when a call does not say. The base model owns it, so that every head reaches it."""
        return self.base_model._adaptive_config

    @adaptive_config.setter
    def adaptive_config(self, adaptive_config: AdaptiveConfig) -> None:
        adaptive_config.validate(self.config)
        self.base_model._adaptive_config = adaptive_config

    def save_pretrained(self, save_directory: str | os.PathLike, *args, is_main_process: bool = True, **kwargs) -> None:
        if is_main_process:
            self.adaptive_config.validate(self.config)
            self.adaptive_config.save_pretrained(save_directory)
            self.config.output_tokens = self.base_model.output_tokens  # so that `AutoModel` finds what the head used
        super().save_pretrained(save_directory, *args, is_main_process=is_main_process, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args,
        adaptive_config: AdaptiveConfig | None = None,
        **kwargs,
    ) -> "AdaPerceiverPreTrainedModel":
        """As in transformers; `adaptive_config` replaces the one that is saved beside the weights."""
        hub_kwargs = {name: kwargs[name] for name in HUB_KWARGS if name in kwargs}
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with `output_loading_info=True`
        if adaptive_config is not None:
            model.adaptive_config = adaptive_config.copy()
        elif pretrained_model_name_or_path is not None:
            model.adaptive_config = AdaptiveConfig.from_pretrained(pretrained_model_name_or_path, **hub_kwargs)
        return loaded


class AdaPerceiverModel(AdaPerceiverPreTrainedModel):
    """
    Pixels to latents and output tokens, without a head.

    `output_tokens` (`"class"`, `"dense"` or `"both"`) is what the model writes; it defaults to `config.output_tokens`.
    """

    def __init__(self, config: AdaPerceiverConfig, output_tokens: str | None = None):
        super().__init__(config)
        self.output_tokens = config.output_tokens if output_tokens is None else output_tokens
        self._adaptive_config = AdaptiveConfig()
        self.embeddings = AdaPerceiverEmbeddings(config)
        self.read = AdaPerceiverRead(config)
        self.layers = nn.ModuleList([AdaPerceiverBlock(config, index) for index in range(config.num_hidden_layers)])
        self.class_readout = AdaPerceiverClassReadout(config) if self.output_tokens in ("class", "both") else None
        self.dense_readout = AdaPerceiverDenseReadout(config) if self.output_tokens in ("dense", "both") else None
        self.post_init()

    def operating_point(self, adaptive_config: AdaptiveConfig | None = None, **kwargs) -> OperatingPoint:
        """Where a call with these arguments runs: they win over `adaptive_config`, which wins over the model's own."""
        chosen = self.adaptive_config
        if adaptive_config is not None:
            chosen = chosen.update(**adaptive_config.to_dict())
        return chosen.operating_point(self.config, **kwargs)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        tokens: int | None = None,
        width: int | Sequence[int] | torch.Tensor | None = None,
        depth: int | None = None,
        attention: str | None = None,
        adaptive_config: AdaptiveConfig | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> AdaPerceiverModelOutput:
        r"""
        pixel_values (`torch.Tensor` of shape `(batch, channels, height, width)`):
            Images; both sides must be multiples of `config.patch_size`.
        tokens, width, depth, attention, adaptive_config:
            Where to run; see [`AdaptiveConfig`]. `width` may also be one width per image.
        interpolate_pos_encoding (`bool`, *optional*):
            The position embedding is resampled whenever the grid of the images asks for it; `False` refuses to.
        """
        check_kwargs(kwargs)
        point = self.operating_point(adaptive_config, tokens=tokens, width=width, depth=depth, attention=attention)
        input_tokens = self.embeddings(pixel_values, interpolate_pos_encoding)  # (batch, patches, hidden_size)
        if isinstance(point.width, tuple) and len(point.width) != input_tokens.shape[0]:
            raise ValueError(
                f"`width` must be one width, or one per image of the batch of {input_tokens.shape[0]}, got "
                f"{len(point.width)}."
            )

        rope = rotary_embedding(self.config, point.tokens, input_tokens.device)
        groups = self.config.token_groups(point.tokens, point.attention)
        latents = self.read(input_tokens, rope)  # (batch, tokens, hidden_size)
        for layer in self.layers[: point.depth]:
            latents = layer(latents, rope, groups, point.width, **kwargs)

        output_tokens = class_token = None
        if self.class_readout is not None:
            output_tokens = self.class_readout(latents, rope)  # (batch, 1, hidden_size)
            class_token = output_tokens[:, 0]
        if self.dense_readout is not None:
            output_tokens = self.dense_readout(latents, input_tokens, rope)  # (batch, patches, hidden_size)
        return AdaPerceiverModelOutput(
            last_hidden_state=latents,
            pooler_output=class_token,
            output_tokens=output_tokens,
            input_tokens=input_tokens,
        )


def check_kwargs(kwargs: dict) -> None:
    """Refuse keyword arguments that nothing would look at; those of transformers itself are welcome."""
    allowed = TransformersKwargs.__annotations__.keys() | {"return_dict", "use_cache"}
    unknown = [name for name in kwargs if name not in allowed]
    if unknown:
        adaptive = sorted(AdaptiveKwargs.__annotations__.keys() - TransformersKwargs.__annotations__.keys())
        raise TypeError(
            f"Unknown argument{'s' * (len(unknown) > 1)} {', '.join(f'`{name}`' for name in unknown)}; the adaptive ones "
            f"are {', '.join(adaptive)}."
        )


class AdaPerceiverForImageClassification(AdaPerceiverPreTrainedModel):
    """AdaPerceiver with a linear classifier on the output token."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.adaperceiver = AdaPerceiverModel(config, output_tokens="class")
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[AdaptiveKwargs],
    ) -> ImageClassifierOutput:
        r"""
        labels (`torch.Tensor` of shape `(batch,)`, or `(batch, num_labels)` with several labels an image, *optional*):
            Targets of the loss, which is chosen by `config.problem_type` as everywhere in transformers.
        """
        outputs = self.adaperceiver(pixel_values, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class AdaPerceiverFeatureAdapter(nn.Module):
    """Output tokens to features in the teacher's space."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.head_dropout_prob)
        self.ffn = AdaPerceiverFFN(config, out_features=config.feature_size)

    def forward(self, output_tokens: torch.Tensor) -> torch.Tensor:
        """(batch, patches, hidden_size) -> (batch, patches, feature_size)"""
        return self.ffn(self.dropout(self.norm(output_tokens)))


class AdaPerceiverForDistillation(AdaPerceiverPreTrainedModel):
    """AdaPerceiver with logits and patch features side by side, to be distilled from a teacher."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.loss_type = "ForImageClassification"  # transformers would infer it from the class name
        self.adaperceiver = AdaPerceiverModel(config, output_tokens="both")
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.feature_adapter = AdaPerceiverFeatureAdapter(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        teacher_logits: torch.Tensor | None = None,
        teacher_features: torch.Tensor | None = None,
        **kwargs: Unpack[AdaptiveKwargs],
    ) -> AdaPerceiverDistillationOutput:
        r"""
        The loss is the sum of the terms whose target is given.

        labels (`torch.Tensor` of shape `(batch,)`, *optional*):
            Targets of the classification loss.
        teacher_logits (`torch.Tensor` of shape `(batch, num_labels)`, *optional*):
            Targets of the logit distillation loss.
        teacher_features (`torch.Tensor` of shape `(batch, patches, feature_size)`, *optional*):
            Targets of the feature distillation loss: the teacher's patch features, without its prefix tokens.
        """
        outputs = self.adaperceiver(pixel_values, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        features = self.feature_adapter(outputs.output_tokens)
        losses = []
        if labels is not None:
            losses.append(self.loss_function(labels, logits, self.config))
        if teacher_logits is not None:
            check_shape("teacher_logits", teacher_logits, logits.shape)
            losses.append(logit_distillation_loss(logits, teacher_logits))
        if teacher_features is not None:
            check_shape("teacher_features", teacher_features, features.shape)
            losses.append(feature_distillation_loss(features, teacher_features))
        return AdaPerceiverDistillationOutput(
            loss=sum(losses) if losses else None,
            logits=logits,
            features=features,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"`{name}` must be of shape {tuple(shape)}, got {tuple(tensor.shape)}.")


def to_map(tokens: torch.Tensor, pixel_values: torch.Tensor, patch_size: int) -> torch.Tensor:
    """(batch, patches, channels) in row-major order -> (batch, channels, height, width) in patches"""
    height, width = pixel_values.shape[-2] // patch_size, pixel_values.shape[-1] // patch_size
    return tokens.transpose(1, 2).unflatten(2, (height, width))


def resize(maps: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Bilinear, corners not aligned. (batch, channels, height, width) -> (batch, channels, *size)"""
    return nn.functional.interpolate(maps, size=tuple(size), mode="bilinear", align_corners=False)


class AdaPerceiverSegmentationHead(nn.Module):
    """LayerNorm over channels, dropout, 1x1 convolution."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.feature_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout2d(config.head_dropout_prob)
        self.classifier = nn.Conv2d(config.feature_size, config.num_labels, kernel_size=1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(batch, feature_size, height, width) -> (batch, num_labels, height, width)"""
        features = self.norm(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.classifier(self.dropout(features))


class AdaPerceiverForSemanticSegmentation(AdaPerceiverPreTrainedModel):
    """AdaPerceiver with a linear segmentation head on the patch features."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.adaperceiver = AdaPerceiverModel(config, output_tokens="dense")
        self.feature_adapter = AdaPerceiverFeatureAdapter(config)
        self.head = AdaPerceiverSegmentationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[AdaptiveKwargs],
    ) -> SemanticSegmenterOutput:
        r"""
        Logits come at the size of the images, `(batch, num_labels, height, width)`.

        labels (`torch.Tensor` of shape `(batch, height, width)`, *optional*):
            Class of each pixel; `config.semantic_loss_ignore_index` (255) marks pixels that do not count.
        """
        if labels is not None and self.num_labels == 1:
            raise ValueError("`num_labels` must be at least 2 for the segmentation loss, got 1.")
        outputs = self.adaperceiver(pixel_values, **kwargs)
        features = self.feature_adapter(outputs.output_tokens)
        coarse = self.head(to_map(features, pixel_values, self.config.patch_size))
        logits = resize(coarse, pixel_values.shape[-2:])
        loss = None
        if labels is not None:
            check_shape("labels", labels, (pixel_values.shape[0], *labels.shape[-2:]))
            at_labels = logits if labels.shape[-2:] == logits.shape[-2:] else resize(coarse, labels.shape[-2:])
            loss = segmentation_loss(at_labels, labels, self.config.semantic_loss_ignore_index)
        return SemanticSegmenterOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class AdaPerceiverDepthHead(nn.Module):
    """Depth as the expectation over uniform bins, predicted by a 3x3 convolution at four times the patch grid."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        self.config = config
        self.dropout = nn.Dropout2d(config.head_dropout_prob)
        self.bins = nn.Conv2d(config.feature_size, config.num_depth_bins, kernel_size=3, padding=1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(batch, feature_size, height, width) -> (batch, 1, 4 x height, 4 x width), in metres"""
        features = resize(features, (4 * features.shape[-2], 4 * features.shape[-1]))
        weights = self.bins(self.dropout(features)).relu() + 0.1
        weights = weights / weights.sum(dim=1, keepdim=True)
        low, high = self.config.min_depth, self.config.max_depth
        centres = torch.linspace(low, high, self.config.num_depth_bins, device=weights.device, dtype=weights.dtype)
        depth = torch.einsum("bkhw,k->bhw", weights, centres)[:, None]
        return depth if self.training else depth.clamp(low, high)


class AdaPerceiverForDepthEstimation(AdaPerceiverPreTrainedModel):
    """AdaPerceiver with a binned depth head on the patch features."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.adaperceiver = AdaPerceiverModel(config, output_tokens="dense")
        self.feature_adapter = AdaPerceiverFeatureAdapter(config)
        self.head = AdaPerceiverDepthHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loss_warm_up: bool = False,
        **kwargs: Unpack[AdaptiveKwargs],
    ) -> DepthEstimatorOutput:
        r"""
        `predicted_depth` comes at the size of the images, `(batch, height, width)`, in metres.

        labels (`torch.Tensor` of shape `(batch, height, width)`, *optional*):
            Depth of each pixel; values outside `(0, config.max_depth]` and NaN do not count.
        loss_warm_up (`bool`, defaults to `False`):
            Leave the variance out of the scale-invariant loss, as in the first steps of a training.
        """
        outputs = self.adaperceiver(pixel_values, **kwargs)
        features = self.feature_adapter(outputs.output_tokens)
        coarse = self.head(to_map(features, pixel_values, self.config.patch_size))
        predicted_depth = resize(coarse, pixel_values.shape[-2:])[:, 0]
        loss = None
        if labels is not None:
            check_shape("labels", labels, (pixel_values.shape[0], *labels.shape[-2:]))
            same_size = labels.shape[-2:] == predicted_depth.shape[-2:]
            at_labels = predicted_depth if same_size else resize(coarse, labels.shape[-2:])[:, 0]
            loss = depth_loss(at_labels, labels, self.config.max_depth, warm_up=loss_warm_up)
        return DepthEstimatorOutput(
            loss=loss,
            predicted_depth=predicted_depth,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class AdaPerceiverBackbone(BackboneMixin, AdaPerceiverPreTrainedModel):
    """
    AdaPerceiver as a backbone: the feature map of `stage{l}` is the output tokens written from the latents after block
    l; that of `stem` is the input tokens. Blocks beyond the last stage asked for do not run.
    """

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.num_features = [config.hidden_size for _ in config.stage_names]
        self.adaperceiver = AdaPerceiverModel(config, output_tokens="dense")
        self.post_init()

    @can_return_tuple
    @filter_output_hidden_states
    def forward(
        self, pixel_values: torch.Tensor, depth: int | None = None, **kwargs: Unpack[AdaptiveKwargs]
    ) -> BackboneOutput:
        """Feature maps are of shape `(batch, hidden_size, height / patch_size, width / patch_size)`."""
        last = max(1, *(self.stage_names.index(stage) for stage in self.out_features))
        if depth is not None and depth < last:
            raise ValueError(f"`depth` must be at least {last} for the feature maps of {self.out_features}, got {depth}.")
        outputs = self.adaperceiver(pixel_values, depth=last, **kwargs)
        input_tokens = outputs.input_tokens
        rope = rotary_embedding(self.config, outputs.last_hidden_state.shape[1], input_tokens.device)
        feature_maps = []
        for stage, latents in enumerate(outputs.hidden_states):
            if self.stage_names[stage] not in self.out_features:
                continue
            if stage == 0:
                output_tokens = input_tokens
            elif stage == last:
                output_tokens = outputs.output_tokens
            else:
                output_tokens = self.adaperceiver.dense_readout(latents, input_tokens, rope)
            feature_maps.append(to_map(output_tokens, pixel_values, self.config.patch_size))
        return BackboneOutput(
            feature_maps=tuple(feature_maps), hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


__all__ = [
    "AdaPerceiverBackbone",
    "AdaPerceiverForDepthEstimation",
    "AdaPerceiverForDistillation",
    "AdaPerceiverForImageClassification",
    "AdaPerceiverForSemanticSegmentation",
    "AdaPerceiverModel",
    "AdaPerceiverPreTrainedModel",
]
