"""A router's training: what each choice of tokens costs and loses, and the losses that turn these into gradients."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg

from .. import AdaPerceiverForImageClassification
from .checkpointing import write_whole
from .checks import SHIPPED, above_zero, at_least, at_most_one
from .data import MicroBatches


@dataclass
class PolicyArguments:
    model: str = HfArg(default=SHIPPED, help="A hub id or folder of an image classifier of AdaPerceiver.")
    router_ratio: float = HfArg(default=0.25, help="Hidden units of the router's MLPs per patch and per channel.")
    unseen: bool = HfArg(
        default=True,
        help="Learn from four fifths of the validation images, which the model was not trained on, and score the rest.",
    )
    method: Literal["expected", "reinforce"] = "expected"
    cost: Literal["index", "flops"] = HfArg(
        default="index", help="What a choice costs: its index among the granularities, or its share of the full FLOPs."
    )
    cost_weight: float = HfArg(default=0.1, help="Weight of the cost against the cross-entropy.")
    entropy_weight: float = HfArg(default=0.01, help="Weight of the entropy of the choices.")
    baseline_decay: float = HfArg(default=0.99, help="Of the mean reward that REINFORCE subtracts.")

    def __post_init__(self):
        above_zero(self, "router_ratio")
        at_least(self, 0, "cost_weight", "entropy_weight")
        at_most_one(self, "baseline_decay")


class RouterTraining(nn.Module):
    """A router with what its training remembers; its call is what is differentiated."""

    def __init__(self, router: nn.Module, decay: float):
        super().__init__()
        self.router, self.decay = router, decay
        self.register_buffer("baseline", torch.tensor(float("nan")))  # mean reward so far

    def forward(self, input_tokens: torch.Tensor) -> torch.Tensor:
        """(batch, patches, hidden_size) -> (batch, granularities)"""
        return self.router.logits(input_tokens)

    @torch.no_grad()
    def follow(self, reward: torch.Tensor) -> torch.Tensor:
        """The baseline before these rewards, which it then takes in."""
        if self.baseline.isnan():
            self.baseline.fill_(reward)
        before = self.baseline.clone()
        self.baseline.lerp_(reward, 1 - self.decay)
        return before


def expected_loss(logits: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Minus the expected reward. Both (batch, granularities)."""
    return -(logits.softmax(dim=-1) * rewards).sum(dim=-1).mean()


def reinforce_loss(
    logits: torch.Tensor, rewards: torch.Tensor, follow: Callable, generator: torch.Generator
) -> torch.Tensor:
    """One sampled choice per image, weighted by its own advantage: the gradient is that of `expected_loss` on average."""
    choices = torch.multinomial(logits.detach().softmax(dim=-1).cpu(), 1, generator=generator).to(logits.device)
    reward = rewards.gather(1, choices)[:, 0]
    advantage = reward - follow(reward.mean())
    return -(advantage * logits.log_softmax(dim=-1).gather(1, choices)[:, 0]).mean()


def entropy(logits: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Categorical(logits=logits).entropy().mean()


@torch.no_grad()
def cross_entropies(
    model: AdaPerceiverForImageClassification, batches: MicroBatches, folder: Path, accelerator: Accelerator
) -> torch.Tensor:
    """
    (images, granularities): the loss of each training image with each token count; NaN where it cannot be read.

    They are kept in `folder`, in a subfolder for these weights and images.
    """
    count, size = len(batches.dataset), batches.size
    folder = folder / f"cross-entropies-{digest(model, batches.dataset)}"
    if not (folder / "losses.npy").exists():
        losses = torch.full((count, len(model.config.token_granularities)), float("nan"), device=accelerator.device)
        micros = range(accelerator.process_index, -(-count // size), accelerator.num_processes)
        in_order = MicroBatches(batches.dataset, size, batches.augment, seed=0, shuffle=False)
        for micro in tqdm(micros, "cross-entropies", disable=not accelerator.is_local_main_process):
            batch = in_order[micro]
            pixel_values, labels = (batch[name].to(accelerator.device) for name in ("images", "labels"))
            logits = model.logits_by_tokens(pixel_values).float()  # (granularities, batch, labels)
            found = [nn.functional.cross_entropy(one, labels, reduction="none") for one in logits]
            losses[batch["indices"].to(accelerator.device)] = torch.stack(found, dim=1)
        losses = accelerator.gather(losses[None]).nan_to_num(0).sum(dim=0) if accelerator.num_processes > 1 else losses
        if accelerator.is_main_process:

            def write(folder: Path) -> None:
                folder.mkdir(parents=True)
                np.save(folder / "losses.npy", losses.cpu().numpy())

            write_whole(folder, write)
        accelerator.wait_for_everyone()
    return torch.from_numpy(np.load(folder / "losses.npy")).to(accelerator.device)


def digest(model: nn.Module, dataset: Dataset) -> str:
    """A name for these weights and images. The router, which is new, does not matter."""
    found = hashlib.sha256(dataset._fingerprint.encode())
    for name, weight in model.state_dict().items():
        if ".router." not in name:
            found.update(weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def costs_of(model: AdaPerceiverForImageClassification, kind: str) -> torch.Tensor:
    """What each token count costs, (granularities,): its index, or its share of the full FLOPs."""
    if kind == "index":
        return torch.arange(len(model.config.token_granularities), dtype=torch.float32, device=model.device)
    flops = [model.flops(tokens=tokens)["total"] for tokens in model.config.token_granularities]
    return torch.tensor(flops, dtype=torch.float32, device=model.device) / flops[-1]


@torch.no_grad()
def evaluate(
    router: nn.Module,
    model: AdaPerceiverForImageClassification,
    batches: Any,
    costs: torch.Tensor,
    weight: float,
    accelerator: Accelerator,
) -> dict[str, Any]:
    """The mean reward of the router's choices, the accuracy they reach, what they cost, and how often each is made."""
    granularities = model.config.token_granularities
    totals = torch.zeros(3 + len(granularities), device=accelerator.device)
    for pixel_values, labels in batches:
        choice = router.logits(model.adaperceiver.embeddings(pixel_values)).argmax(dim=-1)
        logits = model.logits_by_tokens(pixel_values).float()[choice, torch.arange(len(choice), device=choice.device)]
        reward = -nn.functional.cross_entropy(logits, labels, reduction="none") - weight * costs[choice]
        sums = [reward.sum(), (logits.argmax(dim=-1) == labels).sum(), reward.new_tensor(len(labels))]
        totals += torch.cat([torch.stack(sums), torch.bincount(choice, minlength=len(granularities))])
    reward, correct, images, *chosen = accelerator.reduce(totals, "sum").tolist()
    gflops = [model.flops(tokens=tokens, policy="router")["total"] / 1e9 for tokens in granularities]
    return {
        "reward": reward / images,
        "top1": correct / images,
        "gflops": sum(cost * count for cost, count in zip(gflops, chosen)) / images,
        "share_of_tokens": dict(zip(map(str, granularities), (count / images for count in chosen))),
    }
