"""
Fine-tune an AdaPerceiver to estimate depth: every token count in one pass, the backbone frozen unless `--train_all`.

    accelerate launch examples/run_depth_estimation.py                                # procedural scenes, minutes on two cores
    accelerate launch examples/run_depth_estimation.py examples/recipes/nyuv2.yaml --model ... --dataset ...

With --dataset and no recipe it runs recipes/own_depth.yaml. The recipe's values can be overridden on the command line;
`--help` lists all options with what they are by the recipe.
"""

from dataclasses import dataclass, field

from accelerate import PartialState

from adaperceiver import AdaPerceiverForDepthEstimation
from adaperceiver.training.arguments import (
    RECIPES,
    OptimizationArguments,
    RunArguments,
    command_line,
    parse,
    recipe_for,
)
from adaperceiver.training.dense_augmentation import DenseAugmentation
from adaperceiver.training.dense_data import DenseDataArguments
from adaperceiver.training.finetuning import FineTuningArguments, fine_tune_dense


@dataclass
class DepthArguments(FineTuningArguments):
    loss_warmup_steps: int = field(
        default=100, metadata={"help": "Steps in which the variance is left out of the scale-invariant loss."}
    )
    crop: str = field(
        default="eigen", metadata={"help": "The part of an image that is scored.", "choices": ["eigen", "none"]}
    )


SCRIPT = "examples/run_depth_estimation.py"
GROUPS = [RunArguments, DenseDataArguments, DenseAugmentation, OptimizationArguments, DepthArguments]


def main(arguments: list[str]) -> None:
    recipe = recipe_for(arguments, RECIPES / "scenes_depth.yaml", RECIPES / "own_depth.yaml")
    for stage in parse(GROUPS, arguments, recipe):
        tuning = stage[-1]

        def loss_options(step: int, warm_up: int = tuning.loss_warmup_steps) -> dict[str, bool]:
            return {"loss_warm_up": step < warm_up}

        fine_tune_dense(
            "depth-estimation",
            AdaPerceiverForDepthEstimation,
            SCRIPT,
            *stage,
            loss_options=loss_options,
            crop=tuning.crop,
        )
    PartialState().destroy_process_group()


if __name__ == "__main__":
    command_line(main)
