# Copyright 2026 The AdaPerceiver for Hugging Face authors.
# Licensed under the Apache License, Version 2.0.

"""
Once-for-all training: one encoder pass trains every number of tokens, every width and every depth.

`OnceForAll` says what one step trains; `dense_loss` and `sum_in_turn` add up the losses of many readouts and keep the
activations of one at a time. The models put them together when `config.adaptive_axes` asks for it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from .configuration_adaperceiver import AdaPerceiverConfig, check_int
from .layers_adaperceiver import AdaPerceiverDenseReadout, Rope, is_hooked


class OnceForAll(NamedTuple):
    """
    What one training step reads out: latents `:t` after the last block for every t of `tokens`, and latents
    `:depth_tokens[l - 1]` after every block l (none if it is empty). `width` is one for all images, or one for each.
    """

    tokens: tuple[int, ...]
    depth_tokens: tuple[int, ...]
    width: int | tuple[int, ...]
    # Share of the weights that the full readout (all tokens, last block) has; by default as in the paper.
    full_share: float | None = None
    # Factor on the gradient that the readouts of less than the full model send back into blocks and read.
    partial_gradient: float = 1.0
    # Weight of the full readout's logits as a second teacher of the other readouts.
    self_distillation: float = 0.0

    @classmethod
    def draw(
        cls,
        config: AdaPerceiverConfig,
        axes: Sequence[str],
        batch_size: int,
        generator: torch.Generator | None = None,
        **fields: Any,
    ) -> "OnceForAll":
        """
        At random, as in the paper: a width for each image, a token count for each depth. `fields` are the other ones; with
        `full_share`, that share of the images has the full width.
        """

        def pick(choices: Sequence[int], count: int) -> tuple[int, ...]:
            return tuple(choices[i] for i in torch.randint(len(choices), (count,), generator=generator).tolist())

        tokens = tuple(config.token_granularities) if "tokens" in axes else (config.max_latent_tokens,)
        depth_tokens = pick(tokens, config.num_hidden_layers) if "depth" in axes else ()
        width = pick(config.widths, batch_size) if "width" in axes else config.max_width
        if "width" in axes and fields.get("full_share") is not None:
            is_full = (torch.rand(batch_size, generator=generator) < fields["full_share"]).tolist()
            smaller = pick(config.widths[:-1] or config.widths, batch_size)
            width = tuple(config.max_width if full else one for full, one in zip(is_full, smaller))
        return cls(tokens, depth_tokens, width, **fields)

    def weights(self, layers: int, normalized: bool = True) -> dict[int, dict[int, float]]:
        """
        How much each readout counts in the joint loss, `{depth: {tokens: weight}}`, both ascending.

        Token readouts count alike, that of depth l of L counts l / L; `normalized` divides either sum by its weights.
        """
        weights = {depth: {tokens: 0.0} for depth, tokens in enumerate(self.depth_tokens, start=1)}
        for depth, tokens in enumerate(self.depth_tokens, start=1):
            weights[depth][tokens] += depth / layers / ((layers + 1) / 2 if normalized else 1)
        last = weights.setdefault(layers, {})
        for tokens in self.tokens:
            last[tokens] = last.get(tokens, 0.0) + 1 / (len(self.tokens) if normalized else 1)
        weights[layers] = dict(sorted(last.items()))
        if self.full_share is not None:
            total, full = sum(sum(of.values()) for of in weights.values()), max(last)
            scale = total * (1 - self.full_share) / (total - last[full]) if total > last[full] else 0.0
            weights = {depth: {t: w * scale for t, w in of.items()} for depth, of in weights.items()}
            weights[layers][full] = total * self.full_share if scale else total
        return weights

    def sources(
        self, latents: Sequence[torch.Tensor], weights: dict[int, dict[int, float]], max_width: int
    ) -> list[tuple[torch.Tensor, dict[int, float]]]:
        """The latents that each group of readouts reads, and their weights by tokens; the full readout comes last."""
        if self.partial_gradient == 1.0:
            return [(latents[depth - 1], of) for depth, of in weights.items()]
        layers = max(weights)
        full = max(weights[layers])
        sources = []
        for depth, of in weights.items():
            of = {tokens: weight for tokens, weight in of.items() if (depth, tokens) != (layers, full)}
            if of:
                sources.append((scale_gradient(latents[depth - 1], self.partial_gradient), of))
        widths = (self.width,) * len(latents[0]) if isinstance(self.width, int) else self.width
        # An image of a smaller width is partial as well.
        factors = [1.0 if width == max_width else self.partial_gradient for width in widths]
        factors = torch.tensor(factors, device=latents[0].device)[:, None, None]
        return [*sources, (scale_gradient(latents[layers - 1], factors), {full: weights[layers][full]})]

    def of_images(self, indices: Sequence[int]) -> "OnceForAll":
        """The same step for some of the images: one draw can serve a batch that several processes share."""
        if isinstance(self.width, int):
            return self
        return self._replace(width=tuple(self.width[index] for index in indices))

    def sorted_by_width(self, *tensors: torch.Tensor | None) -> tuple[Any, ...]:
        """
        The same step with the images in the order of their widths, which the FFNs can slice: the step, that order, and the
        tensors in it.
        """
        if isinstance(self.width, int):
            return self, slice(None), *tensors
        order = sorted(range(len(self.width)), key=self.width.__getitem__)
        return self.of_images(order), order, *(None if tensor is None else tensor[order] for tensor in tensors)

    def check(self, config: AdaPerceiverConfig, batch_size: int) -> None:
        layers, known = config.num_hidden_layers, config.token_granularities
        for name, values in (("tokens", self.tokens), ("depth_tokens", self.depth_tokens)):
            # Only at the borders of the block mask do fewer latents see what they would see alone.
            if any(tokens not in known and tokens != config.max_latent_tokens for tokens in values):
                raise ValueError(f"`{name}` must be among the granularities {known}, got {values}.")
        if len(self.depth_tokens) not in (0, layers):
            raise ValueError(
                f"`depth_tokens` must hold one count for each of {layers} blocks, got {self.depth_tokens}."
            )
        for width in self.width if isinstance(self.width, tuple) else (self.width,):
            check_int("width", width, 1, config.max_width)
        if isinstance(self.width, tuple) and len(self.width) != batch_size:
            raise ValueError(f"`width` must be one, or one for each of {batch_size} images, got {len(self.width)}.")


def scale_gradient(states: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """`states`, whose gradient is multiplied by `factor`."""
    return factor * states + (1 - factor) * states.detach()


def dense_loss(
    readout: AdaPerceiverDenseReadout,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    parameters: Sequence[nn.Parameter],
    input_tokens: torch.Tensor,
    sources: Sequence[tuple[torch.Tensor, dict[int, float]]],
    rope: Rope,
) -> torch.Tensor:
    """
    The sum of `weight * loss_of(output tokens)` over all readouts, in the memory of one. `sources` are those of `OnceForAll`,
    `parameters` those that `loss_of` uses. All readouts share queries, and those of one source keys and values.
    """
    if is_hooked(readout):  # FSDP wants to see the module called, with its parameters used in the backward pass

        def loss_at(latents: torch.Tensor, input_tokens: torch.Tensor, tokens: int, weight: float) -> torch.Tensor:
            return weight * loss_of(readout(latents[:, :tokens], input_tokens, rope[:tokens]))

        return sum(
            checkpoint(loss_at, latents, input_tokens, tokens, weight, use_reentrant=False)
            for latents, weights in sources
            for tokens, weight in weights.items()
        )

    def term(tokens: int, weight: float) -> Callable[..., torch.Tensor]:
        return lambda readers, query, key, value: weight * loss_of(readout.read(readers, query, key, value, tokens))

    readers, terms = readout.readers(input_tokens), []
    for latents, weights in sources:
        last = max(weights)
        key_value = readout.write.key_value(latents[:, :last], rope[:last])
        terms += [(term(tokens, weight), (*readers, *key_value)) for tokens, weight in weights.items()]
    return sum_in_turn(terms, [*readout.write.o_proj.parameters(), *parameters])


def sum_in_turn(
    terms: Sequence[tuple[Callable[..., torch.Tensor], Sequence[torch.Tensor]]], parameters: Sequence[nn.Parameter]
) -> torch.Tensor:
    """
    The sum of `function(*tensors)` over `terms`, in the memory of one: the gradients of a term are taken as soon as its
    value is known, and what it computed is freed before the next one starts. No work is done twice.

    `parameters` are those that the functions use beside their arguments. Where they are sharded, the terms are computed
    again in the backward pass instead.
    """
    if not torch.is_grad_enabled():
        return sum(function(*tensors) for function, tensors in terms)
    if any(is_traceable_wrapper_subclass(p) or hasattr(p, "ds_id") for p in parameters):  # DTensor, ZeRO
        return sum(checkpoint(function, *tensors, use_reentrant=False) for function, tensors in terms)
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    tensors = {id(tensor): tensor for _, arguments in terms for tensor in arguments}  # each once, in order
    places = {key: index for index, key in enumerate(tensors)}
    slots = [(function, [places[id(tensor)] for tensor in arguments]) for function, arguments in terms]
    return _SumInTurn.apply(slots, parameters, *tensors.values(), *parameters)


class _SumInTurn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, slots, parameters, *tensors):
        inputs = tensors[: len(tensors) - len(parameters)]
        gradients: list[torch.Tensor | None] = [None] * len(tensors)
        total = 0.0
        for function, indices in slots:
            leaves = [inputs[index].detach().requires_grad_(ctx.needs_input_grad[2 + index]) for index in indices]
            with torch.enable_grad():
                value = function(*leaves)
            total = total + value.detach()
            wanted = [(index, leaf) for index, leaf in zip(indices, leaves) if leaf.requires_grad]
            wanted += enumerate(parameters, start=len(inputs))
            if not value.requires_grad:
                continue
            found = torch.autograd.grad(value, [tensor for _, tensor in wanted], allow_unused=True)
            for (index, _), gradient in zip(wanted, found):
                if gradient is not None:
                    gradients[index] = gradient if gradients[index] is None else gradients[index] + gradient
            del value, leaves, found
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx, scale):
        return None, None, *(None if gradient is None else gradient * scale for gradient in ctx.saved_tensors)


__all__ = ["OnceForAll"]
