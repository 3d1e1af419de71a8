# Copyright 2026 The AdaPerceiver for Hugging Face authors.
# Licensed under the Apache License, Version 2.0.

"""The tasks of the heads, by the names of their pipelines, and the classes that belong to them, by name."""

from typing import NamedTuple


class Task(NamedTuple):
    """The model, the Auto class and the pipeline of a task, and the field of the output that holds the prediction."""

    model_class: str
    auto_class: str
    pipeline_class: str
    prediction: str


TASKS = {
    "image-feature-extraction": Task(
        "AdaPerceiverModel", "AutoModel", "AdaPerceiverImageFeatureExtractionPipeline", "output_tokens"
    ),
    "image-classification": Task(
        "AdaPerceiverForImageClassification",
        "AutoModelForImageClassification",
        "AdaPerceiverImageClassificationPipeline",
        "logits",
    ),
    "image-segmentation": Task(
        "AdaPerceiverForSemanticSegmentation",
        "AutoModelForSemanticSegmentation",
        "AdaPerceiverImageSegmentationPipeline",
        "logits",
    ),
    "depth-estimation": Task(
        "AdaPerceiverForDepthEstimation",
        "AutoModelForDepthEstimation",
        "AdaPerceiverDepthEstimationPipeline",
        "predicted_depth",
    ),
}

# All classes that a folder can be loaded with, whichever head was saved: `AutoModel` takes the trunk of any of them.
AUTO_MAP = {
    "AutoConfig": "configuration_adaperceiver.AdaPerceiverConfig",
    "AutoBackbone": "modeling_adaperceiver.AdaPerceiverBackbone",
    **{task.auto_class: f"modeling_adaperceiver.{task.model_class}" for task in TASKS.values()},
}
