"""
Fine-tune an AdaPerceiver to segment images: every token count in one pass, the backbone frozen.

    accelerate launch examples/run_semantic_segmentation.py                           # procedural scenes, minutes on two cores
    accelerate launch examples/run_semantic_segmentation.py examples/recipes/ade20k.yaml --model ... --dataset ...

The recipe's values can be overridden on the command line; `--help` lists them all.
"""

import sys

from accelerate import PartialState
from dense_data import DenseAugmentation, DenseDataArguments
from finetuning import RECIPES, FineTuningArguments, fine_tune_dense
from training import OptimizationArguments, RunArguments, parse

from adaperceiver import AdaPerceiverForSemanticSegmentation


SCRIPT = "examples/run_semantic_segmentation.py"
GROUPS = [RunArguments, DenseDataArguments, DenseAugmentation, OptimizationArguments, FineTuningArguments]


def main(arguments: list[str]) -> None:
    for stage in parse(GROUPS, arguments, RECIPES / "scenes_segmentation.yaml"):
        fine_tune_dense("segmentation", AdaPerceiverForSemanticSegmentation, SCRIPT, *stage)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
