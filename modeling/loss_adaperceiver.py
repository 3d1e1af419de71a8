# Copyright 2026 The AdaPerceiver for Hugging Face authors.
# Licensed under the Apache License, Version 2.0.

"""The losses of the tasks, each a function of predictions and targets."""

import torch
from torch import nn


def segmentation_loss(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """
    Pixel-wise cross-entropy, mean over the pixels of the batch that are not ignored; 0 where there is none. logits: (batch,
    labels, height, width); labels: (batch, height, width).
    """
    loss = nn.functional.cross_entropy(logits.float(), labels.long(), ignore_index=ignore_index, reduction="sum")
    return loss / (labels != ignore_index).sum().clamp(min=1)


def depth_loss(
    depth: torch.Tensor, labels: torch.Tensor, max_depth: float, warm_up: bool = False, eps: float = 1e-3
) -> torch.Tensor:
    """
    2 x scale-invariant log loss + 0.5 x multi-scale gradient loss; both (batch, height, width), in metres.

    Only pixels with `0 < label <= max_depth` count. `warm_up` leaves the variance out of the scale-invariant loss.
    """
    valid = (labels > 0) & (labels <= max_depth)  # False for NaN as well
    labels = torch.where(valid, labels.float(), 1.0)
    log_difference = torch.where(valid, (depth.float() + eps).log() - (labels + eps).log(), 0.0)
    return 2.0 * scale_invariant_log_loss(log_difference, valid, warm_up) + 0.5 * multi_scale_gradient_loss(
        log_difference, valid
    )


def scale_invariant_log_loss(log_difference: torch.Tensor, valid: torch.Tensor, warm_up: bool = False) -> torch.Tensor:
    """`sqrt(var(g) + 0.15 * mean(g)^2)` over the valid pixels of the batch; g is 0 where a pixel is not valid."""
    count = valid.sum()
    mean = log_difference.sum() / count.clamp(min=1)
    square = 0.15 * mean**2
    if not warm_up:
        deviation = torch.where(valid, log_difference - mean, 0.0)
        square = square + deviation.square().sum() / (count - 1).clamp(min=1)
    return square.clamp(min=1e-12).sqrt()  # the root has no gradient at 0, which a perfect prediction would reach


def multi_scale_gradient_loss(log_difference: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Absolute differences of g two pixels apart, along height and along width, at strides 1, 2, 4 and 6."""
    loss = log_difference.new_zeros(())
    for stride in (1, 2, 4, 6):
        difference, mask = log_difference[..., ::stride, ::stride], valid[..., ::stride, ::stride]
        vertical = (difference[..., 2:, :] - difference[..., :-2, :]).abs() * (mask[..., 2:, :] & mask[..., :-2, :])
        horizontal = (difference[..., 2:] - difference[..., :-2]).abs() * (mask[..., 2:] & mask[..., :-2])
        loss = loss + (vertical.sum() + horizontal.sum()) / mask.sum().clamp(min=1)
    return loss


def logit_distillation_loss(
    logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """KL divergence from the teacher's softmax, mean over the batch, times temperature squared."""
    student = nn.functional.log_softmax(logits.float() / temperature, dim=-1)
    teacher = nn.functional.log_softmax(teacher_logits.float() / temperature, dim=-1)
    return nn.functional.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def feature_distillation_loss(features: torch.Tensor, teacher_features: torch.Tensor) -> torch.Tensor:
    """0.9 x (1 - cosine) + 0.1 x smooth L1, mean over all positions. Both (batch, positions, feature_size)."""
    features, teacher_features = features.float(), teacher_features.float()
    cosine = nn.functional.cosine_similarity(features, teacher_features, dim=-1)
    return 0.9 * (1 - cosine).mean() + 0.1 * nn.functional.smooth_l1_loss(features, teacher_features)
