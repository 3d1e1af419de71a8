"""
Fine-tune an AdaPerceiver to segment images: every token count in one pass, the backbone frozen unless `--train_all`.

    accelerate launch examples/run_semantic_segmentation.py                           # procedural scenes, minutes on two cores
    accelerate launch examples/run_semantic_segmentation.py examples/recipes/ade20k.yaml --model ... --dataset ...

With --dataset and no recipe it runs recipes/own_segmentation.yaml. The recipe's values can be overridden on the command line;
`--help` lists all options with what they are by the recipe.
"""

from accelerate import PartialState

from adaperceiver import AdaPerceiverForSemanticSegmentation
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


SCRIPT = "examples/run_semantic_segmentation.py"
GROUPS = [RunArguments, DenseDataArguments, DenseAugmentation, OptimizationArguments, FineTuningArguments]


def main(arguments: list[str]) -> None:
    recipe = recipe_for(arguments, RECIPES / "scenes_segmentation.yaml", RECIPES / "own_segmentation.yaml")
    for stage in parse(GROUPS, arguments, recipe):
        fine_tune_dense("image-segmentation", AdaPerceiverForSemanticSegmentation, SCRIPT, *stage)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    command_line(main)
