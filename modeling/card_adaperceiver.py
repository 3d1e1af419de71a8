# Copyright 2026 The AdaPerceiver for Hugging Face authors.
# Licensed under the Apache License, Version 2.0.

"""Model cards: what the hub reads (metadata, scores, the paper) and a snippet to start from. Nothing that is not known."""

import os
import re
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from .adaptive_adaperceiver import AccuracyTable
from .configuration_adaperceiver import AXES, AdaPerceiverConfig
from .tasks_adaperceiver import TASKS


PINNED = 'revision = "{}"'  # in the snippet; a push puts the commit in
SNIPPET = """
# {name}

AdaPerceiver is a vision transformer whose tokens, width and depth are chosen at every call:

```python
import torch
from PIL import Image
{imports}
name = "{name}"
{revision}model = {auto_class}.from_pretrained(name{remote})
processor = AutoImageProcessor.from_pretrained(name{remote})

inputs = processor(Image.open("image.jpg"), return_tensors="pt")
with torch.no_grad():
    full = model(**inputs)
    small = model(**inputs, tokens={tokens}, width={width}, depth={depth})  # the same weights, less work
print(small.{output}.shape)
```

`tokens` goes up to {max_tokens} (trained: {granularities}), `width` up to {max_width} (trained: {widths}), `depth` up to {max_depth}.
It needs transformers >= 5.22 and torch >= 2.7.
"""
PAPER = "arxiv.org/abs/2511.18105"
CITATION = f"""
## Citation

The architecture is that of [AdaPerceiver: Transformers with Adaptive Width, Depth, and Tokens](https://{PAPER}):

```bibtex
@article{{jajal2025adaperceiver,
  title   = {{AdaPerceiver: Transformers with Adaptive Width, Depth, and Tokens}},
  author  = {{Jajal, Purvish and Eliopoulos, Nick John and Chou, Benjamin Shiue-Hal and Thiruvathukal, George K. and
             Lu, Yung-Hsiang and Davis, James C.}},
  journal = {{arXiv preprint arXiv:2511.18105}},
  year    = {{2025}},
}}
```
"""
METRICS = {  # of a task's accuracy table: the hub's name, and one to read
    "image-classification": ("accuracy", "top-1 accuracy"),
    "image-segmentation": ("mean_iou", "mean IoU"),
    "depth-estimation": ("rmse", "RMSE in metres"),
}


def build_model_card(model: Any, name: str, save_code: bool, text: str | None = None) -> ModelCard:
    """A model card around `text`, or with a snippet that shows how to use the model."""
    config, auto_class = model.config, TASKS[model.task].auto_class
    if text is None:
        imports = f"from transformers import AutoImageProcessor, {auto_class}\n"
        revision = f"{PINNED.format('main')}  # better a commit: loading runs the code of that commit\n"
        text = SNIPPET.format(
            name=name,
            imports=imports if save_code else f"import adaperceiver\n{imports}",
            revision=revision if save_code else "",
            remote=", revision=revision, trust_remote_code=True" if save_code else "",
            auto_class=auto_class,
            output=TASKS[model.task].prediction,
            tokens=config.token_granularities[0],
            width=config.widths[0],
            depth=(config.num_hidden_layers + 1) // 2,
            max_tokens=config.max_latent_tokens,
            max_width=config.max_width,
            max_depth=config.num_hidden_layers,
            granularities=", ".join(map(str, config.token_granularities)),
            widths=", ".join(map(str, config.widths)),
        )
        text += CITATION
    base = hub_id(model.name_or_path)
    known: dict[str, Any] = {"base_model": None if base == name else base}
    if model.model_tags:
        known["tags"] = [AdaPerceiverConfig.model_type, *model.model_tags]
    return complete_card(text, name, model.task, model.accuracy_table, **known)


def complete_card(text: str, name: str, task: str, table: AccuracyTable | None, **known: Any) -> ModelCard:
    """`text`, with or without metadata, as a card with all metadata that is `known` and that it leaves out."""
    card = ModelCard(text if text.lstrip().startswith("---") else f"---\nlibrary_name: transformers\n---\n{text}")
    results = eval_results(task, table)
    defaults = {
        "library_name": "transformers",
        "pipeline_tag": task,
        "tags": [AdaPerceiverConfig.model_type],
        **known,
    }
    if results and card.data.eval_results is None:
        defaults |= {"metrics": [METRICS[task][0]], "model_name": name.rpartition("/")[2], "eval_results": results}
    for key, value in defaults.items():
        if value is not None and card.data.get(key) is None:
            card.data[key] = value
    return card


def eval_results(task: str, table: AccuracyTable | None) -> list[EvalResult]:
    """The main operating points of an accuracy table that says what data it was measured on."""
    if table is None or table.dataset is None or task not in METRICS:
        return []
    metric, name = METRICS[task]
    return [
        EvalResult(
            task_type=task,
            dataset_type=table.dataset,
            dataset_name=table.dataset,
            dataset_split=table.split,
            metric_type=metric,
            metric_value=point["value"],
            metric_name=f"{name} ({', '.join(f'{axis}={point[axis]}' for axis in AXES)})",
            metric_args={axis: point[axis] for axis in AXES},
        )
        for point in main_points(table.points)
    ]


def main_points(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The largest operating point and, from there, all token counts, all widths and half the depth; and the smallest."""
    values = {axis: sorted({point[axis] for point in points}) for axis in AXES}
    half = min(values["depth"], key=lambda depth: abs(2 * depth - values["depth"][-1]))

    def is_main(point: dict[str, Any]) -> bool:
        smaller = [axis for axis in AXES if point[axis] < values[axis][-1]]
        smallest = all(point[axis] == values[axis][0] for axis in AXES)
        return smallest or smaller in ([], ["tokens"], ["width"]) or (smaller == ["depth"] and point["depth"] == half)

    return [point for point in points if is_main(point)]


def hub_id(name: str | None) -> str | None:
    """`name` if it is the id of a repository on the hub, as far as one can tell: not that of a folder here."""
    return name if name and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name) else None
