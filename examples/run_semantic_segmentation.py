"""
Fine-tune an AdaPerceiver to segment images: every token count in one pass, the backbone frozen unless `--train_all`.

    accelerate launch examples/run_semantic_segmentation.py                           # procedural scenes, minutes on two cores
    accelerate launch examples/run_semantic_segmentation.py examples/recipes/ade20k.yaml --model ... --dataset ...

With --dataset and no recipe it runs recipes/own_segmentation.yaml. The recipe's values can be overridden on the command line;
`--help` lists all options with what they are by the recipe.
"""

from adaperceiver.training.arguments import OptimizationArguments, RunArguments, command_line, parse, recipe_for
from adaperceiver.training.dense_augmentation import DenseAugmentation
from adaperceiver.training.dense_data import DenseDataArguments
from adaperceiver.training.finetuning import FineTuningArguments, fine_tune_dense


GROUPS = [RunArguments, DenseDataArguments, DenseAugmentation, OptimizationArguments, FineTuningArguments]


def main(arguments: list[str]) -> None:
    recipe = recipe_for(arguments, "scenes_segmentation.yaml", "own_segmentation.yaml")
    for stage in parse(GROUPS, arguments, recipe):
        fine_tune_dense("image-segmentation", "examples/run_semantic_segmentation.py", *stage)


if __name__ == "__main__":
    command_line(main)
