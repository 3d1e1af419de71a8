"""What an AdaPerceiver is (`AdaPerceiverConfig`) and at which operating point it runs (`AdaptiveConfig`)."""

import copy
import json
import math
import operator
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneConfigMixin
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import PushToHubMixin
from transformers.utils.hub import cached_file


ADAPTIVE_CONFIG_NAME = "adaptive_config.json"
AXES = ("tokens", "width", "depth")
ATTENTION_TYPES = ("block", "bidirectional")
POLICIES = ("fixed", "router")  # that can be chosen by name
PER_IMAGE_FIELDS = ("tokens", "width", "depth", "exit_threshold")  # what a call may choose image by image


@strict
class AdaPerceiverConfig(BackboneConfigMixin, PreTrainedConfig):
    r"""
    Configuration of an AdaPerceiver. The defaults are the paper's model.

    Args:
        image_size (`int`, defaults to 224):
            Side of the training images. Other sizes run too: the position embedding is resampled to their grid.
        stem_layers (`list[list[int]]`, *optional*):
            A convolutional stem in place of the patch convolution, whose strides must multiply to `patch_size`. A row
            `[channels, stride]` is a 3x3 convolution with GroupNorm. A row `[channels, stride, kernel, expansion]` is an
            inverted residual block as in MobileNet and EfficientNet-Lite, with its batch norms folded; expansion 0 stands for
            the single convolution that such networks start with.
        image_mean, image_std (`list[float]`, *optional*):
            Normalisation of the pixels, for `image_processor_for`. Defaults to CLIP's; a stem that comes from another network
            needs that of this network.
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
        position_init_std (`float`, defaults to 0.02):
            Spread of the position embedding at initialisation. The latents part by where they look: a short training wants
            positions that weigh as much as the patches.
        token_init_std (`float`, defaults to 1e-6):
            Standard deviation at which the learned latent and output token start. Short trainings start faster from 1:
            a vector of 1e-6 is next to nothing after its LayerNorm, so that all latents begin alike.
        max_latent_tokens (`int`, defaults to 256):
            Number of latents in training. Beyond it, the RoPE frequencies are divided by `tokens / max_latent_tokens`.
        token_granularities (`list[int]`, *optional*):
            Trained token counts; they cut the latents in the groups of the block mask. Defaults to 1/8, 1/4, 3/8, 1/2,
            3/4 and all of `max_latent_tokens`.
        widths (`list[int]`, *optional*):
            Trained widths, in units of `hidden_size`. Defaults to 1/2, 3/4 and all of `max_width`.
        max_width (`int`, *optional*):
            Width of the widest FFN that the weights of the blocks hold; defaults to `hidden_size`. Sub-networks cut from a
            larger model have less.
        attention_type (`"block"` or `"bidirectional"`, defaults to `"block"`):
            How latents see each other: their own group and all earlier ones, or all latents.
        adaptive_axes (`list[str]`, *optional*):
            Once-for-all training: which of `"tokens"`, `"depth"` and `"width"` the loss of a call in training mode covers,
            unless the call names an operating point. By default it trains the full model alone.
        distillation_temperature (`float`, defaults to 1.0):
            Temperature of the logit distillation loss.
        router_ratio (`float`, *optional*):
            Hidden units of the router's MLPs per patch and per channel. By default there is no router, the network that
            chooses the number of tokens for each image with `policy="router"`.
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
    stem_layers: list[list[int]] | tuple[tuple[int, ...], ...] | None = None
    image_mean: list[float] | tuple[float, ...] | None = None
    image_std: list[float] | tuple[float, ...] | None = None
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
    position_init_std: float | int = 0.02
    token_init_std: float | int = 1e-6
    max_latent_tokens: int = 256
    rope_theta: float | int = 10000.0
    token_granularities: list[int] | tuple[int, ...] | None = None
    widths: list[int] | tuple[int, ...] | None = None
    max_width: int | None = None
    attention_type: Literal["block", "bidirectional"] = "block"
    adaptive_axes: list[str] | tuple[str, ...] | None = None
    distillation_temperature: float | int = 1.0
    router_ratio: float | int | None = None
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
        self.max_width = self.hidden_size if self.max_width is None else self.max_width
        if self.widths is None:
            self.widths = sorted({self.max_width // 2, self.max_width * 3 // 4, self.max_width} - {0})
        self.token_granularities = list(self.token_granularities)
        self.widths = list(self.widths)
        self.validate_architecture()
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
        _check_int("max_width", self.max_width, low=1, high=self.hidden_size)

        if self.image_size % self.patch_size != 0:
            raise ValueError(
                f"`image_size` must be a multiple of `patch_size` ({self.patch_size}), got {self.image_size}."
            )
        if self.stem_layers is not None:
            layers = [list(layer) for layer in self.stem_layers]
            if any(len(layer) not in (2, 4) or min(layer[:3]) < 1 or min(layer) < 0 for layer in layers):
                raise ValueError(
                    "`stem_layers` must be rows of channels and stride, or of channels, stride, kernel and expansion, each at "
                    f"least 1 (expansion: 0), got {layers}."
                )
            if math.prod(layer[1] for layer in layers) != self.patch_size:
                raise ValueError(
                    f"`stem_layers` must have strides that multiply to `patch_size` ({self.patch_size}), got {layers}."
                )
        for name in ("image_mean", "image_std"):
            values = getattr(self, name)
            if values is not None and (len(values) != self.num_channels or (name == "image_std" and min(values) <= 0)):
                raise ValueError(f"`{name}` must hold one number per channel ({self.num_channels}), got {values}.")
        unknown = set(self.adaptive_axes or ()) - set(AXES)
        if unknown:
            raise ValueError(f"`adaptive_axes` must be among {AXES}, got {self.adaptive_axes}.")
        if "tokens" in (self.adaptive_axes or ()) and self.attention_type != "block":
            raise ValueError(
                '`attention_type` must be "block" for "tokens" in `adaptive_axes`: only there do fewer latents compute the '
                f"same as the first of more, got {self.attention_type!r}."
            )
        if self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"`num_attention_heads` must divide `hidden_size` ({self.hidden_size}), got {self.num_attention_heads}."
            )
        if (self.hidden_size // self.num_attention_heads) % 2 != 0:
            raise ValueError(
                "`hidden_size / num_attention_heads` must be even, since RoPE turns pairs of channels, got "
                f"{self.hidden_size} / {self.num_attention_heads} = {self.hidden_size // self.num_attention_heads}."
            )
        for name in ("ffn_ratio", "layer_norm_eps", "rope_theta", "min_depth", "distillation_temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be positive, got {getattr(self, name)}.")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate", "head_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be in [0, 1), got {getattr(self, name)}.")
        for name in ("initializer_range", "position_init_std", "token_init_std", "layerscale_value"):
            if getattr(self, name) is not None and not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` must not be negative, got {getattr(self, name)}.")
        if self.router_ratio is not None and not (self.router_ratio > 0 and min(self.router_units) >= 1):
            raise ValueError(f"`router_ratio` must leave at least one hidden unit, got {self.router_ratio}.")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be one of {', '.join(sorted(ACT2FN))}, got {self.hidden_act!r}.")
        if not self.min_depth < self.max_depth:
            raise ValueError(f"`max_depth` must be above `min_depth` ({self.min_depth}), got {self.max_depth}.")

        _check_ascending("token_granularities", self.token_granularities, "max_latent_tokens", self.max_latent_tokens)
        _check_ascending("widths", self.widths, "max_width", self.max_width)
        if self.ffn_hidden_size(self.widths[0]) < 1:
            raise ValueError(
                f"`widths` must leave at least one hidden unit, got {self.widths[0]} with `ffn_ratio` {self.ffn_ratio}."
            )

    @property
    def stage_names(self) -> list[str]:
        """The stages of the backbone: `stage{l}` is read out after block l."""
        return ["stem"] + [f"stage{depth}" for depth in range(1, self.num_hidden_layers + 1)]

    @property
    def grid_size(self) -> int:
        """Side of the training grid, in patches."""
        return self.image_size // self.patch_size

    @property
    def head_size(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def router_units(self) -> tuple[int, int]:
        """Hidden units of the router's MLPs over patches and over channels."""
        return int(self.grid_size**2 * self.router_ratio), int(self.hidden_size * self.router_ratio)

    def ffn_hidden_size(self, width: int) -> int:
        """Hidden units of an FFN at `width`: truncated, not rounded."""
        return int(width * self.ffn_ratio)

    def sub_config(self, point: "OperatingPoint") -> "AdaPerceiverConfig":
        """The config of the sub-network that runs at `point`."""
        tokens = min(point.tokens, self.max_latent_tokens)
        changes = {
            "max_latent_tokens": tokens,
            "token_granularities": [stop for _, stop in self.token_groups(tokens, "block")],
            "max_width": point.width,
            "widths": [width for width in self.widths if width < point.width] + [point.width],
            "num_hidden_layers": point.depth,
            "router_ratio": None,  # nothing is left to choose
            "out_features": None,
            "out_indices": None,
        }
        return type(self).from_dict({**self.to_dict(), **changes})

    def token_groups(self, tokens: int, attention: str) -> list[tuple[int, int]]:
        """The groups `(start, stop)` of the block mask; latents `start:stop` see latents `:stop`."""
        stops = [granularity for granularity in self.token_granularities if granularity < tokens] + [tokens]
        if attention == "bidirectional":
            stops = [tokens]
        return list(zip([0, *stops[:-1]], stops))


class OperatingPoint(NamedTuple):
    """An `AdaptiveConfig` with nothing left open: where one call to the model runs. A tuple holds one value per image."""

    tokens: int | tuple[int, ...]
    width: int | tuple[int, ...]
    depth: int | tuple[int, ...]
    attention: str
    exit_threshold: float | tuple[float, ...] | None = None
    exit_after: int = 1
    exit_every: int = 1
    exit_temperatures: tuple[float, ...] | None = None  # one per block
    policy: tuple[str | Callable, ...] = ()  # what may still change it, image by image

    def probe_depths(self) -> range:
        """The depths, below the last, at which an image may leave."""
        return range(self.exit_after, 0 if self.exit_threshold is None else self.depth, self.exit_every)

    def per_image(self) -> dict[str, tuple]:
        """The values that differ from image to image."""
        return {name: getattr(self, name) for name in PER_IMAGE_FIELDS if isinstance(getattr(self, name), tuple)}

    def of_image(self, index: int) -> "OperatingPoint":
        return self._replace(**{name: values[index] for name, values in self.per_image().items()})


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
            Width of the FFNs, 1 to `config.max_width`. Trained widths are `config.widths`; others run as well.
        depth (`int`, *optional*):
            Number of blocks, 1 to `config.num_hidden_layers`.
        attention (`str`, *optional*):
            `"block"` or `"bidirectional"`; defaults to `config.attention_type`.
        exit_threshold (`float`, *optional*):
            Early exit: an image leaves as soon as its largest class probability reaches this, 0 to 1. `depth` bounds it.
        exit_after, exit_every (`int`, *optional*, default to 1):
            Where images may leave: after block `exit_after`, and after every `exit_every`-th block from there.
        exit_temperatures (`list[float]`, *optional*):
            One for each block, by which the logits are divided before an image's confidence is taken there; by default 1.
        policy (`str`, *optional*):
            `"router"`: the model's router chooses the tokens of each image, up to `tokens`. `"fixed"` takes them as they
            are, as without a policy. A call may give a function as well, or a list; see `policy_adaperceiver.py`.
        max_gflops (`float`, *optional*):
            Budget per image. Picks those of tokens, width and depth that are not given; see `model.operating_point`.
        max_latency_ms (`float`, *optional*):
            Budget per call, by the profile that `model.profile()` measured on this machine.

    In a call, `tokens`, `width`, `depth` and `exit_threshold` may also be lists or tensors, one value per image.
    """

    tokens: int | None = None
    width: int | None = None
    depth: int | None = None
    attention: str | None = None
    exit_threshold: float | None = None
    exit_after: int | None = None
    exit_every: int | None = None
    exit_temperatures: list[float] | None = None
    policy: str | None = None
    max_gflops: float | None = None
    max_latency_ms: float | None = None

    def __post_init__(self):
        self.validate()

    def validate(self, config: AdaPerceiverConfig | None = None) -> None:
        """Raise on values that no model (or not the model of `config`) can run at."""
        for name, value in asdict(self).items():
            if value is not None:
                setattr(self, name, _check_field(name, value, config))

    def update(self, **kwargs) -> "AdaptiveConfig":
        """A copy in which the values of `kwargs` that are not `None` replace the fields of that name."""
        _check_names(type(self).__name__, kwargs, [field.name for field in fields(self)])
        changes = {name: value for name, value in kwargs.items() if value is not None}
        return type(self)(**{**asdict(self), **changes})

    def operating_point(self, config: AdaPerceiverConfig, **kwargs) -> OperatingPoint:
        """Where a call with the arguments `kwargs` runs on the model of `config`, budgets left aside."""
        per_image = {}
        for name in PER_IMAGE_FIELDS:
            values = kwargs.get(name)
            values = values.tolist() if hasattr(values, "tolist") else values  # tensors and arrays
            if isinstance(values, (list, tuple)):
                per_image[name] = tuple(
                    _check_field(name, value, config, label=f"{name}[{index}]") for index, value in enumerate(values)
                )
                kwargs[name] = None
        policies = kwargs.pop("policy", None)
        policies = self.policy if policies is None else policies
        policies = tuple(policies) if isinstance(policies, (list, tuple)) else (policies or "fixed",)
        policies = tuple(one if callable(one) else _check_field("policy", one, config) for one in policies)
        chosen = self.update(**kwargs)
        chosen.validate(config)
        defaults = {
            "tokens": config.max_latent_tokens,
            "width": config.max_width,
            "depth": config.num_hidden_layers,
            "attention": config.attention_type,
        }
        point = {**defaults, **chosen.to_dict(), **per_image}
        if chosen.exit_temperatures is not None:
            point["exit_temperatures"] = tuple(chosen.exit_temperatures)
        point["policy"] = tuple(one for one in policies if one != "fixed")
        return OperatingPoint(**{name: value for name, value in point.items() if name in OperatingPoint._fields})

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs) -> None:
        """Write `adaptive_config.json` to `save_directory`."""
        self.validate()
        os.makedirs(save_directory, exist_ok=True)
        if push_to_hub:
            commit_message = kwargs.pop("commit_message", None)
            repo_id = self._create_repo(kwargs.pop("repo_id", os.path.basename(save_directory)), **kwargs)
            files_before = self._get_files_timestamps(save_directory)
        write_json(self.to_dict(), os.path.join(save_directory, ADAPTIVE_CONFIG_NAME))
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
        path = optional_file(pretrained_model_name_or_path, ADAPTIVE_CONFIG_NAME, **hub_kwargs)
        return cls() if path is None else read_json(cls, path)

    def copy(self) -> "AdaptiveConfig":
        return copy.deepcopy(self)


def optional_file(folder_or_hub_id: str | os.PathLike, name: str, **hub_kwargs) -> str | None:
    """The path of a file that a checkpoint may have beside its weights, or None if it has not."""
    return cached_file(
        folder_or_hub_id,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **hub_kwargs,
    )


def write_json(values: dict[str, Any], path: str | os.PathLike) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=2)
        file.write("\n")


def read_json(dataclass_type: type, path: str | os.PathLike) -> Any:
    """A dataclass from the JSON file of its fields; the error names the file and what is wrong with it."""
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
        _check_names(dataclass_type.__name__, values, [field.name for field in fields(dataclass_type)])
        return dataclass_type(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a valid {dataclass_type.__name__}: {error}") from error


def _check_field(name: str, value: Any, config: AdaPerceiverConfig | None = None, label: str | None = None) -> Any:
    """Check one value of an operating point, and return it as a plain number or string."""
    label = label or name
    if getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        value = value.item()
    if name == "attention":
        if value not in ATTENTION_TYPES:
            raise ValueError(f"`{label}` must be one of {ATTENTION_TYPES}, got {value!r}.")
        return value
    if name == "policy":
        if value not in POLICIES:
            raise ValueError(f"`{label}` must be one of {POLICIES}, or a function in a call, got {value!r}.")
        if value == "router" and config is not None and config.router_ratio is None:
            raise ValueError(
                f"`{label}` must not be 'router' for a model without one (`config.router_ratio` is None)."
            )
        return value
    if name == "exit_temperatures":
        values = value.tolist() if hasattr(value, "tolist") else value
        blocks = None if config is None else config.num_hidden_layers
        if not isinstance(values, (list, tuple)) or (blocks is not None and len(values) != blocks):
            raise ValueError(
                f"`{label}` must be a list of {blocks or 'as many'} numbers, one for each block, got {value!r}."
            )
        return [_check_float(f"{label}[{index}]", one, 1e-6) for index, one in enumerate(values)]
    if name in ("exit_threshold", "max_gflops", "max_latency_ms"):
        low, high = (0, 1) if name == "exit_threshold" else (0, None)
        return _check_float(label, value, low, high)
    highest = {"width": "max_width", "depth": "num_hidden_layers", "exit_after": "num_hidden_layers"}.get(name)
    return _check_int(label, value, low=1, high=highest and config and getattr(config, highest))


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < low or (high is not None and number > high):
        raise ValueError(f"`{name}` must be {allowed}, got {value!r}.")
    return number


def _check_float(name: str, value: Any, low: float, high: float | None = None) -> float:
    allowed = f"a number of at least {low}" if high is None else f"a number from {low} to {high}"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not value >= low or (high is not None and value > high):  # a NaN is not >= either
        raise ValueError(f"`{name}` must be {allowed}, got {value!r}.")
    return float(value)


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


__all__ = [
    "ADAPTIVE_CONFIG_NAME",
    "AXES",
    "PER_IMAGE_FIELDS",
    "AdaPerceiverConfig",
    "AdaptiveConfig",
    "OperatingPoint",
    "optional_file",
    "read_json",
    "write_json",
]
