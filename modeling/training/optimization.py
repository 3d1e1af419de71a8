"""Optimizers and schedules."""

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from .arguments import OptimizationArguments


def build_optimizer(model: torch.nn.Module, args: OptimizationArguments) -> torch.optim.Optimizer:
    """Biases, norms, layer scales and learned tokens do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.squeeze().ndim > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in trained if p.squeeze().ndim <= 1], "weight_decay": 0.0},
    ]
    common = {"lr": args.learning_rate, "betas": (args.beta1, args.beta2)}
    if args.optimizer == "adamw":
        return torch.optim.AdamW(groups, **common)
    if args.optimizer == "nadamw":
        return torch.optim.NAdam(groups, **common, decoupled_weight_decay=True)
    from .soap import DelayedSOAP

    return DelayedSOAP(
        groups,
        **common,
        precondition_frequency=args.precondition_frequency,
        max_precondition_dim=args.max_precondition_dim,
        start_precondition_step=args.start_precondition_step,
    )


def build_scheduler(optimizer: torch.optim.Optimizer, args: OptimizationArguments, steps: int) -> LambdaLR:
    """
    A linear warm-up from `warmup_learning_rate`, then the schedule down to `min_learning_rate` (or constant).

    By hand, because those of transformers each warm up in another way: the polynomial and constant ones from 0, and only
    `cosine_warmup_with_min_lr` from a given rate, of which it reaches the peak one step early.
    """
    highest, lowest, warmup = args.learning_rate, args.min_learning_rate, args.warmup_steps

    def rate(step: int) -> float:
        if step < warmup:
            return args.warmup_learning_rate + (highest - args.warmup_learning_rate) * step / warmup
        left = 1 - min((step - warmup) / max(steps - warmup, 1), 1)
        share = {
            "cosine": (1 - math.cos(math.pi * left)) / 2,
            "polynomial": left**args.polynomial_power,
            "constant": 1,
        }[args.schedule]
        return lowest + (highest - lowest) * share

    return LambdaLR(optimizer, lambda step: rate(step) / highest)
