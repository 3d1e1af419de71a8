"""AdaPerceiver for Hugging Face: one vision transformer, any number of tokens, any width, any depth."""

# First, since it checks the version of transformers.
from .configuration import AdaPerceiverConfig


# isort: split
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForDepthEstimation,
    AutoModelForImageClassification,
    AutoModelForSemanticSegmentation,
)

from .adaptive_adaperceiver import *
from .image_processing_adaperceiver import *
from .modeling_adaperceiver import *
from .once_for_all_adaperceiver import *
from .pipeline_adaperceiver import *


__version__ = "0.1.0"

AutoConfig.register(AdaPerceiverConfig.model_type, AdaPerceiverConfig)
AutoModel.register(AdaPerceiverConfig, AdaPerceiverModel)
AutoModelForImageClassification.register(AdaPerceiverConfig, AdaPerceiverForImageClassification)
AutoModelForSemanticSegmentation.register(AdaPerceiverConfig, AdaPerceiverForSemanticSegmentation)
AutoModelForDepthEstimation.register(AdaPerceiverConfig, AdaPerceiverForDepthEstimation)
AutoBackbone.register(AdaPerceiverConfig, AdaPerceiverBackbone)
AutoImageProcessor.register(
    AdaPerceiverConfig,
    image_processor_classes={"torchvision": AdaPerceiverImageProcessor, "pil": AdaPerceiverImageProcessorPil},
)
