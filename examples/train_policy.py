"""
Train a router: how many latents does each image need? The backbone is frozen.

    accelerate launch examples/train_policy.py --model checkpoints/adaperceiver-tiny-cifar10 --dataset path/to/cifar10 \\
        --output_dir runs/router --batch_size 256 --micro_batch_size 256 --epochs 5 --cost_weight 0.1

The reward of a choice is minus the cross-entropy of the prediction with that many tokens, minus `--cost_weight` times its cost.
One pass gives the predictions of all granularities, so the cross-entropies of the training images are computed once and kept.
`--method reinforce` samples one choice an image, as in the paper, with the advantage kept for each image; `expected` takes the
exact expectation over all choices. `--help` lists all options.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoImageProcessor

from adaperceiver import AdaPerceiverForImageClassification, AdaptiveConfig
from adaperceiver.training.arguments import (
    OptimizationArguments,
    RunArguments,
    command_line,
    parse,
    shrink,
)
from adaperceiver.training.augmentation import seed_of
from adaperceiver.training.checkpointing import model_card, write_whole
from adaperceiver.training.data import (
    DataArguments,
    MicroBatches,
    check_classes,
    classes_seen,
    load_splits,
    validation_batches,
)
from adaperceiver.training.loop import print_plan, print_scores, start, train


RECIPE = Path(__file__).parent / "recipes" / "cifar10_policy.yaml"


@dataclass
class PolicyArguments:
    model: str = field(
        default=str(Path(__file__).parents[1] / "checkpoints" / "adaperceiver-tiny-cifar10"),
        metadata={"help": "A hub id or folder of an image classifier of AdaPerceiver."},
    )
    router_ratio: float = field(
        default=0.25, metadata={"help": "Hidden units of the router's MLPs per patch and per channel."}
    )
    method: str = field(default="expected", metadata={"choices": ["expected", "reinforce"]})
    cost: str = field(
        default="index",
        metadata={
            "help": "What a choice costs: its index among the granularities, or its share of the full FLOPs.",
            "choices": ["index", "flops"],
        },
    )
    cost_weight: float = field(default=0.1, metadata={"help": "Weight of the cost against the cross-entropy."})
    entropy_weight: float = field(default=0.01, metadata={"help": "Weight of the entropy of the choices."})
    baseline_decay: float = field(default=0.99, metadata={"help": "Of the mean reward that REINFORCE subtracts."})


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
    """One sampled choice an image, weighed by its own advantage: the gradient is that of `expected_loss` on average."""
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
    """(images, granularities): what each training image would lose with each token count; NaN where it cannot be read."""
    count, size = len(batches.dataset), batches.size
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

            def write(part: Path) -> None:
                part.mkdir(parents=True)
                np.save(part / "losses.npy", losses.cpu().numpy())

            write_whole(folder, write)
        accelerator.wait_for_everyone()
    return torch.from_numpy(np.load(folder / "losses.npy")).to(accelerator.device)


def costs_of(model: AdaPerceiverForImageClassification, kind: str) -> torch.Tensor:
    """(granularities,)"""
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
    reward, right, images, *chosen = accelerator.reduce(totals, "sum").tolist()
    gflops = [model.flops(tokens=tokens, policy="router")["total"] / 1e9 for tokens in granularities]
    return {
        "reward": reward / images,
        "top1": right / images,
        "gflops": sum(cost * count for cost, count in zip(gflops, chosen)) / images,
        "share_of_tokens": dict(zip(map(str, granularities), (count / images for count in chosen))),
    }


def run_stage(
    run: RunArguments, data: DataArguments, optimization: OptimizationArguments, args: PolicyArguments
) -> None:
    if run.smoke:
        shrink(run, data, optimization)
    if data.streaming:
        raise ValueError("--streaming is not for policies: their rewards are kept for each image.")
    started = start(run, data, optimization, args)
    if started is None:
        return
    accelerator, arguments = started
    model = AdaPerceiverForImageClassification.from_pretrained(args.model, router_ratio=args.router_ratio)
    model = model.eval().requires_grad_(False).to(accelerator.device)
    model.adaptive_config = AdaptiveConfig()
    processor = AutoImageProcessor.from_pretrained(args.model)
    training_data, validation_data = load_splits(data)
    check_classes(training_data, data, args.model, model.config.num_labels)

    def view(images: list[torch.Tensor], labels: list[int], seed: Any) -> dict[str, torch.Tensor]:
        """Images as the model sees them in use: a policy is about these, not about augmented ones."""
        return {"images": processor(images, return_tensors="pt").pixel_values, "labels": torch.as_tensor(labels)}

    batches = MicroBatches(training_data, optimization.micro_batch_size, view, run.seed)
    losses = cross_entropies(model, batches, Path(run.output_dir) / "cross-entropies", accelerator)
    costs = costs_of(model, args.cost)

    def loss_of(training: nn.Module, batch: dict[str, torch.Tensor], step: int) -> torch.Tensor:
        with torch.no_grad():
            input_tokens = model.adaperceiver.embeddings(batch["images"])
        logits = training(input_tokens)
        rewards = -losses[batch["indices"]] - args.cost_weight * costs
        if args.method == "expected":
            loss = expected_loss(logits, rewards)
        else:
            generator = torch.Generator().manual_seed(seed_of(run.seed, step, int(batch["micro"])))
            loss = reinforce_loss(logits, rewards, accelerator.unwrap_model(training).follow, generator)
        return loss - args.entropy_weight * entropy(logits)

    def measure(training: RouterTraining) -> dict[str, Any]:
        batches = validation_batches(validation_data, processor, optimization.micro_batch_size, accelerator)
        return evaluate(training.router, model, batches, costs, args.cost_weight, accelerator)

    def save(training: RouterTraining, folder: Path, metrics: dict[str, Any]) -> None:
        model.adaperceiver.router.load_state_dict(training.router.state_dict())
        model.adaptive_config = AdaptiveConfig(policy="router")
        card = model_card(f"A router for {Path(args.model).name}", "examples/train_policy.py", arguments, metrics)
        model.save_pretrained(folder, is_main_process=accelerator.is_main_process, model_card=card)
        model.adaptive_config = AdaptiveConfig()

    router = RouterTraining(model.adaperceiver.router.requires_grad_(True), args.baseline_decay)
    steps = optimization.total_steps(len(training_data))
    images, classes = (len(training_data), len(validation_data)), list(model.config.id2label.values())
    sides, seen = tuple(batches[0]["images"].shape[-2:]), classes_seen(training_data)
    print_plan(accelerator, Path(data.dataset).name, images, classes, seen, sides, optimization, steps)
    metrics = train(
        accelerator, router, batches, loss_of, measure, save, run, optimization, steps=steps, workers=data.workers
    )
    print_scores(metrics, accelerator)
    accelerator.print(f"The model with its router is in {Path(run.output_dir) / 'final'}.")


def main(arguments: list[str]) -> None:
    groups = [RunArguments, DataArguments, OptimizationArguments, PolicyArguments]
    for stage in parse(groups, arguments, RECIPE):
        run_stage(*stage)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    command_line(main)
