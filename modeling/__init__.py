"""AdaPerceiver for Hugging Face: one vision transformer, any number of tokens, any width, any depth."""

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForDepthEstimation,
    AutoModelForImageClassification,
    AutoModelForSemanticSegmentation,
)

from .configuration import AdaPerceiverConfig, AdaptiveConfig, OperatingPoint
from .cost_adaperceiver import AccuracyTable, LatencyProfile
from .modeling_adaperceiver import (
    AdaPerceiverBackbone,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverModel,
    AdaPerceiverPreTrainedModel,
)
from .training_adaperceiver import OnceForAll


__version__ = "0.1.0"

AutoConfig.register(AdaPerceiverConfig.model_type, AdaPerceiverConfig)
AutoModel.register(AdaPerceiverConfig, AdaPerceiverModel)
AutoModelForImageClassification.register(AdaPerceiverConfig, AdaPerceiverForImageClassification)
AutoModelForSemanticSegmentation.register(AdaPerceiverConfig, AdaPerceiverForSemanticSegmentation)
AutoModelForDepthEstimation.register(AdaPerceiverConfig, AdaPerceiverForDepthEstimation)
AutoBackbone.register(AdaPerceiverConfig, AdaPerceiverBackbone)

__all__ = [
    "AccuracyTable",
    "AdaPerceiverBackbone",
    "AdaPerceiverConfig",
    "AdaPerceiverForDepthEstimation",
    "AdaPerceiverForDistillation",
    "AdaPerceiverForImageClassification",
    "AdaPerceiverForSemanticSegmentation",
    "AdaPerceiverModel",
    "AdaPerceiverPreTrainedModel",
    "AdaptiveConfig",
    "LatencyProfile",
    "OnceForAll",
    "OperatingPoint",
]
