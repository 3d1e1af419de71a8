"""
Train a router: how many latents does each image need? The backbone is frozen.

    accelerate launch examples/train_policy.py --model checkpoints/adaperceiver-tiny-cifar10 --dataset path/to/cifar10 \\
        --output_dir runs/router --batch_size 256 --micro_batch_size 256 --epochs 5 --cost_weight 0.1

The reward of a choice is minus the cross-entropy of the prediction with that many tokens, minus `--cost_weight` times its cost.
One pass gives the predictions of all granularities, so the cross-entropies of the images are computed once and kept.
The router learns from four fifths of the validation images, which the model has not learned by heart, and is scored on the rest;
`--no_unseen` takes the training images instead.
`--method reinforce` samples one choice per image, as in the paper, with the advantage kept for each image; `expected` takes the
exact expectation over all choices. `--help` lists all options.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoImageProcessor

from adaperceiver import AdaPerceiverForImageClassification, AdaptiveConfig
from adaperceiver.training.arguments import RECIPES, OptimizationArguments, RunArguments, command_line, parse
from adaperceiver.training.augmentation import seed_of
from adaperceiver.training.cards import model_card
from adaperceiver.training.checks import check_checkpoint
from adaperceiver.training.data import (
    DataArguments,
    MicroBatches,
    check_classes,
    classes_seen,
    hold_out,
    load_splits,
    validation_batches,
)
from adaperceiver.training.loop import print_plan, start, train
from adaperceiver.training.policies import (
    PolicyArguments,
    RouterTraining,
    costs_of,
    cross_entropies,
    entropy,
    evaluate,
    expected_loss,
    reinforce_loss,
)


GROUPS = [RunArguments, DataArguments, OptimizationArguments, PolicyArguments]


def run_stage(
    run: RunArguments, data: DataArguments, optimization: OptimizationArguments, args: PolicyArguments
) -> None:
    if data.streaming:
        raise ValueError("--streaming is not for policies: their rewards are kept for each image.")
    check_checkpoint("model", args.model, adaperceiver=True)
    session = start(run, data, optimization, args)
    if session is None:
        return
    accelerator = session.accelerator
    model = AdaPerceiverForImageClassification.from_pretrained(args.model, router_ratio=args.router_ratio)
    model = model.eval().requires_grad_(False).to(accelerator.device)
    model.adaptive_config = AdaptiveConfig()
    processor = AutoImageProcessor.from_pretrained(args.model)
    training_data, validation_data = load_splits(data)
    if args.unseen:
        training_data, validation_data = hold_out(validation_data, 0.2)
    check_classes(training_data, data, args.model, model.config.num_labels)

    def view(images: list[torch.Tensor], labels: list[int], seed: Any) -> dict[str, torch.Tensor]:
        """Images as the model sees them in use: a policy is about these, not about augmented ones."""
        return {"images": processor(images, return_tensors="pt").pixel_values, "labels": torch.as_tensor(labels)}

    batches = MicroBatches(training_data, optimization.micro_batch_size, view, run.seed)
    losses = cross_entropies(model, batches, Path(run.output_dir), accelerator)
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
        card = model_card(
            f"A router for {Path(args.model).name}", "examples/train_policy.py", session.arguments, metrics
        )
        model.save_pretrained(folder, is_main_process=accelerator.is_main_process, model_card=card)
        model.adaptive_config = AdaptiveConfig()

    router = RouterTraining(model.adaperceiver.router.requires_grad_(True), args.baseline_decay)
    classes, sides = list(model.config.id2label.values()), tuple(batches[0]["images"].shape[-2:])
    steps = print_plan(session, training_data, validation_data, classes, classes_seen(training_data), sides)
    train(session, router, batches, loss_of, measure, save, steps)
    accelerator.print(f"The model with its router is in {Path(run.output_dir) / 'final'}.")


def main(arguments: list[str]) -> None:
    for stage in parse(GROUPS, arguments, RECIPES / "cifar10_policy.yaml"):
        run_stage(*stage)


if __name__ == "__main__":
    command_line(main)
