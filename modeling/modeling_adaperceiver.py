"""
AdaPerceiver: one vision transformer whose tokens, width and depth are chosen at every call.

Data flows one way: pixels -> input tokens -> read -> blocks -> write -> head. The layers are in `layers_adaperceiver.py`;
this file runs them at an operating point and puts heads on top.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    DepthEstimatorOutput,
    ImageClassifierOutput,
    SemanticSegmenterOutput,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_adaperceiver import AdaPerceiverConfig, AdaptiveConfig, OperatingPoint
from .cost_adaperceiver import CostMixin, dense_readout_flops, ffn_flops
from .hub_adaperceiver import HubMixin
from .layers_adaperceiver import (
    AdaPerceiverBlock,
    AdaPerceiverClassReadout,
    AdaPerceiverConvolution,
    AdaPerceiverDenseReadout,
    AdaPerceiverEmbeddings,
    AdaPerceiverFFN,
    AdaPerceiverLayerScale,
    AdaPerceiverRead,
    AdaPerceiverSelfAttention,
    WeightedLoss,
    rotary_embedding,
)
from .loss_adaperceiver import (
    depth_loss,
    feature_distillation_loss,
    logit_distillation_loss,
    segmentation_loss,
)
from .policy_adaperceiver import AdaPerceiverRouter, Policy
from .training_adaperceiver import OnceForAll


class AdaptiveKwargs(TransformersKwargs, total=False):
    """Keyword arguments of every model's call; see `AdaptiveConfig` for what the adaptive ones mean."""

    tokens: int | Sequence[int] | torch.Tensor | None
    width: int | Sequence[int] | torch.Tensor | None
    depth: int | Sequence[int] | torch.Tensor | None
    attention: str | None
    exit_threshold: float | Sequence[float] | torch.Tensor | None
    exit_after: int | None
    exit_every: int | None
    exit_temperatures: Sequence[float] | None
    policy: str | Policy | Sequence[str | Policy] | None
    max_gflops: float | None
    max_latency_ms: float | None
    adaptive_config: AdaptiveConfig | None
    interpolate_pos_encoding: bool | None


# What transformers may pass to a vision model; the other `TransformersKwargs` (positions, packing) have no meaning here.
CALL_KWARGS = {
    "interpolate_pos_encoding",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "use_cache",
}
ADAPTIVE_KWARGS = sorted(
    AdaptiveKwargs.__annotations__.keys() - TransformersKwargs.__annotations__.keys() - CALL_KWARGS
)


@dataclass
class AdaPerceiverModelOutput(BaseModelOutputWithPooling):
    r"""
    last_hidden_state (`torch.FloatTensor` of shape `(batch, tokens, hidden_size)`):
        The latents after the last block that ran; zeros follow those of images that ran with fewer tokens than others.
    pooler_output (`torch.FloatTensor` of shape `(batch, hidden_size)`, *optional*):
        The output token for classification, if the model writes one (`config.output_tokens`).
    output_tokens (`torch.FloatTensor` of shape `(batch, output tokens, hidden_size)`):
        What the latents wrote: one token per input token, or the single one for classification.
    input_tokens (`torch.FloatTensor` of shape `(batch, patches, hidden_size)`):
        The patch tokens, in row-major order, that the latents read from.
    exit_depth (`torch.LongTensor` of shape `(batch,)`, *optional*):
        The number of blocks that each image ran through, with early exit.
    tokens (`torch.LongTensor` of shape `(batch,)`, *optional*):
        The number of latents that each image ran with, if a policy chose it.
    """

    output_tokens: torch.FloatTensor | None = None
    input_tokens: torch.FloatTensor | None = None
    exit_depth: torch.LongTensor | None = None
    tokens: torch.LongTensor | None = None


@dataclass
class AdaPerceiverClassifierOutput(ImageClassifierOutput):
    r"""
    exit_depth (`torch.LongTensor` of shape `(batch,)`, *optional*):
        The number of blocks that each image ran through, with early exit.
    tokens (`torch.LongTensor` of shape `(batch,)`, *optional*):
        The number of latents that each image ran with, if a policy chose it.
    """

    exit_depth: torch.LongTensor | None = None
    tokens: torch.LongTensor | None = None


@dataclass
class AdaPerceiverDistillationOutput(AdaPerceiverClassifierOutput):
    r"""
    features (`torch.FloatTensor` of shape `(batch, patches, feature_size)`):
        Patch features in the teacher's space.
    """

    features: torch.FloatTensor | None = None


@dataclass
class AdaPerceiverSegmenterOutput(SemanticSegmenterOutput):
    r"""
    tokens (`torch.LongTensor` of shape `(batch,)`, *optional*):
        The number of latents that each image ran with, if a policy chose it.
    """

    tokens: torch.LongTensor | None = None


@dataclass
class AdaPerceiverDepthOutput(DepthEstimatorOutput):
    r"""
    tokens (`torch.LongTensor` of shape `(batch,)`, *optional*):
        The number of latents that each image ran with, if a policy chose it.
    """

    tokens: torch.LongTensor | None = None


class AdaPerceiverPreTrainedModel(HubMixin, CostMixin, PreTrainedModel):
    config: AdaPerceiverConfig
    base_model_prefix = "adaperceiver"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    # The losses are means, so that `Trainer` divides them by the number of accumulated batches.
    accepts_loss_kwargs = False
    _no_split_modules = [
        "AdaPerceiverEmbeddings",
        "AdaPerceiverRead",
        "AdaPerceiverBlock",
        "AdaPerceiverClassReadout",
        "AdaPerceiverDenseReadout",
        "AdaPerceiverRouter",
    ]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": AdaPerceiverBlock, "attentions": AdaPerceiverSelfAttention}

    def __init__(self, config: AdaPerceiverConfig, *args, **kwargs):
        config.validate_architecture()  # fields may have been set after its construction
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AdaPerceiverEmbeddings):
            init.normal_(module.position_embeddings, std=self.config.position_init_std)
        elif isinstance(module, AdaPerceiverConvolution):  # no norm follows that would set the scale
            init.kaiming_normal_(module.weight, nonlinearity="linear" if module.linear else "relu")
        elif isinstance(module, AdaPerceiverRead):
            init.normal_(module.latent_token, std=self.config.token_init_std)
        elif isinstance(module, AdaPerceiverClassReadout):
            init.normal_(module.output_token, std=self.config.token_init_std)
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

    def settle(
        self, pixel_values: torch.Tensor | None, kwargs: dict, operating_point: OperatingPoint | None = None
    ) -> tuple[OperatingPoint, dict]:
        """Part the keyword arguments of a call into where it runs, if that is open, and what transformers wants to know."""
        unknown = [name for name in kwargs if name not in CALL_KWARGS and name not in ADAPTIVE_KWARGS]
        if unknown:
            raise TypeError(
                f"Unknown argument{'s' * (len(unknown) > 1)} {', '.join(f'`{name}`' for name in unknown)}; the adaptive "
                f"ones are {', '.join(ADAPTIVE_KWARGS)}."
            )
        adaptive = {name: value for name, value in kwargs.items() if name in ADAPTIVE_KWARGS}
        others = {name: value for name, value in kwargs.items() if name not in ADAPTIVE_KWARGS}
        if operating_point is not None:
            if adaptive:
                raise TypeError(f"`operating_point` leaves nothing open, got {', '.join(adaptive)} beside it.")
            return operating_point, others
        if isinstance(pixel_values, torch.Tensor) and pixel_values.ndim == 4:  # else the embeddings say what is wrong
            batch_size, _, *image_size = pixel_values.shape
            adaptive |= {"batch_size": batch_size, "image_size": tuple(image_size)}
        return self.operating_point(**adaptive), others

    def once_for_all_step(
        self, step: OnceForAll | None, pixel_values: torch.Tensor, kwargs: dict, *targets: torch.Tensor | None
    ) -> OnceForAll | None:
        """What a call trains if it is a once-for-all one: the `step` it was given, or a drawn one; None if it is not."""
        named = [name for name in ADAPTIVE_KWARGS if kwargs.get(name) is not None]
        if step is None:
            axes = self.config.adaptive_axes
            if not axes or not self.training or named or all(target is None for target in targets):
                return None
            step = OnceForAll.draw(self.config, axes, pixel_values.shape[0])
        elif named:
            raise TypeError(f"`once_for_all` says where the model runs, got {', '.join(named)} beside it.")
        step.check(self.config, pixel_values.shape[0])
        return step

    def _one_point(
        self, pixel_values: torch.Tensor, given: dict | None = None, **kwargs: Unpack[AdaptiveKwargs]
    ) -> tuple[OperatingPoint, dict]:
        """`settle`, for methods that run all images alike; `given` is what the method itself decides."""
        for name in given or {}:
            if name in kwargs:
                raise TypeError(f"`{name}` is not an argument here.")
        point, kwargs = self.settle(pixel_values, {**kwargs, **(given or {})})
        if point.per_image() or point.exit_threshold is not None or point.policy:
            raise ValueError(
                "All images run at one operating point here: no values per image, no `exit_threshold`, no `policy`."
            )
        return point, kwargs

    def _shared_point(
        self, pixel_values: torch.Tensor, granularities: Sequence[int] | None, kwargs: dict
    ) -> tuple[OperatingPoint, list[int], dict]:
        """`_one_point` at the largest of ascending token counts that can be read out of one encoding, and these counts."""
        known = self.config.token_granularities
        granularities = known if granularities is None else list(granularities)
        last = granularities[-1] if granularities else 0
        if granularities != sorted(set(granularities)) or not set(granularities[:-1]) <= set(known) or last < 1:
            raise ValueError(f"`granularities` must be an ascending choice from {known}, got {granularities}.")
        if last > self.config.max_latent_tokens and len(granularities) > 1:  # RoPE depends on the count there
            raise ValueError(f"`granularities` must not exceed {self.config.max_latent_tokens}, got {granularities}.")
        point, kwargs = self._one_point(pixel_values, {"tokens": last}, **kwargs)
        if point.attention != "block" and len(granularities) > 1:
            raise ValueError(f'`attention` must be "block" for several token counts at once, got {point.attention!r}.')
        return point, granularities, kwargs

    @torch.no_grad()
    def extract(
        self, tokens: int | None = None, width: int | None = None, depth: int | None = None
    ) -> "AdaPerceiverPreTrainedModel":
        """
        The sub-network of an operating point as a model of its own: weights sliced, config adjusted, outputs equal to
        this model's at that point. Values that are not given are those of `adaptive_config`, or the full ones.
        """
        point = self.operating_point(tokens=tokens, width=width, depth=depth)
        config = self.config.sub_config(point)
        model = type(self)(config).to(dtype=self.dtype, device=self.device)
        ours = self.state_dict()
        for name, tensor in model.state_dict().items():  # hidden units and blocks nest: the first ones of each
            tensor.copy_(ours[name][tuple(slice(size) for size in tensor.shape)])
        # Beyond the training length RoPE depends on the number of tokens, so it stays an argument there.
        model.adaptive_config = AdaptiveConfig(
            tokens=point.tokens if point.tokens > config.max_latent_tokens else None,
            attention=self.adaptive_config.attention,
        )
        return model.train(self.training)


class AdaPerceiverModel(AdaPerceiverPreTrainedModel):
    """
    Pixels to latents and output tokens, without a head.

    `output_tokens` (`"class"`, `"dense"` or `"both"`) is what the model writes; it defaults to `config.output_tokens`.
    """

    def __init__(self, config: AdaPerceiverConfig, output_tokens: str | None = None):
        super().__init__(config)
        self.output_tokens = config.output_tokens if output_tokens is None else output_tokens
        self._adaptive_config = AdaptiveConfig()
        self._accuracy_table = None
        self._latency_profile = None
        self.embeddings = AdaPerceiverEmbeddings(config)
        self.router = None if config.router_ratio is None else AdaPerceiverRouter(config)
        self.read = AdaPerceiverRead(config)
        self.layers = nn.ModuleList([AdaPerceiverBlock(config, index) for index in range(config.num_hidden_layers)])
        self.class_readout = AdaPerceiverClassReadout(config) if self.output_tokens in ("class", "both") else None
        self.dense_readout = AdaPerceiverDenseReadout(config) if self.output_tokens in ("dense", "both") else None
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        operating_point: OperatingPoint | None = None,
        confidence: Callable[[torch.Tensor, float], torch.Tensor] | None = None,
        **kwargs: Unpack[AdaptiveKwargs],
    ) -> AdaPerceiverModelOutput:
        r"""
        pixel_values (`torch.Tensor` of shape `(batch, channels, height, width)`):
            Images; both sides must be multiples of `config.patch_size`.
        interpolate_pos_encoding (`bool`, *optional*):
            The position embedding is resampled whenever the grid of the images asks for it; `False` refuses to.
        operating_point (`OperatingPoint`, *optional*):
            Where to run, settled already (heads do so); else the keyword arguments and `adaptive_config` say.
        confidence (`Callable`, *optional*):
            For early exit: class output tokens `(batch, hidden_size)` and a temperature to confidences `(batch,)`. Classifiers
            pass theirs.
        """
        point, kwargs = self.settle(pixel_values, kwargs, operating_point)
        input_tokens = self.embeddings(pixel_values, interpolate_pos_encoding)  # (batch, patches, hidden_size)
        chosen = bool(point.policy)
        for policy in point.policy:
            point = (self.router if policy == "router" else policy)(input_tokens, point)
        self._check_point(point, input_tokens.shape[0], confidence)
        captured = [name for name in ("output_hidden_states", "output_attentions") if self._asks_for(name, kwargs)]
        # Widths that differ are masked where the batch must stay whole; otherwise every group of images that agree in
        # tokens, width and depth runs at its own cost.
        whole = point.exit_threshold is None and (self.training or captured)
        apart = point.per_image().keys() - {"exit_threshold"} - ({"width"} if whole else set())
        if captured and (apart or point.exit_threshold is not None):
            raise ValueError(
                f"`{captured[0]}` needs all images to run through the same blocks with the same tokens: leave out "
                f"{', '.join(f'`{name}`' for name in apart) or '`exit_threshold`'}, or ask for one image at a time."
            )
        run = self._run_apart if apart else self._run
        outputs = run(input_tokens, point, confidence, kwargs)
        if chosen:
            outputs.tokens = torch.tensor(point.tokens, device=input_tokens.device).expand(input_tokens.shape[0])
        return outputs

    def _asks_for(self, name: str, kwargs: dict) -> bool:
        value = kwargs.get(name)
        return bool(getattr(self.config, name) if value is None else value)

    def _check_point(self, point: OperatingPoint, images: int, confidence: Callable | None) -> None:
        for name, values in point.per_image().items():
            if len(values) != images:
                raise ValueError(
                    f"`{name}` must be one value, or one per image of the batch of {images}, got {len(values)} values."
                )
        if point.exit_threshold is not None and (confidence is None or self.class_readout is None):
            raise ValueError(
                f"`exit_threshold` needs a model with a classifier, got {point.exit_threshold} for {type(self).__name__}."
            )

    def _run(
        self, input_tokens: torch.Tensor, point: OperatingPoint, confidence: Callable | None, kwargs: dict
    ) -> AdaPerceiverModelOutput:
        """All images at the same operating point, or at widths to be masked."""
        rope = rotary_embedding(self.config, point.tokens, input_tokens.device)
        exit_depth = class_token = output_tokens = None
        if point.exit_threshold is not None:
            latents, output_tokens, exit_depth = self._encode_until_confident(
                input_tokens, rope, point, confidence, kwargs
            )
        else:
            latents = self.encode(input_tokens, rope, point, kwargs)
            if self.class_readout is not None:
                output_tokens = self.class_readout(latents, rope)  # (batch, 1, hidden_size)
        if output_tokens is not None:
            class_token = output_tokens[:, 0]
        if self.dense_readout is not None:
            output_tokens = self.dense_readout(latents, input_tokens, rope)  # (batch, patches, hidden_size)
        return AdaPerceiverModelOutput(
            last_hidden_state=latents,
            pooler_output=class_token,
            output_tokens=output_tokens,
            input_tokens=input_tokens,
            exit_depth=exit_depth,
        )

    def encode(self, input_tokens: torch.Tensor, rope: tuple, point: OperatingPoint, kwargs: dict) -> torch.Tensor:
        """Read, then blocks. (batch, patches, hidden_size) -> (batch, tokens, hidden_size)"""
        groups = self.config.token_groups(point.tokens, point.attention)
        latents = self.read(input_tokens, rope)
        for layer in self.layers[: point.depth]:
            latents = layer(latents, rope, groups, point.width, **kwargs)
        return latents

    def latents_by_depth(
        self, pixel_values: torch.Tensor, point: OperatingPoint, kwargs: dict
    ) -> Iterator[tuple[torch.Tensor, tuple, torch.Tensor]]:
        """Input tokens, RoPE and the latents after each block up to `point.depth`, when they are computed."""
        rope = rotary_embedding(self.config, point.tokens, pixel_values.device)
        groups = self.config.token_groups(point.tokens, point.attention)
        input_tokens = self.embeddings(pixel_values, kwargs.pop("interpolate_pos_encoding", None))
        latents = self.read(input_tokens, rope)
        for layer in self.layers[: point.depth]:
            latents = layer(latents, rope, groups, point.width, **kwargs)
            yield input_tokens, rope, latents

    def encode_once_for_all(
        self, pixel_values: torch.Tensor, step: OnceForAll, kwargs: dict
    ) -> tuple[torch.Tensor, list[torch.Tensor], tuple]:
        """One pass of the full model that keeps what it passes: input tokens, the latents after every block, and RoPE."""
        config = self.config
        point = OperatingPoint(config.max_latent_tokens, step.width, config.num_hidden_layers, config.attention_type)
        _, kwargs = self.settle(pixel_values, kwargs)
        refused = [name for name in ("output_hidden_states", "output_attentions") if self._asks_for(name, kwargs)]
        if refused:
            raise ValueError(f"`{refused[0]}` has no place in a once-for-all step, which trains many configurations.")
        input_tokens = self.embeddings(pixel_values, kwargs.pop("interpolate_pos_encoding", None))
        rope = rotary_embedding(config, point.tokens, pixel_values.device)
        groups, latents = config.token_groups(point.tokens, point.attention), [self.read(input_tokens, rope)]
        for layer in self.layers:
            latents.append(layer(latents[-1], rope, groups, point.width, **kwargs))
        return input_tokens, latents[1:], rope

    def _encode_until_confident(
        self, input_tokens: torch.Tensor, rope: tuple, point: OperatingPoint, confidence: Callable, kwargs: dict
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Early exit: every image runs until its own confidence reaches its own threshold, and the rest go on without it.
        Returns latents, class output tokens `(batch, 1, hidden_size)` and depths, each at the image's own exit.
        """
        latents = self.read(input_tokens, rope)
        images, device = latents.shape[0], latents.device
        groups, folded = self.config.token_groups(point.tokens, point.attention), self.class_readout.fold(rope)
        thresholds = torch.tensor(point.exit_threshold, device=device).expand(images)
        final_latents = torch.empty_like(latents)
        output_tokens = latents.new_empty(images, 1, latents.shape[2])
        exit_depth = torch.full((images,), point.depth, device=device)

        rows = torch.arange(images, device=device)  # the image in each row of the batch that runs
        gone = torch.zeros(images, dtype=torch.bool, device=device)  # rows that still run though their image has left
        for depth, layer in enumerate(self.layers[: point.depth], start=1):
            latents = layer(latents, rope, groups, point.width, **kwargs)
            if depth < point.depth and depth not in point.probe_depths():
                continue
            written = self.class_readout(latents, rope, folded)
            leaving = ~gone
            if depth < point.depth:
                temperature = 1.0 if point.exit_temperatures is None else point.exit_temperatures[depth - 1]
                leaving &= confidence(written[:, 0], temperature) >= thresholds[rows]
            leavers = leaving.nonzero()[:, 0]
            if len(leavers) == 0:
                continue
            final_latents.index_copy_(0, rows[leavers], latents.index_select(0, leavers))
            output_tokens.index_copy_(0, rows[leavers], written.index_select(0, leavers))
            exit_depth[rows[leavers]] = depth
            gone |= leaving
            left, blocks_to_go = int(gone.sum()), point.depth - depth
            if left == len(rows):
                break
            # Leaving rows out copies the others, which costs each about 2 % of a block: do so when it saves more.
            if left * blocks_to_go > 0.02 * (len(rows) - left):
                stayers = (~gone).nonzero()[:, 0]
                latents, rows, gone = latents.index_select(0, stayers), rows[stayers], gone[stayers]
        return final_latents, output_tokens, exit_depth

    def _run_apart(
        self, input_tokens: torch.Tensor, point: OperatingPoint, confidence: Callable | None, kwargs: dict
    ) -> AdaPerceiverModelOutput:
        """Images that differ in tokens, width or depth: those that agree run together, and all come back in order."""
        groups = {}
        for index in range(input_tokens.shape[0]):
            image_point = point.of_image(index)
            groups.setdefault((image_point.tokens, image_point.width, image_point.depth), []).append(index)

        parts = []
        for (tokens, width, depth), indices in groups.items():
            group_point = point._replace(tokens=tokens, width=width, depth=depth)
            if isinstance(point.exit_threshold, tuple):
                group_point = group_point._replace(exit_threshold=tuple(point.exit_threshold[i] for i in indices))
            part = self._run(input_tokens[indices], group_point, confidence, kwargs)
            if isinstance(point.tokens, tuple):
                missing = max(point.tokens) - tokens
                part.last_hidden_state = nn.functional.pad(part.last_hidden_state, (0, 0, 0, missing))
            parts.append(part)

        order = torch.tensor([index for indices in groups.values() for index in indices]).argsort()
        order = order.to(input_tokens.device)
        return AdaPerceiverModelOutput(**{name: torch.cat([part[name] for part in parts])[order] for name in parts[0]})


class AdaPerceiverForImageClassification(AdaPerceiverPreTrainedModel):
    """AdaPerceiver with a linear classifier on the output token."""

    output_tokens = "class"
    task = "image-classification"

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.loss_type = "ForImageClassification"  # transformers would infer it from the name of the class
        self.adaperceiver = AdaPerceiverModel(config, output_tokens=self.output_tokens)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        teacher_logits: torch.Tensor | None = None,
        once_for_all: OnceForAll | None = None,
        **kwargs: Unpack[AdaptiveKwargs],
    ) -> AdaPerceiverClassifierOutput:
        r"""
        The loss is the sum of the terms whose target is given. With `config.adaptive_axes`, in training, it covers all
        configurations, and the logits are those of the full model.

        labels (`torch.Tensor` of shape `(batch,)`, or `(batch, num_labels)` with several labels an image, *optional*):
            Targets of the loss, which is chosen by `config.problem_type` as everywhere in transformers.
        teacher_logits (`torch.Tensor` of shape `(batch, num_labels)`, *optional*):
            Targets of the logit distillation loss.
        once_for_all (`OnceForAll`, *optional*):
            What a once-for-all step trains, instead of a random draw by `config.adaptive_axes`.
        """
        step = self.once_for_all_step(once_for_all, pixel_values, kwargs, labels, teacher_logits)
        if step is not None:
            step, order, pixel_values, labels, teacher_logits = step.sorted_by_width(
                pixel_values, labels, teacher_logits
            )
            _, latents, rope = self.adaperceiver.encode_once_for_all(pixel_values, step, kwargs)
            loss, logits = self.joint_logit_loss(latents, rope, step, labels, teacher_logits, kwargs)
            return AdaPerceiverClassifierOutput(loss=loss, logits=in_order(logits, order))
        point, kwargs = self.settle(pixel_values, kwargs)
        outputs = self.adaperceiver(pixel_values, operating_point=point, confidence=self.confidence, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        return AdaPerceiverClassifierOutput(
            loss=self.logit_loss(logits, labels, teacher_logits, kwargs),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            exit_depth=outputs.exit_depth,
            tokens=outputs.tokens,
        )

    def logit_loss(
        self, logits: torch.Tensor, labels: torch.Tensor | None, teacher_logits: torch.Tensor | None, kwargs: dict
    ) -> torch.Tensor | None:
        losses = []
        if labels is not None:
            losses.append(self.loss_function(labels, logits, self.config, **kwargs))
        if teacher_logits is not None:
            check_shape("teacher_logits", teacher_logits, logits.shape)
            temperature = self.config.distillation_temperature
            losses.append(logit_distillation_loss(logits, teacher_logits, temperature))
        return sum(losses) if losses else None

    def joint_logit_loss(
        self,
        latents: Sequence[torch.Tensor],
        rope: tuple,
        step: OnceForAll,
        labels: torch.Tensor | None,
        teacher_logits: torch.Tensor | None,
        kwargs: dict,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`logit_loss` over all readouts of a once-for-all step, and the logits of the last one, the full model's."""
        weights = step.weights(self.config.num_hidden_layers)
        read_from, prefixes = [latents[depth - 1] for depth in weights], [list(of) for of in weights.values()]
        written = self.adaperceiver.class_readout(read_from, rope, prefixes=prefixes)
        logits = self.classifier(written).unbind(dim=1)
        weights = [weight for weight_of in weights.values() for weight in weight_of.values()]
        loss = sum(
            weight * self.logit_loss(logits_at, labels, teacher_logits, kwargs)
            for weight, logits_at in zip(weights, logits)
        )
        return loss, logits[-1]

    def confidence(self, class_tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """The largest class probability. (batch, hidden_size) -> (batch,)"""
        return (self.classifier(class_tokens).float() / temperature).softmax(dim=-1).amax(dim=-1)

    def head_flops(self, point: OperatingPoint, patches: int, images: int) -> dict[str, int]:
        classifier = 2 * images * self.config.hidden_size * self.config.num_labels
        return {"classifier": classifier * (1 + len(point.probe_depths()))}

    def logits_by_tokens(
        self, pixel_values: torch.Tensor, granularities: Sequence[int] | None = None, **kwargs: Unpack[AdaptiveKwargs]
    ) -> torch.Tensor:
        """
        Logits of several token counts from one encoding, `(granularities, batch, labels)`.

        `granularities` ascend and default to the trained ones; they must be among those of the block mask (or the last
        one any count up to `config.max_latent_tokens`), since only then do fewer tokens see what more would.
        """
        return self._logits_grid(pixel_values, granularities, lambda depth: [depth], kwargs)[0]

    def logits_grid(
        self, pixel_values: torch.Tensor, granularities: Sequence[int] | None = None, **kwargs: Unpack[AdaptiveKwargs]
    ) -> torch.Tensor:
        """
        Logits at every depth and several token counts from one encoding, `(depths, granularities, batch, labels)`.

        `granularities` as in `logits_by_tokens`; depths are 1 to `depth`, by default all.
        """
        return self._logits_grid(pixel_values, granularities, lambda depth: range(1, depth + 1), kwargs)

    @torch.no_grad()
    def _logits_grid(
        self,
        pixel_values: torch.Tensor,
        granularities: Sequence[int] | None,
        depths_up_to: Callable[[int], Sequence[int]],
        kwargs: dict,
    ) -> torch.Tensor:
        point, granularities, kwargs = self._shared_point(pixel_values, granularities, kwargs)
        model, depths, written, folded = self.adaperceiver, depths_up_to(point.depth), [], None
        walk = model.latents_by_depth(pixel_values, point, kwargs)
        for depth, (_, rope, latents) in enumerate(walk, start=1):
            if depth in depths:
                folded = model.class_readout.fold(rope) if folded is None else folded
                written.append(model.class_readout(latents, rope, folded, granularities))
        return self.classifier(torch.stack(written)).transpose(1, 2)

    @torch.no_grad()
    def anytime(
        self, pixel_values: torch.Tensor, by: str = "depth", **kwargs: Unpack[AdaptiveKwargs]
    ) -> Iterator[AdaPerceiverClassifierOutput]:
        """
        Yield better and better predictions, each when it is computed: stop when time is up and keep the last one.

        `by="depth"` yields after every block at the given tokens and width; `by="tokens"` after every granularity, at
        full depth, where each step runs only the latents that are new to it. The last prediction is that of a plain call.
        """
        if by not in ("depth", "tokens"):
            raise ValueError(f'`by` must be "depth" or "tokens", got {by!r}.')
        point, kwargs = self._one_point(pixel_values, **kwargs)
        model = self.adaperceiver
        rope = rotary_embedding(self.config, point.tokens, pixel_values.device)
        groups = self.config.token_groups(point.tokens, point.attention)
        latents = model.read(model.embeddings(pixel_values, kwargs.pop("interpolate_pos_encoding", None)), rope)
        layers, folded = model.layers[: point.depth], model.class_readout.fold(rope)
        if by == "depth":
            for depth, layer in enumerate(layers, start=1):
                latents = layer(latents, rope, groups, point.width, **kwargs)
                yield self._prediction(latents, rope, folded, depth)
            return
        pasts, done = [[] for _ in layers], []
        for start, stop in groups:
            states, turn = latents[:, start:stop], (rope[0][start:stop], rope[1][start:stop])
            for layer, past in zip(layers, pasts):
                states = layer(states, turn, None, point.width, past=past, **kwargs)
            done.append(states)
            yield self._prediction(torch.cat(done, dim=1), rope, folded, point.depth)

    def _prediction(
        self, latents: torch.Tensor, rope: tuple, folded: tuple, depth: int
    ) -> AdaPerceiverClassifierOutput:
        logits = self.classifier(self.adaperceiver.class_readout(latents, rope, folded)[:, 0])
        return AdaPerceiverClassifierOutput(
            logits=logits, exit_depth=latents.new_full((latents.shape[0],), depth, dtype=torch.long)
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


def feature_flops(config: AdaPerceiverConfig, positions: int) -> int:
    """FLOPs of the feature adapter."""
    return ffn_flops(config, positions, config.ffn_hidden_size(config.hidden_size), config.feature_size)


class AdaPerceiverForDistillation(AdaPerceiverForImageClassification):
    """AdaPerceiver with logits and patch features side by side, to be distilled from a teacher."""

    output_tokens = "both"

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.feature_adapter = AdaPerceiverFeatureAdapter(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        teacher_logits: torch.Tensor | None = None,
        teacher_features: torch.Tensor | None = None,
        once_for_all: OnceForAll | None = None,
        **kwargs: Unpack[AdaptiveKwargs],
    ) -> AdaPerceiverDistillationOutput:
        r"""
        The loss is the sum of the terms whose target is given, over all configurations in once-for-all training, where
        `features` are left out.

        labels (`torch.Tensor` of shape `(batch,)`, *optional*):
            Targets of the classification loss.
        teacher_logits (`torch.Tensor` of shape `(batch, num_labels)`, *optional*):
            Targets of the logit distillation loss.
        teacher_features (`torch.Tensor` of shape `(batch, patches, feature_size)`, *optional*):
            Targets of the feature distillation loss: the teacher's patch features, without its prefix tokens.
        once_for_all (`OnceForAll`, *optional*):
            What a once-for-all step trains, instead of a random draw by `config.adaptive_axes`.
        """
        targets = (labels, teacher_logits, teacher_features)
        step = self.once_for_all_step(once_for_all, pixel_values, kwargs, *targets)
        if step is not None:
            return self._forward_once_for_all(pixel_values, step, kwargs, *targets)
        point, kwargs = self.settle(pixel_values, kwargs)
        outputs = self.adaperceiver(pixel_values, operating_point=point, confidence=self.confidence, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        features = self.feature_adapter(outputs.output_tokens)
        losses = [self.logit_loss(logits, labels, teacher_logits, kwargs)]
        if teacher_features is not None:
            check_shape("teacher_features", teacher_features, features.shape)
            losses.append(feature_distillation_loss(features, teacher_features))
        losses = [loss for loss in losses if loss is not None]
        return AdaPerceiverDistillationOutput(
            loss=sum(losses) if losses else None,
            logits=logits,
            features=features,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            exit_depth=outputs.exit_depth,
            tokens=outputs.tokens,
        )

    def _forward_once_for_all(
        self, pixel_values: torch.Tensor, step: OnceForAll, kwargs: dict, *targets: torch.Tensor | None
    ) -> AdaPerceiverDistillationOutput:
        step, order, pixel_values, labels, teacher_logits, teacher_features = step.sorted_by_width(
            pixel_values, *targets
        )
        input_tokens, latents, rope = self.adaperceiver.encode_once_for_all(pixel_values, step, kwargs)
        losses, logits = [], None
        if labels is not None or teacher_logits is not None:
            loss, logits = self.joint_logit_loss(latents, rope, step, labels, teacher_logits, kwargs)
            losses, logits = [loss], in_order(logits, order)
        if teacher_features is not None:
            check_shape("teacher_features", teacher_features, (*input_tokens.shape[:2], self.config.feature_size))

            def loss_of(output_tokens: torch.Tensor) -> torch.Tensor:
                return feature_distillation_loss(self.feature_adapter(output_tokens), teacher_features)

            weights = step.weights(self.config.num_hidden_layers, normalized=False)
            weighted_loss = WeightedLoss(loss_of, weights, [*self.feature_adapter.parameters()])
            losses.append(self.adaperceiver.dense_readout(latents, input_tokens, rope, weighted_loss))
        return AdaPerceiverDistillationOutput(loss=sum(losses), logits=logits)

    def head_flops(self, point: OperatingPoint, patches: int, images: int) -> dict[str, int]:
        features = feature_flops(self.config, images * patches)
        return {**super().head_flops(point, patches, images), "feature_adapter": features}


def in_order(rows: torch.Tensor, order: Sequence[int] | slice) -> torch.Tensor:
    """Rows that came in `order`, back in their own."""
    return rows if isinstance(order, slice) else rows[torch.tensor(order, device=rows.device).argsort()]


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"`{name}` must be of shape {tuple(shape)}, got {tuple(tensor.shape)}.")


def to_map(tokens: torch.Tensor, pixel_values: torch.Tensor, patch_size: int) -> torch.Tensor:
    """(batch, patches, channels) in row-major order -> (batch, channels, height, width) in patches"""
    height, width = pixel_values.shape[-2] // patch_size, pixel_values.shape[-1] // patch_size
    return tokens.transpose(1, 2).unflatten(2, (height, width))


def resize(maps: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Bilinear, corners not aligned. (batch, channels, height, width) -> (batch, channels, *size)"""
    if maps.shape[-2:] == tuple(size):
        return maps
    return nn.functional.interpolate(maps, size=tuple(size), mode="bilinear", align_corners=False)


class AdaPerceiverDensePredictionModel(AdaPerceiverPreTrainedModel):
    """What segmentation and depth share: patch features as a map, and a head of convolutions on it."""

    head_class: type[nn.Module]

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.adaperceiver = AdaPerceiverModel(config, output_tokens="dense")
        self.feature_adapter = AdaPerceiverFeatureAdapter(config)
        self.head = self.head_class(config)
        self.post_init()

    def coarse_maps(self, output_tokens: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        """(batch, patches, hidden_size) -> what the head predicts, (batch, channels, height, width), at its own size"""
        return self.head(to_map(self.feature_adapter(output_tokens), pixel_values, self.config.patch_size))

    def joint_loss(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor,
        step: OnceForAll,
        loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        kwargs: dict,
    ) -> torch.Tensor:
        """`loss_of(coarse maps, labels)` over all readouts of a once-for-all step."""
        step, _, pixel_values, labels = step.sorted_by_width(pixel_values, labels)
        input_tokens, latents, rope = self.adaperceiver.encode_once_for_all(pixel_values, step, kwargs)

        def loss_of_tokens(output_tokens: torch.Tensor) -> torch.Tensor:
            return loss_of(self.coarse_maps(output_tokens, pixel_values), labels)

        parameters = [*self.feature_adapter.parameters(), *self.head.parameters()]
        weighted_loss = WeightedLoss(loss_of_tokens, step.weights(self.config.num_hidden_layers), parameters)
        return self.adaperceiver.dense_readout(latents, input_tokens, rope, weighted_loss)

    @torch.no_grad()
    def predictions_grid(
        self,
        pixel_values: torch.Tensor,
        granularities: Sequence[int] | None = None,
        depths: Sequence[int] | None = None,
        **kwargs: Unpack[AdaptiveKwargs],
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """
        Yield `(depth, tokens, prediction)` at several depths (by default all) and token counts, from one encoding. A
        prediction is what a call at that point gives: logits `(batch, num_labels, height, width)`, or depth `(batch,
        height, width)`.

        `granularities` ascend and default to the trained ones; all but the last must be among those, and a single one may
        be any count.
        """
        depths = range(1, self.config.num_hidden_layers + 1) if depths is None else depths
        if "depth" in kwargs:
            raise TypeError("`depth` is not an argument here: `depths` are.")
        point, granularities, kwargs = self._shared_point(
            pixel_values, granularities, {**kwargs, "depth": max(depths)}
        )
        readout, sink = self.adaperceiver.dense_readout, None
        walk = self.adaperceiver.latents_by_depth(pixel_values, point, kwargs)
        for depth, (input_tokens, rope, latents) in enumerate(walk, start=1):
            if depth not in depths:
                continue
            sink = readout.sink(input_tokens) if sink is None else sink
            for tokens, output_tokens in zip(granularities, readout.by_tokens(latents, sink, rope, granularities)):
                yield depth, tokens, self.finish(self.coarse_maps(output_tokens, pixel_values), pixel_values)

    def finish(self, coarse: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        """Coarse maps to a prediction at the size of the images."""
        return resize(coarse, pixel_values.shape[-2:])


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


class AdaPerceiverForSemanticSegmentation(AdaPerceiverDensePredictionModel):
    """AdaPerceiver with a linear segmentation head on the patch features."""

    task = "image-segmentation"
    head_class = AdaPerceiverSegmentationHead

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.num_labels = config.num_labels

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        once_for_all: OnceForAll | None = None,
        **kwargs: Unpack[AdaptiveKwargs],
    ) -> AdaPerceiverSegmenterOutput:
        r"""
        Logits come at the size of the images, `(batch, num_labels, height, width)`. Once-for-all training, by
        `config.adaptive_axes`, gives a loss alone.

        labels (`torch.Tensor` of shape `(batch, height, width)`, *optional*):
            Class of each pixel; `config.semantic_loss_ignore_index` (255) marks pixels that do not count.
        once_for_all (`OnceForAll`, *optional*):
            What a once-for-all step trains, instead of a random draw by `config.adaptive_axes`.
        """
        if labels is not None and self.num_labels == 1:
            raise ValueError("`num_labels` must be at least 2 for the segmentation loss, got 1.")
        step = self.once_for_all_step(once_for_all, pixel_values, kwargs, labels)
        if step is not None:
            return AdaPerceiverSegmenterOutput(
                loss=self.joint_loss(pixel_values, labels, step, self.coarse_loss, kwargs)
            )
        point, kwargs = self.settle(pixel_values, kwargs)
        outputs = self.adaperceiver(pixel_values, operating_point=point, **kwargs)
        coarse = self.coarse_maps(outputs.output_tokens, pixel_values)
        logits = self.finish(coarse, pixel_values)
        loss = None
        if labels is not None:
            loss = self.coarse_loss(logits if labels.shape[-2:] == logits.shape[-2:] else coarse, labels)
        return AdaPerceiverSegmenterOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            tokens=outputs.tokens,
        )

    def coarse_loss(self, coarse: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """coarse: (batch, num_labels, height, width); labels: (batch, height, width); both at any size"""
        check_shape("labels", labels, (coarse.shape[0], *labels.shape[-2:]))
        return segmentation_loss(resize(coarse, labels.shape[-2:]), labels, self.config.semantic_loss_ignore_index)

    def head_flops(self, point: OperatingPoint, patches: int, images: int) -> dict[str, int]:
        classifier = 2 * images * patches * self.config.feature_size * self.config.num_labels
        return {"feature_adapter": feature_flops(self.config, images * patches), "head": classifier}


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


class AdaPerceiverForDepthEstimation(AdaPerceiverDensePredictionModel):
    """AdaPerceiver with a binned depth head on the patch features."""

    task = "depth-estimation"
    head_class = AdaPerceiverDepthHead

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loss_warm_up: bool = False,
        once_for_all: OnceForAll | None = None,
        **kwargs: Unpack[AdaptiveKwargs],
    ) -> AdaPerceiverDepthOutput:
        r"""
        `predicted_depth` comes at the size of the images, `(batch, height, width)`, in metres. Once-for-all training, by
        `config.adaptive_axes`, gives a loss alone.

        labels (`torch.Tensor` of shape `(batch, height, width)`, *optional*):
            Depth of each pixel; values outside `(0, config.max_depth]` and NaN do not count.
        loss_warm_up (`bool`, defaults to `False`):
            Leave the variance out of the scale-invariant loss, as in the first steps of a training.
        once_for_all (`OnceForAll`, *optional*):
            What a once-for-all step trains, instead of a random draw by `config.adaptive_axes`.
        """
        step = self.once_for_all_step(once_for_all, pixel_values, kwargs, labels)
        if step is not None:
            loss_of = partial(self.coarse_loss, warm_up=loss_warm_up)
            return AdaPerceiverDepthOutput(loss=self.joint_loss(pixel_values, labels, step, loss_of, kwargs))
        point, kwargs = self.settle(pixel_values, kwargs)
        outputs = self.adaperceiver(pixel_values, operating_point=point, **kwargs)
        coarse = self.coarse_maps(outputs.output_tokens, pixel_values)
        predicted_depth = self.finish(coarse, pixel_values)
        loss = None
        if labels is not None:
            same_size = labels.shape[-2:] == predicted_depth.shape[-2:]
            loss = self.coarse_loss(predicted_depth[:, None] if same_size else coarse, labels, loss_warm_up)
        return AdaPerceiverDepthOutput(
            loss=loss,
            predicted_depth=predicted_depth,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            tokens=outputs.tokens,
        )

    def finish(self, coarse: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        return super().finish(coarse, pixel_values)[:, 0]

    def coarse_loss(self, coarse: torch.Tensor, labels: torch.Tensor, warm_up: bool = False) -> torch.Tensor:
        """coarse: (batch, 1, height, width); labels: (batch, height, width); both at any size"""
        check_shape("labels", labels, (coarse.shape[0], *labels.shape[-2:]))
        return depth_loss(resize(coarse, labels.shape[-2:])[:, 0], labels, self.config.max_depth, warm_up=warm_up)

    def head_flops(self, point: OperatingPoint, patches: int, images: int) -> dict[str, int]:
        positions, bins = 16 * images * patches, self.config.num_depth_bins
        head = 2 * positions * bins * (9 * self.config.feature_size + 1)  # 3x3 convolution, expectation over the bins
        return {"feature_adapter": feature_flops(self.config, images * patches), "head": head}


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
        point, kwargs = self.settle(pixel_values, {**kwargs, "depth": depth})
        stages = [self.stage_names.index(name) for name in self.out_features]
        last = max(stages)
        if point.per_image() or point.policy or point.depth < last:
            raise ValueError(
                f"The feature maps of {self.out_features} need one `depth` of at least {last}, and one value of tokens and "
                f"width for all images, got {point}."
            )
        outputs = self.adaperceiver(pixel_values, operating_point=point._replace(depth=last), **kwargs)
        input_tokens = outputs.input_tokens
        rope = rotary_embedding(self.config, outputs.last_hidden_state.shape[1], input_tokens.device)
        feature_maps = []
        for stage in stages:
            if stage == 0:
                output_tokens = input_tokens
            elif stage == last:
                output_tokens = outputs.output_tokens
            else:
                output_tokens = self.adaperceiver.dense_readout(outputs.hidden_states[stage], input_tokens, rope)
            feature_maps.append(to_map(output_tokens, pixel_values, self.config.patch_size))
        return BackboneOutput(
            feature_maps=tuple(feature_maps), hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def flops_at(self, point: OperatingPoint, image_size: tuple[int, int] | None, batch_size: int) -> dict[str, int]:
        last = max(self.stage_names.index(name) for name in self.out_features)
        return super().flops_at(point._replace(depth=last), image_size, batch_size)

    def head_flops(self, point: OperatingPoint, patches: int, images: int) -> dict[str, int]:
        between = [name for name in self.out_features if 0 < self.stage_names.index(name) < point.depth]
        return {"stages": len(between) * images * dense_readout_flops(self.config, point.tokens, patches)}


__all__ = [
    "AdaPerceiverBackbone",
    "AdaPerceiverForDepthEstimation",
    "AdaPerceiverForDistillation",
    "AdaPerceiverForImageClassification",
    "AdaPerceiverForSemanticSegmentation",
    "AdaPerceiverModel",
    "AdaPerceiverPreTrainedModel",
]
