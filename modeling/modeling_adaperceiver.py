# Copyright 2026 The AdaPerceiver for Hugging Face authors.
#
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with the License.
# You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0 Unless required by applicable law or agreed
# to in writing, software distributed under the License is distributed on an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF
# ANY KIND, either express or implied. See the License for the specific language governing permissions and limitations under the
# License.

"""
AdaPerceiver: one vision transformer whose tokens, width and depth are chosen at every call.

Data flows one way: pixels -> input tokens -> read -> blocks -> write -> head. The layers are in `layers_adaperceiver.py`;
this file runs them at an operating point and puts heads on top.
"""

# First, since it checks the version of transformers.
from .configuration_adaperceiver import AdaPerceiverConfig


# isort: split
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin
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
from transformers.utils.generic import can_return_tuple, maybe_autocast, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .adaptive_adaperceiver import (
    ALIKE,
    AdaptiveConfig,
    AdaptiveMixin,
    OperatingPoint,
    split_kwargs,
    with_adaptive_arguments,
    without_saved,
)
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
    Rope,
    convolution_flops,
    rotary_embedding,
)
from .loss_adaperceiver import depth_loss, feature_distillation_loss, logit_distillation_loss, segmentation_loss
from .once_for_all_adaperceiver import OnceForAll, dense_loss
from .policy_adaperceiver import AdaPerceiverRouter
from .tasks_adaperceiver import TASKS


Targets = dict[str, Any]  # of the losses of a call, by the names of its arguments: tensors, or None
# From latents, and how many of the first to read, to the predictions of each of these counts.
Predict = Callable[[torch.Tensor, Sequence[int]], Iterable[torch.Tensor]]


class AdaptiveOutput:
    """What every output says beside its tensors: where the model ran. (No field: transformers gathers and pads those.)"""

    operating_point: ClassVar[OperatingPoint | None] = None  # of the batch; None for a once-for-all step
    images: ClassVar[int] = 0

    def ran_at(self, operating_point: OperatingPoint | None, images: int) -> Any:
        vars(self).update(operating_point=operating_point, images=images)
        return self

    @property
    def operating_points(self) -> list[OperatingPoint]:
        """Where each image ran; the depth of an image that exited early is that of its exit."""
        if self.operating_point is None:
            return []
        points = [self.operating_point.of_image(index) for index in range(self.images)]
        exit_depth = getattr(self, "exit_depth", None)
        if exit_depth is None:
            return points
        return [point._replace(depth=depth) for point, depth in zip(points, exit_depth.tolist())]


@dataclass
class AdaPerceiverModelOutput(AdaptiveOutput, BaseModelOutputWithPooling):
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
    """

    output_tokens: torch.FloatTensor | None = None
    input_tokens: torch.FloatTensor | None = None
    exit_depth: torch.LongTensor | None = None


@dataclass
class AdaPerceiverClassifierOutput(AdaptiveOutput, ImageClassifierOutput):
    r"""
    exit_depth (`torch.LongTensor` of shape `(batch,)`, *optional*):
        The number of blocks that each image ran through, with early exit.
    """

    exit_depth: torch.LongTensor | None = None


@dataclass
class AdaPerceiverDistillationOutput(AdaPerceiverClassifierOutput):
    r"""
    features (`torch.FloatTensor` of shape `(batch, patches, feature_size)`):
        Patch features in the teacher's space.
    """

    features: torch.FloatTensor | None = None


@dataclass
class AdaPerceiverSegmenterOutput(AdaptiveOutput, SemanticSegmenterOutput):
    pass


@dataclass
class AdaPerceiverDepthOutput(AdaptiveOutput, DepthEstimatorOutput):
    pass


@dataclass
class AdaPerceiverBackboneOutput(AdaptiveOutput, BackboneOutput):
    pass


# trf-ignore: TRF013, since every model on top of it calls `post_init`
class AdaPerceiverPreTrainedModel(HubMixin, AdaptiveMixin, PreTrainedModel):
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

    # A head says what it gives, in `output_class`, and what it is trained for: `logit_loss` on the class token if one of
    # `class_targets` is given, the loss of `predict_dense` on the dense output tokens if one of `dense_targets` is.
    output_class: type
    class_targets: tuple[str, ...] = ()
    dense_targets: tuple[str, ...] = ()
    normalizes_dense_losses = True

    def run_head(
        self, pixel_values: Any, targets: Targets, step: OnceForAll | None, kwargs: dict, **loss_options
    ) -> Any:
        """A call of a model with a head: the loss by the `targets` that are given, predictions, and where it ran."""
        step = self.once_for_all_step(step, pixel_values, kwargs, targets)
        if step is not None:
            loss, predictions = self.once_for_all_loss(pixel_values, step, targets, kwargs, **loss_options)
            return self.output_class(loss=loss, **predictions)
        point, kwargs = self.resolve(pixel_values, kwargs)
        encoded = self.encode(pixel_values, point, kwargs)
        losses, predictions = [], {}
        if self.class_targets:
            predictions["logits"] = self.classifier(encoded.pooler_output)
            losses.append(self.logit_loss(predictions["logits"], targets, kwargs))
        if self.dense_targets:
            prediction, loss = self.predict_dense(encoded.output_tokens, pixel_values, targets, **loss_options)
            predictions |= prediction
            losses.append(loss)
        losses = [loss for loss in losses if loss is not None]
        return self.output_class(
            loss=sum(losses) if losses else None,
            **predictions,
            **{name: encoded[name] for name in ("hidden_states", "attentions", "exit_depth") if name in encoded},
        ).ran_at(encoded.operating_point, encoded.images)

    def encode(self, pixel_values: torch.Tensor, point: OperatingPoint, kwargs: dict) -> AdaPerceiverModelOutput:
        """What the head reads."""
        return self.base_model(pixel_values, operating_point=point, **kwargs)

    def predict_dense(
        self, output_tokens: torch.Tensor, pixel_values: torch.Tensor, targets: Targets, **loss_options
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """The prediction from the dense output tokens by its name in `output_class`, and its loss if there is a target."""
        raise NotImplementedError

    def once_for_all_step(
        self, step: OnceForAll | None, pixel_values: torch.Tensor, kwargs: dict, targets: Targets
    ) -> OnceForAll | None:
        """What a call trains if it is a once-for-all one: the `step` it was given, or a drawn one; None if it is not."""
        named = list(split_kwargs(kwargs)[0])
        if step is None:
            axes = self.config.adaptive_axes
            if not axes or not self.training or named or all(target is None for target in targets.values()):
                return None
            self.base_model.embeddings.check(pixel_values)
            step = OnceForAll.draw(self.config, axes, pixel_values.shape[0])
        elif named:
            raise TypeError(f"`once_for_all` says where the model runs, got {', '.join(named)} beside it.")
        step.check(self.config, pixel_values.shape[0])
        return step

    def once_for_all_loss(
        self, pixel_values: torch.Tensor, step: OnceForAll, targets: Targets, kwargs: dict, **loss_options
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The losses of all readouts of a once-for-all step, from one encoding, and the full model's logits if it has any."""
        step, order, pixel_values, *tensors = step.sorted_by_width(pixel_values, *targets.values())
        targets = {name: tensor for name, tensor in zip(targets, tensors) if tensor is not None}
        model, layers, losses, predictions = self.base_model, self.config.num_hidden_layers, [], {}
        input_tokens, latents, rope = model.encode_every_depth(pixel_values, step, kwargs)
        if targets.keys() & set(self.class_targets):
            sources = step.sources(latents, step.weights(layers), self.config.max_width)
            read_from, weights = zip(*sources)
            written = model.class_readout(read_from, rope, prefixes=[list(of) for of in weights])
            *partial, full = self.classifier(written).unbind(dim=1)  # (batch, labels) each
            *partial_weights, full_weight = (weight for of in weights for weight in of.values())
            losses.append(full_weight * self.logit_loss(full, targets, kwargs))
            if step.self_distillation:
                temperature, own_teacher = self.config.distillation_temperature, full.detach()
            for weight, one in zip(partial_weights, partial):
                loss = self.logit_loss(one, targets, kwargs)
                if step.self_distillation:
                    loss = loss + step.self_distillation * logit_distillation_loss(one, own_teacher, temperature)
                losses.append(weight * loss)
            in_order = order if isinstance(order, slice) else torch.tensor(order, device=full.device).argsort()
            predictions["logits"] = full[in_order]
        if targets.keys() & set(self.dense_targets):
            of_dense = step.weights(layers, self.normalizes_dense_losses)
            losses.append(
                dense_loss(
                    model.dense_readout,
                    lambda output_tokens: self.predict_dense(output_tokens, pixel_values, targets, **loss_options)[1],
                    [p for name, p in self.named_parameters() if not name.startswith(self.base_model_prefix)],
                    input_tokens,
                    step.sources(latents, of_dense, self.config.max_width),
                    rope,
                )
            )
        return sum(losses), predictions

    # Many predictions from one encoding. A head says how it reads them: `prefix_predictions`.

    def resolve_for_all(
        self, pixel_values: torch.Tensor, kwargs: dict, **decided: Any
    ) -> tuple[OperatingPoint, dict[str, Any]]:
        """`resolve`, for methods that run all images at one point; `decided` is what the method itself decides."""
        for name in decided:
            if name in kwargs:
                raise TypeError(f"`{name}` is not an argument here.")
        point, kwargs = self.resolve(pixel_values, without_saved({**kwargs, **decided}, **ALIKE))
        if point.per_image() or point.exit_threshold is not None or point.policy:
            raise ValueError(
                "All images run at one operating point here: no values per image, no `exit_threshold`, no `policy`."
            )
        return point, kwargs

    def predictions_grid(
        self,
        pixel_values: torch.Tensor,
        granularities: Sequence[int] | None = None,
        depths: Iterable[int] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """
        `(depth, tokens, prediction)` at several depths and token counts, one after another, from one encoding. A prediction
        is what a call at that point gives: logits, or depth in metres.

        `granularities` ascend and default to the trained ones; all but the last must be among those, since only then do
        fewer tokens see what more would. A single one may be any count. `depths` default to all up to `depth`.
        """
        decided = {} if depths is None else {"depth": max(depths)}
        point, granularities, kwargs = self.resolve_grid(pixel_values, granularities, kwargs, **decided)
        depths = range(1, point.depth + 1) if depths is None else sorted(set(depths))
        return self._predictions(pixel_values, point, granularities, depths, kwargs)

    def resolve_grid(
        self, pixel_values: torch.Tensor, granularities: Sequence[int] | None, kwargs: dict, **decided: Any
    ) -> tuple[OperatingPoint, list[int], dict[str, Any]]:
        """`resolve_for_all` at the largest of the token counts that are read out of one encoding, and these counts."""
        known = self.config.token_granularities
        granularities = known if granularities is None else list(granularities)
        last = granularities[-1] if granularities else 0
        if granularities != sorted(set(granularities)) or not set(granularities[:-1]) <= set(known) or last < 1:
            raise ValueError(f"`granularities` must be an ascending choice from {known}, got {granularities}.")
        if last > self.config.max_latent_tokens and len(granularities) > 1:  # RoPE depends on the count there
            raise ValueError(f"`granularities` must not exceed {self.config.max_latent_tokens}, got {granularities}.")
        point, kwargs = self.resolve_for_all(pixel_values, kwargs, tokens=last, **decided)
        if point.attention != "block" and len(granularities) > 1:
            raise ValueError(f'`attention` must be "block" for several token counts at once, got {point.attention!r}.')
        return point, granularities, kwargs

    @torch.no_grad()
    def _predictions(
        self,
        pixel_values: torch.Tensor,
        point: OperatingPoint,
        granularities: Sequence[int],
        depths: Iterable[int],
        kwargs: dict,
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        model, done = self.base_model, 0
        input_tokens, _ = model.embed(pixel_values, point, kwargs)
        latents, rope = model.read_latents(input_tokens, point)
        predict = self.prefix_predictions(pixel_values, input_tokens, rope)
        for depth in depths:
            latents, done = model.run_blocks(latents, rope, point, done, depth, **kwargs), depth
            for tokens, prediction in zip(granularities, predict(latents, granularities)):
                yield depth, tokens, prediction

    def prefix_predictions(self, pixel_values: torch.Tensor, input_tokens: torch.Tensor, rope: Rope) -> Predict:
        raise ValueError(f"{type(self).__name__} has no head to predict with.")

    @torch.no_grad()
    def extract(
        self, tokens: int | None = None, width: int | None = None, depth: int | None = None
    ) -> "AdaPerceiverPreTrainedModel":
        """
        The sub-network of an operating point as a model of its own: weights sliced, config adjusted, outputs equal to
        this model's at that point. Values that are not given are those of `adaptive_config`, or the full ones.
        """
        given: dict[str, Any] = {"tokens": tokens, "width": width, "depth": depth}
        if self.latency_profile is None and any(value is not None for value in given.values()):
            given = without_saved(given, max_latency_ms=False)
        point = self.operating_point(**given)
        for name in point.per_image().keys() & given.keys():
            raise ValueError(f"`{name}` must be one value for `extract`, got {given[name]!r}.")
        config = self.config.sub_config(point.tokens, point.width, point.depth)
        with self.device:
            model = type(self)(config).to(dtype=self.dtype)
        ours = self.state_dict()
        if missing := model.state_dict().keys() - ours.keys():
            raise ValueError(
                f"`extract` needs plain weights, got none for {min(missing)}: merge adapters first (`merge_and_unload`)."
            )
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

    `readouts` (`"class"`, `"dense"` or `"both"`) is what the latents are written to: one output token for classification,
    one for each input token, or both. It defaults to `config.output_tokens`.
    """

    def __init__(self, config: AdaPerceiverConfig, readouts: str | None = None):
        super().__init__(config)
        self.readouts = config.output_tokens if readouts is None else readouts
        self._adaptive_config = AdaptiveConfig()
        self._accuracy_table = None
        self._latency_profile = None
        self.embeddings = AdaPerceiverEmbeddings(config)
        self.router: Any = None if config.router_ratio is None else AdaPerceiverRouter(config)
        self.read = AdaPerceiverRead(config)
        self.layers = nn.ModuleList([AdaPerceiverBlock(config, index) for index in range(config.num_hidden_layers)])
        self.class_readout: Any = AdaPerceiverClassReadout(config) if self.readouts in ("class", "both") else None
        self.dense_readout: Any = AdaPerceiverDenseReadout(config) if self.readouts in ("dense", "both") else None
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    @with_adaptive_arguments
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        input_tokens: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> AdaPerceiverModelOutput:
        r"""
        pixel_values (`torch.Tensor` of shape `(batch, channels, height, width)`):
            Images; both sides must be multiples of `config.patch_size`.
        input_tokens (`torch.Tensor` of shape `(batch, patches, hidden_size)`, *optional*):
            Images that `embed` has embedded already, instead of `pixel_values`.
        """
        point, kwargs = self.resolve(pixel_values, kwargs)
        if input_tokens is None:
            input_tokens, point = self.embed(pixel_values, point, kwargs)
        if point.exit_threshold is not None:
            raise ValueError(f"`exit_threshold` needs a model with a classifier, got {point.exit_threshold}.")
        outputs = self.run_in_groups(self.encode, input_tokens, point, kwargs)
        return outputs.ran_at(point, input_tokens.shape[0])

    def embed(
        self, pixel_values: torch.Tensor, point: OperatingPoint, kwargs: dict
    ) -> tuple[torch.Tensor, OperatingPoint]:
        """Input tokens (batch, patches, hidden_size), and the point that the policies choose by them."""
        input_tokens = self.embeddings(pixel_values, kwargs.pop("interpolate_pos_encoding", None))
        for policy in point.policy:
            choose: Any = self.router if policy == "router" else policy
            point = choose(input_tokens, point)
        point.check(self.config, input_tokens.shape[0])
        return input_tokens, point

    def read_latents(self, input_tokens: torch.Tensor, point: OperatingPoint) -> tuple[torch.Tensor, Rope]:
        """(batch, patches, hidden_size) -> (batch, tokens, hidden_size), and the RoPE of their positions"""
        rope = rotary_embedding(self.config, point.tokens, input_tokens.device)
        return self.read(input_tokens, rope), rope

    def run_blocks(
        self,
        latents: torch.Tensor,
        rope: Rope,
        point: OperatingPoint,
        start: int,
        stop: int,
        past: Sequence[list[torch.Tensor]] | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """
        The segment of blocks `start + 1` to `stop`: (batch, tokens, hidden_size) -> the same.

        With `past`, one list for each block of the model, `latents` are some that follow earlier ones, whose keys and values
        it holds.
        """
        groups = self.config.token_groups(point.tokens, point.attention) if past is None else None
        for index in range(start, stop):
            more = {} if past is None else {"past": past[index]}
            latents = self.layers[index](latents, rope, groups, point.width, **more, **kwargs)
        return latents

    def write(
        self,
        latents: torch.Tensor,
        input_tokens: torch.Tensor,
        rope: Rope,
        class_tokens: torch.Tensor | None = None,
        exit_depth: torch.Tensor | None = None,
    ) -> AdaPerceiverModelOutput:
        """Latents to output tokens; `class_tokens` (batch, 1, hidden_size) if these are known already."""
        if class_tokens is None and self.class_readout is not None:
            class_tokens = self.class_readout(latents, rope)
        dense = None if self.dense_readout is None else self.dense_readout(latents, input_tokens, rope)
        return AdaPerceiverModelOutput(
            last_hidden_state=latents,
            pooler_output=None if class_tokens is None else class_tokens[:, 0],
            output_tokens=class_tokens if dense is None else dense,
            input_tokens=input_tokens,
            exit_depth=exit_depth,
        )

    def encode(self, input_tokens: torch.Tensor, point: OperatingPoint, kwargs: dict) -> AdaPerceiverModelOutput:
        """Read, all blocks, write, for images that run alike (but for widths, which are masked then)."""
        latents, rope = self.read_latents(input_tokens, point)
        latents = self.run_blocks(latents, rope, point, 0, point.depth, **kwargs)
        return self.write(latents, input_tokens, rope)

    def encode_every_depth(
        self, pixel_values: torch.Tensor, step: OnceForAll, kwargs: dict
    ) -> tuple[torch.Tensor, list[torch.Tensor], Rope]:
        """One pass of the full model for a once-for-all step: input tokens, the latents after every block, and RoPE."""
        config, (_, kwargs) = self.config, split_kwargs(kwargs)
        if captured := self.captured(kwargs):
            raise ValueError(f"`{captured[0]}` has no place in a once-for-all step, which trains many configurations.")
        point = OperatingPoint(config.max_latent_tokens, step.width, config.num_hidden_layers, config.attention_type)
        input_tokens, _ = self.embed(pixel_values, point, kwargs)
        latents, rope = self.read_latents(input_tokens, point)
        by_depth = []
        for depth in range(point.depth):
            latents = self.run_blocks(latents, rope, point, depth, depth + 1, **kwargs)
            by_depth.append(latents)
        return input_tokens, by_depth, rope

    def run_in_groups(
        self,
        run: Callable[[torch.Tensor, OperatingPoint, dict], AdaPerceiverModelOutput],
        input_tokens: torch.Tensor,
        point: OperatingPoint,
        kwargs: dict,
    ) -> AdaPerceiverModelOutput:
        """
        `run` for all images, or for each group of images that agree in tokens, width and depth, at its own cost; the results
        come back in order. Widths that differ are masked instead where the batch must stay whole.
        """
        captured = self.captured(kwargs)
        whole = point.exit_threshold is None and (self.training or captured)
        differ = point.per_image().keys() - {"exit_threshold"} - ({"width"} if whole else set())
        if captured and (differ or point.exit_threshold is not None):
            raise ValueError(
                f"`{captured[0]}` needs all images to run through the same blocks with the same tokens: leave out "
                f"{', '.join(f'`{name}`' for name in differ) or '`exit_threshold`'}, or ask for one image at a time."
            )
        if not differ:
            return run(input_tokens, point, kwargs)
        groups: dict[tuple[int, int, int], list[int]] = {}
        for index in range(input_tokens.shape[0]):
            image_point = point.of_image(index)
            groups.setdefault((image_point.tokens, image_point.width, image_point.depth), []).append(index)
        results = []
        for (tokens, width, depth), indices in groups.items():
            group_point = point._replace(tokens=tokens, width=width, depth=depth)
            if isinstance(point.exit_threshold, tuple):
                group_point = group_point._replace(exit_threshold=tuple(point.exit_threshold[i] for i in indices))
            outputs = run(input_tokens[indices], group_point, kwargs)
            if isinstance(point.tokens, tuple):
                missing = max(point.tokens) - tokens
                outputs.last_hidden_state = nn.functional.pad(outputs.last_hidden_state, (0, 0, 0, missing))
            results.append(outputs)
        order = torch.tensor([index for of in groups.values() for index in of], device=input_tokens.device).argsort()
        return AdaPerceiverModelOutput(
            **{name: torch.cat([outputs[name] for outputs in results])[order] for name in results[0]}
        )

    def captured(self, kwargs: dict) -> list[str]:
        """Those of what transformers' hooks record that a call, or else the config, asks for."""
        names = ("output_hidden_states", "output_attentions")
        return [name for name in names if (getattr(self.config, name) if kwargs.get(name) is None else kwargs[name])]

    def encoder_flops(self, point: OperatingPoint, patches: int, images: int) -> dict[str, int]:
        """FLOPs without a head, for `images` images of `patches` patches each, by component."""
        tokens, groups, block = point.tokens, self.config.token_groups(point.tokens, point.attention), self.layers[0]
        components = {
            "embeddings": self.embeddings.flops(images * patches),
            "read": self.read.flops(tokens, patches, images),
            "attention": point.depth * images * block.attention.flops(groups),
            "ffn": point.depth * block.ffn.flops(images * tokens, point.width),
        }
        if "router" in point.policy:
            components["router"] = images * self.router.flops()
        if self.class_readout is not None:
            last, probes = self.class_readout.flops(tokens, images, len(point.probe_depths()))
            components |= {"class_readout": last, "probes": probes}
        if self.dense_readout is not None:
            components["dense_readout"] = images * self.dense_readout.flops(tokens, patches)
        return components


def still_running(exited: torch.Tensor, num_exited: int) -> torch.Tensor:
    """The rows that have not `exited`, in order, where `num_exited` of them have: their number is known without waiting."""
    return exited.int().argsort(stable=True)[: len(exited) - num_exited]


def forward_of_head(forward: Callable) -> Callable:
    """What the `forward` of every head is decorated with."""
    return can_return_tuple(with_adaptive_arguments(forward))


class AdaPerceiverForImageClassification(AdaPerceiverPreTrainedModel):
    """AdaPerceiver with a linear classifier on the output token."""

    task = "image-classification"
    output_class = AdaPerceiverClassifierOutput
    readouts = "class"
    class_targets = ("labels", "teacher_logits")
    exits_early = True

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.loss_type = "ForImageClassification"  # transformers would infer it from the name of the class
        self.adaperceiver = AdaPerceiverModel(config, self.readouts)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.post_init()

    @forward_of_head
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        teacher_logits: torch.Tensor | None = None,
        once_for_all: OnceForAll | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> AdaPerceiverClassifierOutput:
        r"""
        The loss is the sum of the terms whose target is given. With `config.adaptive_axes`, in training, it covers all
        configurations, and the logits are those of the full model.

        labels (`torch.Tensor` of shape `(batch,)`, or `(batch, num_labels)` with several labels per image, *optional*):
            Targets of the loss, which is chosen by `config.problem_type` as everywhere in transformers.
        teacher_logits (`torch.Tensor` of shape `(batch, num_labels)`, *optional*):
            Targets of the logit distillation loss.
        """
        targets = {"labels": labels, "teacher_logits": teacher_logits}
        return self.run_head(pixel_values, targets, once_for_all, kwargs)

    def encode(self, pixel_values: torch.Tensor, point: OperatingPoint, kwargs: dict) -> AdaPerceiverModelOutput:
        """By segments of blocks between the probes, if images may exit early."""
        model = self.adaperceiver
        input_tokens, point = model.embed(pixel_values, point, kwargs)
        if point.exit_threshold is None:
            return model(operating_point=point, input_tokens=input_tokens, **kwargs)
        if self.config.num_labels < 2:  # a single label is always certain
            raise ValueError(f"`exit_threshold` needs at least 2 labels, got `num_labels` {self.config.num_labels}.")
        outputs = model.run_in_groups(self.encode_until_confident, input_tokens, point, kwargs)
        return outputs.ran_at(point, input_tokens.shape[0])

    def encode_until_confident(
        self, input_tokens: torch.Tensor, point: OperatingPoint, kwargs: dict
    ) -> AdaPerceiverModelOutput:
        """
        Early exit: every image runs until its own confidence reaches its own threshold, and the rest go on without it. What
        comes back of an image is that of its own exit.
        """
        model = self.adaperceiver
        latents, rope = model.read_latents(input_tokens, point)
        images, device, probe_depths = latents.shape[0], latents.device, point.probe_depths()
        folded = model.class_readout.fold(rope) if probe_depths else None
        thresholds = torch.tensor(point.exit_threshold, device=device).expand(images)
        final_latents = torch.empty_like(latents)
        class_tokens = latents.new_empty(images, 1, latents.shape[2])
        exit_depth = torch.full((images,), point.depth, device=device)

        rows = torch.arange(images, device=device)  # the image in each row of the batch that runs
        exited = torch.zeros(images, dtype=torch.bool, device=device)  # rows that still run though their image exited
        num_exited = done = 0  # how many of these there are; blocks that ran
        for depth in (*probe_depths, point.depth):
            latents, done = model.run_blocks(latents, rope, point, done, depth, **kwargs), depth
            written = model.class_readout(latents, rope, folded)
            if depth < point.depth:
                temperature = 1.0 if point.exit_temperatures is None else point.exit_temperatures[depth - 1]
                confident = self.confidence(written[:, 0], temperature) >= thresholds[rows]
                exiting = (confident & ~exited).nonzero()[:, 0]  # how many: all that the host waits for
            else:
                exiting = still_running(exited, num_exited)
            if len(exiting) == 0:
                continue
            final_latents.index_copy_(0, rows[exiting], latents.index_select(0, exiting))
            class_tokens.index_copy_(0, rows[exiting], written.index_select(0, exiting))
            exit_depth.index_fill_(0, rows[exiting], depth)
            exited.index_fill_(0, exiting, True)
            num_exited, blocks_to_go = num_exited + len(exiting), point.depth - depth
            if num_exited == len(rows):
                break
            # Leaving rows out copies the others, which costs each about 2 % of a block: do so when it saves more.
            if num_exited * blocks_to_go > 0.02 * (len(rows) - num_exited):
                staying = still_running(exited, num_exited)
                latents, rows, exited, num_exited = latents.index_select(0, staying), rows[staying], exited[staying], 0
        return model.write(final_latents, input_tokens, rope, class_tokens, exit_depth)

    def confidence(self, class_tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """The largest class probability. (batch, hidden_size) -> (batch,)"""
        return (self.classifier(class_tokens).float() / temperature).softmax(dim=-1).amax(dim=-1)

    def logit_loss(self, logits: torch.Tensor, targets: Targets, kwargs: dict) -> torch.Tensor | None:
        losses, teacher_logits = [], targets.get("teacher_logits")
        if targets.get("labels") is not None:
            losses.append(self.loss_function(targets["labels"], logits, self.config, **kwargs))
        if teacher_logits is not None:
            check_shape("teacher_logits", teacher_logits, logits.shape)
            losses.append(logit_distillation_loss(logits, teacher_logits, self.config.distillation_temperature))
        return sum(losses) if losses else None

    def prefix_predictions(self, pixel_values: torch.Tensor, input_tokens: torch.Tensor, rope: Rope) -> Predict:
        readout = self.adaperceiver.class_readout
        folded = readout.fold(rope)
        return lambda latents, prefixes: self.classifier(readout(latents, rope, folded, prefixes)).unbind(dim=1)

    def logits_by_tokens(
        self,
        pixel_values: torch.Tensor,
        granularities: Sequence[int] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Logits of several token counts from one encoding, `(granularities, batch, labels)`; see `predictions_grid`."""
        point, granularities, kwargs = self.resolve_grid(pixel_values, granularities, kwargs)
        grid = self._predictions(pixel_values, point, granularities, [point.depth], kwargs)
        return torch.stack([logits for _, _, logits in grid])

    def logits_grid(
        self,
        pixel_values: torch.Tensor,
        granularities: Sequence[int] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Logits at depths 1 to `depth` as well, `(depths, granularities, batch, labels)`; see `predictions_grid`."""
        point, granularities, kwargs = self.resolve_grid(pixel_values, granularities, kwargs)
        grid = self._predictions(pixel_values, point, granularities, range(1, point.depth + 1), kwargs)
        return torch.stack([logits for _, _, logits in grid]).unflatten(0, (-1, len(granularities)))

    @torch.no_grad()
    def anytime(
        self, pixel_values: torch.Tensor, by: str = "depth", **kwargs: Unpack[TransformersKwargs]
    ) -> Iterator[AdaPerceiverClassifierOutput]:
        """
        Yield better and better predictions, each when it is computed: stop when time is up and keep the last one.

        `by="depth"` yields after every block at the given tokens and width; `by="tokens"` after every granularity, at
        full depth, where each step runs only the latents that are new to it. The last prediction is that of a plain call.
        """
        if by not in ("depth", "tokens"):
            raise ValueError(f'`by` must be "depth" or "tokens", got {by!r}.')
        point, kwargs = self.resolve_for_all(pixel_values, kwargs)
        images = len(pixel_values)
        if by == "depth":
            steps = self._predictions(pixel_values, point, [point.tokens], range(1, point.depth + 1), kwargs)
            for depth, _, logits in steps:
                yield AdaPerceiverClassifierOutput(logits=logits).ran_at(point._replace(depth=depth), images)
            return
        model = self.adaperceiver
        input_tokens, _ = model.embed(pixel_values, point, kwargs)
        latents, rope = model.read_latents(input_tokens, point)
        predict = self.prefix_predictions(pixel_values, input_tokens, rope)
        past: list[list[torch.Tensor]] = [[] for _ in range(point.depth)]
        done: list[torch.Tensor] = []
        for start, stop in self.config.token_groups(point.tokens, point.attention):
            new, new_rope = latents[:, start:stop], rope[start:stop]
            done.append(model.run_blocks(new, new_rope, point, 0, point.depth, past, **kwargs))
            (logits,) = predict(torch.cat(done, dim=1), [stop])
            yield AdaPerceiverClassifierOutput(logits=logits).ran_at(point._replace(tokens=stop), images)

    def head_flops(self, point: OperatingPoint, patches: int, images: int) -> dict[str, int]:
        classifier = 2 * images * self.config.hidden_size * self.config.num_labels
        return {"classifier": classifier * (1 + len(point.probe_depths()))}


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


class AdaPerceiverForDistillation(AdaPerceiverForImageClassification):
    """AdaPerceiver with logits and patch features side by side, to be distilled from a teacher."""

    output_class = AdaPerceiverDistillationOutput
    readouts = "both"
    dense_targets = ("teacher_features",)
    normalizes_dense_losses = False

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.feature_adapter = AdaPerceiverFeatureAdapter(config)
        self.post_init()

    def predict_dense(
        self, output_tokens: torch.Tensor, pixel_values: torch.Tensor, targets: Targets, **loss_options
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        features, teacher_features = self.feature_adapter(output_tokens), targets.get("teacher_features")
        if teacher_features is None:
            return {"features": features}, None
        check_shape("teacher_features", teacher_features, features.shape)
        return {"features": features}, feature_distillation_loss(features, teacher_features)

    @forward_of_head
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        teacher_features: torch.Tensor | None = None,
        teacher_logits: torch.Tensor | None = None,
        once_for_all: OnceForAll | None = None,
        **kwargs: Unpack[TransformersKwargs],
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
        """
        targets = {"labels": labels, "teacher_logits": teacher_logits, "teacher_features": teacher_features}
        return self.run_head(pixel_values, targets, once_for_all, kwargs)

    def head_flops(self, point: OperatingPoint, patches: int, images: int) -> dict[str, int]:
        features = self.feature_adapter.ffn.flops(images * patches)
        return {**super().head_flops(point, patches, images), "feature_adapter": features}


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"`{name}` must be of shape {tuple(shape)}, got {tuple(tensor.shape)}.")


def to_map(tokens: torch.Tensor, pixel_values: torch.Tensor, patch_size: int) -> torch.Tensor:
    """(batch, patches, channels) in row-major order -> (batch, channels, height, width) in patches"""
    rows, columns = pixel_values.shape[-2] // patch_size, pixel_values.shape[-1] // patch_size
    return tokens.transpose(1, 2).unflatten(2, (rows, columns))


def resize(maps: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Bilinear, corners not aligned. (batch, channels, height, width) -> (batch, channels, *size)"""
    if maps.shape[-2:] == tuple(size):
        return maps
    return nn.functional.interpolate(maps, size=tuple(size), mode="bilinear", align_corners=False)


class AdaPerceiverDensePredictionModel(AdaPerceiverPreTrainedModel):
    """What segmentation and depth share: patch features as a map, and a head of convolutions on it."""

    head_class: type[nn.Module]
    dense_targets = ("labels",)

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.adaperceiver = AdaPerceiverModel(config, readouts="dense")
        self.feature_adapter = AdaPerceiverFeatureAdapter(config)
        self.head = self.head_class(config)
        self.post_init()

    def predict_dense(
        self, output_tokens: torch.Tensor, pixel_values: torch.Tensor, targets: Targets, **loss_options
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        labels, maps = targets["labels"], self.maps(output_tokens, pixel_values)
        resized = resize(maps, pixel_values.shape[-2:])
        loss = None
        if labels is not None:
            loss = self.map_loss(resized if labels.shape[-2:] == resized.shape[-2:] else maps, labels, **loss_options)
        return {TASKS[self.task].prediction: self.prediction(resized)}, loss

    def maps(self, output_tokens: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        """(batch, patches, hidden_size) -> what the head predicts, (batch, channels, height, width), at its own size"""
        return self.head(to_map(self.feature_adapter(output_tokens), pixel_values, self.config.patch_size))

    def prediction(self, maps: torch.Tensor) -> torch.Tensor:
        """What a call returns of maps at the size of the images."""
        return maps

    def prefix_predictions(self, pixel_values: torch.Tensor, input_tokens: torch.Tensor, rope: Rope) -> Predict:
        readout, size = self.adaperceiver.dense_readout, pixel_values.shape[-2:]
        readers = readout.readers(input_tokens)

        def predict(latents: torch.Tensor, prefixes: Sequence[int]) -> Iterator[torch.Tensor]:
            for output_tokens in readout.by_tokens(latents, readers, rope, prefixes):
                yield self.prediction(resize(self.maps(output_tokens, pixel_values), size))

        return predict

    def head_flops(self, point: OperatingPoint, patches: int, images: int) -> dict[str, int]:
        adapter = self.feature_adapter.ffn.flops(images * patches)
        return {"feature_adapter": adapter, "head": self.head.flops(images * patches)}


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

    def flops(self, positions: int) -> int:
        return convolution_flops(self.classifier, positions)


class AdaPerceiverForSemanticSegmentation(AdaPerceiverDensePredictionModel):
    """AdaPerceiver with a linear segmentation head on the patch features."""

    task = "image-segmentation"
    output_class = AdaPerceiverSegmenterOutput
    head_class = AdaPerceiverSegmentationHead

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.num_labels = config.num_labels

    @forward_of_head
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        once_for_all: OnceForAll | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> AdaPerceiverSegmenterOutput:
        r"""
        Logits come at the size of the images, `(batch, num_labels, height, width)`. Once-for-all training, by
        `config.adaptive_axes`, gives a loss alone.

        labels (`torch.Tensor` of shape `(batch, height, width)`, *optional*):
            Class of each pixel, at any size, to which the logits are resized for the loss; pixels of `config.semantic_loss_ignore_index` (255) are ignored.
        """
        if labels is not None and self.num_labels == 1:
            raise ValueError("`num_labels` must be at least 2 for the segmentation loss, got 1.")
        return self.run_head(pixel_values, {"labels": labels}, once_for_all, kwargs)

    def map_loss(self, maps: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """maps: (batch, num_labels, height, width); labels: (batch, height, width); both at any size"""
        check_shape("labels", labels, (maps.shape[0], *labels.shape[-2:]))
        return segmentation_loss(resize(maps, labels.shape[-2:]), labels, self.config.semantic_loss_ignore_index)


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
        weights = self.bins(self.dropout(features)).float().relu() + 0.1  # sums over many bins need float32
        weights = weights / weights.sum(dim=1, keepdim=True)
        low, high = self.config.min_depth, self.config.max_depth
        centres = torch.linspace(low, high, self.config.num_depth_bins, device=weights.device)
        with maybe_autocast(
            device_type=weights.device.type, enabled=False
        ):  # or this product is one of half precision
            depth = torch.einsum("bkhw,k->bhw", weights, centres)[:, None].to(features.dtype)
        return depth if self.training else depth.clamp(low, high)

    def flops(self, positions: int) -> int:
        """Of the convolution and of the expectation over the bins."""
        positions = 16 * positions
        return convolution_flops(self.bins, positions) + 2 * positions * self.config.num_depth_bins


class AdaPerceiverForDepthEstimation(AdaPerceiverDensePredictionModel):
    """AdaPerceiver with a binned depth head on the patch features."""

    task = "depth-estimation"
    output_class = AdaPerceiverDepthOutput
    head_class = AdaPerceiverDepthHead

    @forward_of_head
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loss_warm_up: bool = False,
        once_for_all: OnceForAll | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> AdaPerceiverDepthOutput:
        r"""
        `predicted_depth` comes at the size of the images, `(batch, height, width)`, in metres. Once-for-all training, by
        `config.adaptive_axes`, gives a loss alone.

        labels (`torch.Tensor` of shape `(batch, height, width)`, *optional*):
            Depth of each pixel, at any size, to which the prediction is resized for the loss; values outside `(0, config.max_depth]` and NaN are ignored.
        loss_warm_up (`bool`, defaults to `False`):
            Leave the variance out of the scale-invariant loss, as in the first steps of a training.
        """
        return self.run_head(pixel_values, {"labels": labels}, once_for_all, kwargs, warm_up=loss_warm_up)

    def prediction(self, maps: torch.Tensor) -> torch.Tensor:
        return maps[:, 0]

    def map_loss(self, maps: torch.Tensor, labels: torch.Tensor, warm_up: bool) -> torch.Tensor:
        """maps: (batch, 1, height, width); labels: (batch, height, width); both at any size"""
        check_shape("labels", labels, (maps.shape[0], *labels.shape[-2:]))
        return depth_loss(resize(maps, labels.shape[-2:])[:, 0], labels, self.config.max_depth, warm_up=warm_up)


class AdaPerceiverBackbone(BackboneMixin, AdaPerceiverPreTrainedModel):
    """
    AdaPerceiver as a backbone: the feature map of `stage{l}` is the output tokens written from the latents after block
    l; that of `stem` is the input tokens. Blocks beyond the last stage asked for do not run.
    """

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__(config)
        self.num_features = [config.hidden_size for _ in config.stage_names]
        self.adaperceiver = AdaPerceiverModel(config, readouts="dense")
        self.post_init()

    @property
    def stages(self) -> list[int]:
        """The depths of the feature maps; 0 stands for the stem."""
        return [self.stage_names.index(name) for name in self.out_features]

    @capture_outputs(tie_last_hidden_states=False)
    @with_adaptive_arguments
    def forward(self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> AdaPerceiverBackboneOutput:
        """Feature maps are of shape `(batch, hidden_size, height / patch_size, width / patch_size)`."""
        model, last = self.adaperceiver, max(self.stages)
        point, kwargs = self.resolve(pixel_values, without_saved(kwargs, policy="fixed"))
        input_tokens, point = model.embed(pixel_values, point, kwargs)
        if point.per_image() or point.exit_threshold is not None or point.depth < last:
            raise ValueError(
                f"The feature maps of {self.out_features} need one `depth` of at least {last}, and one value of tokens and "
                f"width for all images, got {point}."
            )
        output_tokens, done = {0: input_tokens}, 0
        if last > 0:
            latents, rope = model.read_latents(input_tokens, point)
        for stage in sorted(set(self.stages) - {0}):
            latents, done = model.run_blocks(latents, rope, point, done, stage, **kwargs), stage
            output_tokens[stage] = model.dense_readout(latents, input_tokens, rope)
        patch_size = self.config.patch_size
        feature_maps = tuple(to_map(output_tokens[stage], pixel_values, patch_size) for stage in self.stages)
        point = point._replace(depth=last)
        return AdaPerceiverBackboneOutput(feature_maps=feature_maps).ran_at(point, pixel_values.shape[0])

    def flops_at(self, point: OperatingPoint, image_size: tuple[int, int] | None, batch_size: int) -> dict[str, int]:
        components = super().flops_at(point._replace(depth=max(self.stages)), image_size, batch_size)
        if max(self.stages) > 0:
            return components
        embeddings = components["embeddings"]  # nothing reads the input tokens
        return {"embeddings": embeddings, "total": embeddings}

    def head_flops(self, point: OperatingPoint, patches: int, images: int) -> dict[str, int]:
        between = [stage for stage in self.stages if 0 < stage < point.depth]
        return {"stages": len(between) * images * self.adaperceiver.dense_readout.flops(point.tokens, patches)}


__all__ = [
    "AdaPerceiverBackbone",
    "AdaPerceiverForDepthEstimation",
    "AdaPerceiverForDistillation",
    "AdaPerceiverForImageClassification",
    "AdaPerceiverForSemanticSegmentation",
    "AdaPerceiverModel",
    "AdaPerceiverPreTrainedModel",
]
