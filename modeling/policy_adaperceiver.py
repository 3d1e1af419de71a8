# Copyright 2026 The AdaPerceiver for Hugging Face authors.
# Licensed under the Apache License, Version 2.0.

"""
Policies: the right operating point for each image.

A policy is any function of the input tokens and the operating point that a call asked for; it returns the point to run at, with
one value per image where they differ. `policy=` takes the name of one that the model has ("fixed", "router"), a function, or
several that follow each other. Early exit is no policy of its own: `exit_threshold` goes with any of them.
"""

from typing import Protocol

import torch
from torch import nn
from transformers.activations import ACT2FN

from .adaptive_adaperceiver import OperatingPoint
from .configuration_adaperceiver import AdaPerceiverConfig


class Policy(Protocol):
    def __call__(self, input_tokens: torch.Tensor, point: OperatingPoint) -> OperatingPoint:
        """input_tokens: (batch, patches, hidden_size). A tuple in the point that comes back holds one value per image."""


class MixerBlock(nn.Module):
    """Two MLPs: one mixes what is at a channel of all tokens, one what is at all channels of a token."""

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        tokens, channels = config.grid_size**2, config.hidden_size
        token_units, channel_units = config.router_units
        self.token_norm = nn.LayerNorm(channels, eps=config.layer_norm_eps)
        self.token_mlp = nn.Sequential(
            nn.Linear(tokens, token_units), ACT2FN[config.hidden_act], nn.Linear(token_units, tokens)
        )
        self.channel_norm = nn.LayerNorm(channels, eps=config.layer_norm_eps)
        self.channel_mlp = nn.Sequential(
            nn.Linear(channels, channel_units), ACT2FN[config.hidden_act], nn.Linear(channel_units, channels)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, channels) -> the same"""
        tokens = tokens + self.token_mlp(self.token_norm(tokens).transpose(1, 2)).transpose(1, 2)
        return tokens + self.channel_mlp(self.channel_norm(tokens))


class AdaPerceiverRouter(nn.Module):
    """
    A learned policy: how many latents an image needs. Two mixer blocks on the input tokens, pooled, fused, and one logit for
    each granularity.
    """

    def __init__(self, config: AdaPerceiverConfig):
        super().__init__()
        self.config = config
        channels = config.hidden_size
        self.blocks = nn.Sequential(MixerBlock(config), MixerBlock(config))
        self.fuse = nn.Sequential(
            nn.LayerNorm(channels, eps=config.layer_norm_eps),
            nn.Linear(channels, channels),
            ACT2FN[config.hidden_act],
            nn.Linear(channels, channels),
            ACT2FN[config.hidden_act],
        )
        self.head = nn.Linear(channels, len(config.token_granularities), bias=False)

    def logits(self, input_tokens: torch.Tensor) -> torch.Tensor:
        """(batch, patches, hidden_size) -> (batch, granularities). Another grid is resampled to the length of the trained one."""
        length = self.config.grid_size**2
        if input_tokens.shape[1] != length:
            input_tokens = nn.functional.interpolate(input_tokens.transpose(1, 2), length, mode="linear").transpose(
                1, 2
            )
        return self.head(self.fuse(self.blocks(input_tokens).mean(dim=1)))

    @torch.no_grad()
    def forward(self, input_tokens: torch.Tensor, point: OperatingPoint) -> OperatingPoint:
        """The granularity with the largest logit among those up to the tokens of `point`; those if all are larger."""
        granularities = torch.tensor(self.config.token_granularities, device=input_tokens.device)
        bounds = torch.tensor(point.tokens, device=input_tokens.device).expand(input_tokens.shape[0])
        allowed = granularities <= bounds[:, None]  # (batch, granularities)
        choice = self.logits(input_tokens).masked_fill(~allowed, float("-inf")).argmax(dim=1)
        tokens = torch.where(allowed.any(dim=1), granularities[choice], bounds)
        return point._replace(tokens=tuple(tokens.tolist()))

    def flops(self) -> int:
        """Of one image."""
        tokens, channels = self.config.grid_size**2, self.config.hidden_size
        block = 4 * tokens * channels * sum(self.config.router_units)
        return 2 * block + 4 * channels**2 + 2 * channels * len(self.config.token_granularities)
