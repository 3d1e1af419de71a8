# Copyright 2026 The AdaPerceiver for Hugging Face authors.
# Licensed under the Apache License, Version 2.0.

"""Pipelines whose calls choose tokens, width and depth: transformers' own, with the model's adaptive arguments."""

# First, since it checks the version of transformers.
from .configuration_adaperceiver import AdaPerceiverConfig  # noqa: F401


# isort: split
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple

import PIL.Image
from torch.utils.data import Dataset
from transformers import (
    DepthEstimationPipeline,
    ImageClassificationPipeline,
    ImageFeatureExtractionPipeline,
    ImageSegmentationPipeline,
)
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.utils import ModelOutput

from .adaptive_adaperceiver import ADAPTIVE_KWARGS, PER_IMAGE_FIELDS, AdaptiveConfig
from .image_processing_adaperceiver import open_image, to_rgb
from .modeling_adaperceiver import AdaPerceiverPreTrainedModel
from .tasks_adaperceiver import TASKS


class ChosenImage(NamedTuple):
    """An input with what a call chose for it alone."""

    image: Any
    choices: dict[str, Any]


class ChosenDataset(Dataset):
    """A dataset of inputs with one value per input for some arguments."""

    def __init__(self, images: Sequence | Dataset, values: dict[str, list]):
        self.images, self.values = images, values

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> ChosenImage:
        return ChosenImage(self.images[index], {name: values[index] for name, values in self.values.items()})


if TYPE_CHECKING:
    from transformers import Pipeline as Base
else:
    Base = object  # each task brings its own


class AdaPerceiverPipelineMixin(Base):
    """
    Adaptive arguments for a pipeline of transformers, `tokens=64` or `exit_threshold=0.9`.

    Those given at construction are defaults; those of a call win over them. In a call `tokens`, `width`, `depth` and
    `exit_threshold` may be lists, one value per input. With `report=True` each result is `{"result": ..., "report": ...}`:
    what the pipeline gives otherwise, and where the model ran for this image.
    """

    task_name: str  # in `TASKS`
    stock_arguments: tuple[str, ...]  # what the pipeline of transformers takes for itself

    def __init__(self, *args, adaptive_config: AdaptiveConfig | None = None, **kwargs):
        given = {name: kwargs.pop(name) for name in ADAPTIVE_KWARGS if name in kwargs}
        self.adaptive_defaults = AdaptiveConfig().update(adaptive_config, **given)
        super().__init__(*args, **kwargs)
        self.adaptive_defaults.validate(self.model.config)

    def check_model_type(self, supported_models: Any) -> None:
        """By name: no list of transformers has these classes, and remote code brings copies of them."""
        model, needed = without_adapters(self.model), TASKS[self.task_name].model_class
        if needed not in {base.__name__ for base in type(model).__mro__}:
            raise TypeError(f"`model` of {type(self).__name__} must be of {needed}, got {type(model).__name__}.")

    def _sanitize_parameters(self, report: bool | None = None, **kwargs) -> tuple[dict, dict, dict]:
        unknown = [name for name in kwargs if name not in ADAPTIVE_KWARGS and name not in self.stock_arguments]
        if unknown:
            raise TypeError(
                f"Unknown argument{'s' * (len(unknown) > 1)} {', '.join(f'`{name}`' for name in unknown)} of "
                f"{type(self).__name__}; it takes {', '.join(self.stock_arguments)}, report, and the adaptive ones: "
                f"{', '.join(ADAPTIVE_KWARGS)}."
            )
        stock = {name: value for name, value in kwargs.items() if name in self.stock_arguments}
        preprocess_params, forward_params, postprocess_params = super()._sanitize_parameters(**stock)
        forward_params |= {name: value for name, value in kwargs.items() if name in ADAPTIVE_KWARGS}
        if report is not None:
            postprocess_params["report"] = report
        return preprocess_params, forward_params, postprocess_params

    def __call__(self, inputs: Any = None, **kwargs) -> Any:
        inputs = kwargs.pop("images", inputs)  # the older name
        values = {name: kwargs[name] for name in PER_IMAGE_FIELDS if name in kwargs}
        values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}
        values = {name: list(value) for name, value in values.items() if isinstance(value, (list, tuple))}
        # A column of a dataset (or a tuple) is taken like a list, but opens one image at a time.
        is_list = isinstance(inputs, Sequence) and not isinstance(inputs, str)
        if is_list or values:
            inputs = self._choose_per_image(inputs, values)
        results = super().__call__(inputs, **{name: value for name, value in kwargs.items() if name not in values})
        return list(results) if is_list else results

    def _choose_per_image(self, inputs: Any, values: dict[str, list]) -> ChosenDataset:
        for name, choices in values.items():
            if not isinstance(inputs, (Sequence, Dataset)) or not isinstance(inputs, Sized):
                raise ValueError(
                    f"`{name}` with one value per image needs a list or a dataset with a length, got "
                    f"{type(inputs).__name__}: give one value for all, or make a list of the images."
                )
            if len(choices) != len(inputs):
                raise ValueError(
                    f"`{name}` must be one value, or one per image of the {len(inputs)}, got {len(choices)} values."
                )
        return ChosenDataset(inputs, values)

    def preprocess(self, image: Any, timeout: float | None = None, **kwargs) -> dict[str, Any]:
        image, choices = image if isinstance(image, ChosenImage) else (image, {})
        if isinstance(image, str):
            image = open_image(image, timeout)
        if isinstance(image, PIL.Image.Image):
            image = to_rgb(image)  # transformers' own way makes 16 bits white and shows what is transparent
        model_inputs = super().preprocess(image, **kwargs)
        model_inputs.update(choices)
        return model_inputs

    def _forward(
        self, model_inputs: dict[str, Any], adaptive_config: AdaptiveConfig | None = None, **adaptive
    ) -> ModelOutput:
        adaptive |= {name: model_inputs.pop(name) for name in PER_IMAGE_FIELDS if name in model_inputs}
        defaults = self.adaptive_defaults.update(adaptive_config)
        image_size = tuple(model_inputs["pixel_values"].shape[-2:])
        model_outputs: Any = super()._forward({**model_inputs, **adaptive, "adaptive_config": defaults})
        exits = "exit_depth" in model_outputs
        model_outputs["report"] = [
            {
                "tokens": ran.tokens,
                "width": ran.width,
                "depth": model_outputs.operating_point.of_image(index).depth,
                "exit_depth": ran.depth if exits else None,
                "gflops": self.model.flops_at(ran, image_size, batch_size=1)["total"] / 1e9,  # by itself
            }
            for index, ran in enumerate(model_outputs.operating_points)
        ]
        return model_outputs

    def postprocess(self, model_outputs: ModelOutput, report: bool = False, **kwargs) -> Any:
        result = super().postprocess(model_outputs, **kwargs)
        return {"result": result, "report": report_of(model_outputs)} if report else result


def without_adapters(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # under PEFT


def report_of(model_outputs: ModelOutput) -> dict[str, Any]:
    """The report of the image that `model_outputs` hold: in a list of one, unless they come from a larger batch."""
    report = model_outputs["report"]
    return report[0] if isinstance(report, list) else report


class AdaPerceiverImageClassificationPipeline(AdaPerceiverPipelineMixin, ImageClassificationPipeline):
    task_name = "image-classification"
    stock_arguments = ("top_k", "function_to_apply", "timeout")


class AdaPerceiverImageSegmentationPipeline(AdaPerceiverPipelineMixin, ImageSegmentationPipeline):
    task_name = "image-segmentation"
    stock_arguments = ("subtask", "threshold", "mask_threshold", "overlap_mask_area_threshold", "timeout")


class AdaPerceiverDepthEstimationPipeline(AdaPerceiverPipelineMixin, DepthEstimationPipeline):
    task_name = "depth-estimation"
    stock_arguments = ("timeout",)


class AdaPerceiverImageFeatureExtractionPipeline(AdaPerceiverPipelineMixin, ImageFeatureExtractionPipeline):
    task_name = "image-feature-extraction"
    stock_arguments = ("image_processor_kwargs", "return_tensors", "pool", "timeout")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.check_model_type(None)  # the others of transformers do so themselves

    def postprocess(self, model_outputs: ModelOutput, report: bool = False, **kwargs) -> Any:
        # Latents of images that ran with fewer tokens than others of their batch are followed by zeros.
        tokens = report_of(model_outputs)["tokens"]
        model_outputs["last_hidden_state"] = model_outputs["last_hidden_state"][:, :tokens]
        return super().postprocess(model_outputs, report, **kwargs)


def choosing_by_model(stock: type, ours: type) -> type:
    """A class that makes our pipelines of our models, and those of transformers of all others."""

    class ChoosingByModel(stock):
        def __new__(cls, model: Any = None, **kwargs) -> Any:
            chosen = ours if isinstance(without_adapters(model), AdaPerceiverPreTrainedModel) else stock
            return chosen(model=model, **kwargs)

    return ChoosingByModel


# A model in memory says nothing to `pipeline(task, model=model)`, and the pipelines of transformers swallow what they do not know.
for pipeline_class in AdaPerceiverPipelineMixin.__subclasses__():
    entry = PIPELINE_REGISTRY.supported_tasks[pipeline_class.task_name]
    choosing = choosing_by_model(entry["impl"], pipeline_class)
    PIPELINE_REGISTRY.supported_tasks[pipeline_class.task_name] = {**entry, "impl": choosing}

__all__ = [
    "AdaPerceiverDepthEstimationPipeline",
    "AdaPerceiverImageClassificationPipeline",
    "AdaPerceiverImageFeatureExtractionPipeline",
    "AdaPerceiverImageSegmentationPipeline",
]
