"""
Fine-tune an AdaPerceiver to estimate depth: every token count in one pass, the backbone frozen unless `--train_all`.

    accelerate launch examples/run_depth_estimation.py                                # procedural scenes, minutes on two cores
    accelerate launch examples/run_depth_estimation.py examples/recipes/nyuv2.yaml --model ... --dataset ...

With --dataset and no recipe it runs recipes/own_depth.yaml. The recipe's values can be overridden on the command line;
`--help` lists all options with what they are by the recipe.
"""

from dataclasses import dataclass
from typing import Any, Literal

from transformers.hf_argparser import HfArg

from adaperceiver.training.arguments import OptimizationArguments, RunArguments, command_line, parse, recipe_for
from adaperceiver.training.dense_augmentation import DenseAugmentation
from adaperceiver.training.dense_data import DenseDataArguments
from adaperceiver.training.finetuning import FineTuningArguments, fine_tune_dense


@dataclass
class DepthArguments(FineTuningArguments):
    loss_warmup_steps: int = HfArg(
        default=100, help="Steps in which the variance is left out of the scale-invariant loss."
    )
    crop: Literal["eigen", "none"] = HfArg(default="eigen", help="The part of an image that is scored.")

    def loss_options(self, step: int) -> dict[str, Any]:
        return {"loss_warm_up": step < self.loss_warmup_steps}

    def metric_options(self) -> dict[str, Any]:
        return {"crop": self.crop}


GROUPS = [RunArguments, DenseDataArguments, DenseAugmentation, OptimizationArguments, DepthArguments]


def main(arguments: list[str]) -> None:
    for stage in parse(GROUPS, arguments, recipe_for(arguments, "scenes_depth.yaml", "own_depth.yaml")):
        fine_tune_dense("depth-estimation", "examples/run_depth_estimation.py", *stage)


if __name__ == "__main__":
    command_line(main)
