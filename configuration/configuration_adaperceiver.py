"""What an AdaPerceiver is (`AdaPerceiverConfig`) and at which operating point it runs (`AdaptiveConfig`)."""

import copy
import json
import operator
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

from huggingface_hub.dataclasses import strict
from transformers.backbone_utils import BackboneConfigMixin
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import PushToHubMixin
from transformers.utils.hub import cached_file


ADAPTIVE_CONFIG_NAME = "adaptive_config.json"
ATTENTION_TYPES = ("block", "bidirectional")


@strict
class AdaPerceiverConfig(BackboneConfigMixin, PreTrainedConfig):
    r"""
    Configuration of an AdaPerceiver. The defaults are the paper's model.

    Args:
        image_size (`int`, defaults to 224):
            Side of the training images. Other sizes run too: the position embedding is resampled to their grid.
        ffn_ratio (`float`, defaults to 2.57):
            Hidden units of an FFN per unit of width, `int(width * ffn_ratio)`.
        hidden_act (`str`, defaults to `"gelu"`):
            Activation of every FFN. With `use_swiglu_ffn=True` it acts on the gate: `"silu"` gives SwiGLU proper.
        use_swiglu_ffn (`bool`, defaults to `False`):
            Whether the FFNs of the blocks are gated, `fc2(act(gate(x)) * fc1(x))`.
        use_embed_ffn (`bool`, defaults to `True`):
            Whether a LayerNorm and an FFN (without residual) follow the patch embedding.
        layerscale_value (`float`, *optional*, defaults to 1e-5):
            Initial value of the layer scale vectors; `None` or 0 leaves them out.
        max_latent_tokens (`int`, defaults to 256):
            Number of latents in training. Beyond it, the RoPE frequencies are divided by `tokens / max_latent_tokens`.
        token_granularities (`list[int]`, *optional*):
            Trained token counts; they cut the latents in the groups of the block mask. Defaults to 1/8, 1/4, 3/8, 1/2,
            3/4 and all of `max_latent_tokens`.
        widths (`list[int]`, *optional*):
            Trained widths, in units of `hidden_size`. Defaults to 1/2, 3/4 and all of `hidden_size`.
        attention_type (`"block"` or `"bidirectional"`, defaults to `"block"`):
            How latents see each other: their own group and all earlier ones, or all latents.
        output_tokens (`"class"`, `"dense"` or `"both"`, defaults to `"class"`):
            The output tokens that `AdaPerceiverModel` writes: one learned token, one per input token, or both. The
            models with a head know what they need; saving them records it here.
        feature_size (`int`, defaults to 1280):
            Size of the features that the dense heads stand on (the distillation teacher's).
        head_dropout_prob (`float`, defaults to 0.0):
            Dropout before the feature adapter's FFN and before the convolution of the dense heads.
        num_depth_bins, min_depth, max_depth:
            The depth head predicts the expectation over `num_depth_bins` uniform bins between `min_depth` and
            `max_depth` metres. Pixels whose label is not in `(0, max_depth]` do not count.

    The other fields mean what they mean in `ViTConfig`.

    ```python
    >>> from adaperceiver import AdaPerceiverConfig, AdaPerceiverForImageClassification

    >>> config = AdaPerceiverConfig(num_labels=1000)
    >>> config.token_granularities, config.widths
    ([32, 64, 96, 128, 192, 256], [416, 624, 832])
    ```"""

    model_type = "adaperceiver"

    image_size: int = 224
    patch_size: int = 14
    num_channels: int = 3
    hidden_size: int = 832
    num_hidden_layers: int = 21
    num_attention_heads: int = 13
    ffn_ratio: float | int = 2.57
    hidden_act: str = "gelu"
    use_swiglu_ffn: bool = False
    use_embed_ffn: bool = True
    qkv_bias: bool = True
    proj_bias: bool = True
    ffn_bias: bool = True
    layer_norm_eps: float = 1e-6
    layerscale_value: float | int | None = 1e-5
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    drop_path_rate: float | int = 0.0
    initializer_range: float = 0.02
    max_latent_tokens: int = 256
    rope_theta: float | int = 10000.0
    token_granularities: list[int] | tuple[int, ...] | None = None
    widths: list[int] | tuple[int, ...] | None = None
    attention_type: Literal["block", "bidirectional"] = "block"
    output_tokens: Literal["class", "dense", "both"] = "class"
    feature_size: int = 1280
    head_dropout_prob: float | int = 0.0
    semantic_loss_ignore_index: int = 255
    num_depth_bins: int = 256
    min_depth: float | int = 0.001
    max_depth: float | int = 10.0
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs):
        if self.token_granularities is None:
            eighths = (self.max_latent_tokens * eighth // 8 for eighth in (1, 2, 3, 4, 6, 8))
            self.token_granularities = sorted({tokens for tokens in eighths if tokens > 0})
        if self.widths is None:
            self.widths = sorted({self.hidden_size // 2, self.hidden_size * 3 // 4, self.hidden_size} - {0})
        self.token_granularities = list(self.token_granularities)
        self.widths = list(self.widths)
        self.validate_architecture()
        self.stage_names = ["stem"] + [f"stage{depth}" for depth in range(1, self.num_hidden_layers + 1)]
        self.set_output_features_output_indices(
            out_features=kwargs.pop("out_features", None), out_indices=kwargs.pop("out_indices", None)
        )
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Check every size; the error names the field, its value and what is allowed."""
        for name in (
            "image_size",
            "patch_size",
            "num_channels",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_latent_tokens",
            "feature_size",
        ):
            _check_int(name, getattr(self, name), low=1)
        _check_int("num_depth_bins", self.num_depth_bins, low=2)

        if self.image_size % self.patch_size != 0:
            raise ValueError(f"`image_size` must be a multiple of `patch_size` ({self.patch_size}), got {self.image_size}.")
        if self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"`num_attention_heads` must divide `hidden_size` ({self.hidden_size}), got {self.num_attention_heads}."
            )
        if (self.hidden_size // self.num_attention_heads) % 2 != 0:
            raise ValueError(
                "`hidden_size / num_attention_heads` must be even, since RoPE turns pairs of channels, got "
                f"{self.hidden_size} / {self.num_attention_heads} = {self.hidden_size // self.num_attention_heads}."
            )
        for name in ("ffn_ratio", "layer_norm_eps", "rope_theta", "min_depth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be positive, got {getattr(self, name)}.")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate", "head_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be in [0, 1), got {getattr(self, name)}.")
        for name in ("initializer_range", "layerscale_value"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ValueError(f"`{name}` must not be negative, got {getattr(self, name)}.")
        if not self.min_depth < self.max_depth:
            raise ValueError(f"`max_depth` must be above `min_depth` ({self.min_depth}), got {self.max_depth}.")

        _check_ascending("token_granularities", self.token_granularities, "max_latent_tokens", self.max_latent_tokens)
        _check_ascending("widths", self.widths, "hidden_size", self.hidden_size)
        if self.ffn_hidden_size(self.widths[0]) < 1:
            raise ValueError(
                f"`widths` must leave at least one hidden unit, got {self.widths[0]} with `ffn_ratio` {self.ffn_ratio}."
            )

    @property
    def grid_size(self) -> int:
        """Side of the training grid, in patches."""
        return self.image_size // self.patch_size

    @property
    def head_size(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def ffn_hidden_size(self, width: int) -> int:
        """Hidden units of an FFN at `width`: truncated, not rounded."""
        return int(width * self.ffn_ratio)

    def token_groups(self, tokens: int, attention: str) -> list[tuple[int, int]]:
        """The groups `(start, stop)` of the block mask; latents `start:stop` see latents `:stop`."""
        stops = [granularity for granularity in self.token_granularities if granularity < tokens] + [tokens]
        if attention == "bidirectional":
            stops = [tokens]
        return list(zip([0, *stops[:-1]], stops))


class OperatingPoint(NamedTuple):
    """An `AdaptiveConfig` with nothing left open: where one call to the model runs."""

    tokens: int
    width: int | tuple[int, ...]  # a tuple holds one width per image
    depth: int
    attention: str


@dataclass
class AdaptiveConfig(PushToHubMixin):
    r"""
    The operating point of an AdaPerceiver: what `GenerationConfig` is to `generate`.

    It lives at `model.adaptive_config` and in `adaptive_config.json` beside the weights. Arguments of a call win over an
    `adaptive_config=` of that call, which wins over the model's own. A field that is `None` everywhere means the full
    model.

    Args:
        tokens (`int`, *optional*):
            Number of latents, 1 or more. Trained counts are `config.token_granularities`; others run as well.
        width (`int`, *optional*):
            Width of the FFNs, 1 to `config.hidden_size`. Trained widths are `config.widths`; others run as well.
        depth (`int`, *optional*):
            Number of blocks, 1 to `config.num_hidden_layers`.
        attention (`str`, *optional*):
            `"block"` or `"bidirectional"`; defaults to `config.attention_type`.
    """

    tokens: int | None = None
    width: int | None = None
    depth: int | None = None
    attention: str | None = None

    def __post_init__(self):
        self.validate()

    def validate(self, config: AdaPerceiverConfig | None = None) -> None:
        """Raise on values that no model (or not the model of `config`) can run at."""
        limits = {"tokens": None, "width": config and config.hidden_size, "depth": config and config.num_hidden_layers}
        for name, high in limits.items():
            if getattr(self, name) is not None:
                setattr(self, name, _check_int(name, getattr(self, name), low=1, high=high))
        if self.attention is not None and self.attention not in ATTENTION_TYPES:
            raise ValueError(f"`attention` must be one of {ATTENTION_TYPES}, got {self.attention!r}.")

    def update(self, **kwargs) -> "AdaptiveConfig":
        """A copy in which the values of `kwargs` that are not `None` replace the fields of that name."""
        _check_names(type(self).__name__, kwargs, [field.name for field in fields(self)])
        changes = {name: value for name, value in kwargs.items() if value is not None}
        return type(self)(**{**asdict(self), **changes})

    def operating_point(
        self,
        config: AdaPerceiverConfig,
        tokens: int | None = None,
        width: int | Sequence[int] | None = None,
        depth: int | None = None,
        attention: str | None = None,
    ) -> OperatingPoint:
        """Where a call with these arguments runs on the model of `config`. `width` may be one width per image."""
        widths = None
        if hasattr(width, "tolist"):  # tensors and arrays
            width = width.tolist()
        if isinstance(width, Sequence) and not isinstance(width, str):
            widths = tuple(
                _check_int(f"width[{index}]", value, low=1, high=config.hidden_size) for index, value in enumerate(width)
            )
            width = None
        chosen = self.update(tokens=tokens, width=width, depth=depth, attention=attention)
        chosen.validate(config)
        return OperatingPoint(
            tokens=config.max_latent_tokens if chosen.tokens is None else chosen.tokens,
            width=widths or (config.hidden_size if chosen.width is None else chosen.width),
            depth=config.num_hidden_layers if chosen.depth is None else chosen.depth,
            attention=config.attention_type if chosen.attention is None else chosen.attention,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "AdaptiveConfig":
        _check_names(cls.__name__, values, [field.name for field in fields(cls)])
        return cls(**values)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs) -> None:
        """Write `adaptive_config.json` to `save_directory`."""
        self.validate()
        os.makedirs(save_directory, exist_ok=True)
        if push_to_hub:
            commit_message = kwargs.pop("commit_message", None)
            repo_id = self._create_repo(kwargs.pop("repo_id", os.path.basename(save_directory)), **kwargs)
            files_before = self._get_files_timestamps(save_directory)
        with open(os.path.join(save_directory, ADAPTIVE_CONFIG_NAME), "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=2)
            file.write("\n")
        if push_to_hub:
            self._upload_modified_files(
                save_directory, repo_id, files_before, commit_message=commit_message, token=kwargs.get("token")
            )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **hub_kwargs) -> "AdaptiveConfig":
        """
        Load `adaptive_config.json` from a folder or the hub. A checkpoint without one runs at the full model: the
        fields are all `None` then. `hub_kwargs` (`revision`, `token`, `subfolder`, ...) are those of `cached_file`.
        """
        path = cached_file(
            pretrained_model_name_or_path,
            ADAPTIVE_CONFIG_NAME,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **hub_kwargs,
        )
        if path is None:
            return cls()
        try:
            with open(path, encoding="utf-8") as file:
                return cls.from_dict(json.load(file))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is not a valid adaptive config: {error}") from error

    def copy(self) -> "AdaptiveConfig":
        return copy.deepcopy(self)


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < low or (high is not None and number > high):
        raise ValueError(f"`{name}` must be {allowed}, got {value!r}.")
    return number


def _check_ascending(name: str, values: list[int], limit_name: str, limit: int) -> None:
    """Check that `values` is a strictly ascending list of integers from 1 to `limit`."""
    if len(values) == 0:
        raise ValueError(f"`{name}` must not be empty, got {values}.")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise ValueError(f"`{name}` must lie between 1 and `{limit_name}` ({limit}), got {value!r} in {values}.")
    if any(left >= right for left, right in zip(values, values[1:])):
        raise ValueError(f"`{name}` must be sorted, without repetition, got {values}.")


def _check_names(owner: str, given: dict[str, Any], allowed: list[str]) -> None:
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise ValueError(f"{owner} has no {', '.join(f'`{name}`' for name in unknown)}; it has {', '.join(allowed)}.")


__all__ = ["ADAPTIVE_CONFIG_NAME", "AdaPerceiverConfig", "AdaptiveConfig", "OperatingPoint"]
