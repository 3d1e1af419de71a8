# Copyright 2026 The AdaPerceiver for Hugging Face authors.
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with the License.
# You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0 Unless required by applicable law or agreed
# to in writing, software distributed under the License is distributed on an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF
# ANY KIND, either express or implied. See the License for the specific language governing permissions and limitations under the
# License.

"""What an AdaPerceiver is: its sizes, its trained choices, its heads. Where a call runs is `adaptive_adaperceiver.py`."""

import transformers


# Remote code comes without a list of requirements. Every file that transformers starts from imports this one first.
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 22):
    raise ImportError(
        f"AdaPerceiver needs transformers >= 5.22, got {transformers.__version__}: pip install --upgrade transformers"
    )

import math
import operator
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneConfigMixin
from transformers.configuration_utils import PreTrainedConfig


AXES = ("tokens", "width", "depth")
SIZES = (
    "image_size",
    "patch_size",
    "num_channels",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_latent_tokens",
    "feature_size",
)
POSITIVE = ("ffn_ratio", "layer_norm_eps", "rope_theta", "min_depth", "distillation_temperature")
PROBABILITIES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate", "head_dropout_prob")
NOT_NEGATIVE = ("initializer_range", "position_init_std", "token_init_std", "layerscale_value")


if TYPE_CHECKING:  # `__post_init__` fills in what is None; a check that something is there comes before its use
    Choices: TypeAlias = Any
    Count: TypeAlias = Any
    Rows: TypeAlias = Any
    Ratio: TypeAlias = Any
else:
    Choices, Count = list[int] | tuple[int, ...] | None, int | None
    Rows, Ratio = list[list[int]] | tuple[tuple[int, ...], ...] | None, float | int | None


class CustomPipelines(dict):
    """
    The pipelines of a saved folder. transformers infers the task where there is one alone: the head's is written to the file,
    and that of the features, which every folder has, is found when it is asked for.
    """

    features: ClassVar[dict[str, dict[str, Any]]] = {
        "image-feature-extraction": {
            "impl": "pipeline_adaperceiver.AdaPerceiverImageFeatureExtractionPipeline",
            "pt": ["AutoModel"],
        }
    }

    def __contains__(self, task: object) -> bool:
        return super().__contains__(task) or task in self.features

    def __missing__(self, task: str) -> dict[str, Any]:
        return dict(self.features[task])


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
            Spread of the position embedding at initialisation. Latents differ only by where they look, so a short training
            needs positions that weigh as much as the patches.
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
            `max_depth` metres. Pixels whose label is not in `(0, max_depth]` are ignored.

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
    stem_layers: Rows = None
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
    token_granularities: Choices = None
    widths: Choices = None
    max_width: Count = None
    attention_type: Literal["block", "bidirectional"] = "block"
    adaptive_axes: list[str] | tuple[str, ...] | None = None
    distillation_temperature: float | int = 1.0
    router_ratio: Ratio = None
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
        if custom_pipelines := vars(self).get("custom_pipelines"):
            self.custom_pipelines = CustomPipelines(custom_pipelines)

    def save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs) -> None:
        replace_links(save_directory)
        super().save_pretrained(os.fspath(save_directory), *args, **kwargs)

    def validate_architecture(self) -> None:
        """Check every size; the error names the field, its value and what is allowed."""
        for name in SIZES:
            check_int(name, getattr(self, name), low=1)
        check_int("num_depth_bins", self.num_depth_bins, low=2)
        check_int("max_width", self.max_width, low=1, high=self.hidden_size)

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
        for names, allowed, holds in (
            (POSITIVE, "be positive", lambda value: value > 0),
            (PROBABILITIES, "be in [0, 1)", lambda value: 0 <= value < 1),
            (NOT_NEGATIVE, "not be negative", lambda value: value is None or value >= 0),
        ):
            for name in names:
                if not holds(getattr(self, name)):
                    raise ValueError(f"`{name}` must {allowed}, got {getattr(self, name)}.")
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

    def sub_config(self, tokens: int, width: int, depth: int) -> "AdaPerceiverConfig":
        """The config of the sub-network of the first `tokens` latents, `width` units and `depth` blocks."""
        granularities = self.token_granularities  # all cut the mask beyond the training length too, no other does
        if tokens < self.max_latent_tokens:
            granularities = [stop for _, stop in self.token_groups(tokens, "block")]
        changes = {
            "max_latent_tokens": min(tokens, self.max_latent_tokens),
            "token_granularities": granularities,
            "max_width": width,
            "widths": [trained for trained in self.widths if trained < width] + [width],
            "num_hidden_layers": depth,
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


def replace_links(folder: str | os.PathLike) -> None:
    """Make files of the links to source files in `folder`: transformers copies remote code there, into the package else."""
    for path in Path(folder).glob("*_adaperceiver.py"):
        if path.is_symlink():
            source = path.read_bytes()
            path.unlink()
            path.write_bytes(source)


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
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


__all__ = ["AXES", "AdaPerceiverConfig", "check_int", "replace_links"]
