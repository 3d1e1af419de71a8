"""Model cards of what was trained: how, from what, on what, and with which scores."""

import json
import os
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from ..adaptive_adaperceiver import AccuracyTable
from ..card_adaperceiver import CITATION, PAPER, complete_card, hub_id
from ..configuration_adaperceiver import AdaPerceiverConfig
from ..evaluation.grid import task_of


def known_metadata(arguments: dict[str, Any]) -> dict[str, Any]:
    """
    What the arguments of a training say that the hub reads: its data sets and the model it started from, or else the teacher,
    where they are on the hub.
    """
    datasets = arguments.get("dataset") or []
    ids = [hub_id(name) for name in (datasets if isinstance(datasets, list) else [datasets])]
    bases = (hub_id(arguments.get(name)) for name in ("model", "init_from", "teacher"))
    found = {"datasets": [name for name in ids if name] or None, "base_model": next(filter(None, bases), None)}
    return {name: value for name, value in found.items() if value is not None}


def accuracy_table(metric: str, points: list[dict[str, Any]], dataset: str | list[str], **options) -> AccuracyTable:
    """The scores on the validation data of a training, or of several data sets at once."""
    names = [dataset] if isinstance(dataset, str) else dataset
    shown = ", ".join(hub_id(name) or Path(name).name for name in names)
    return AccuracyTable(
        f"{metric} on the validation data of {shown}", points, dataset=shown, split="validation", **options
    )


def model_card(title: str, script: str, arguments: dict[str, Any], metrics: dict[str, Any]) -> str:
    """The card: how the weights were trained, their scores, and the paper. `save_pretrained` adds what the model itself knows."""
    lines = [
        f"# {title}",
        "",
        f"Trained by `{script}` with",
        "",
        "```yaml",
        yaml.safe_dump(arguments).rstrip(),
        "```",
        "",
    ]
    for name, value in metrics.items():
        heading = name.replace("_", " ")
        if isinstance(value, dict):
            row = [f"{score:.4f}" for score in value.values()]
            lines += [f"| {heading} | {' | '.join(value)} |", "|---" * (len(value) + 1) + "|"]
            lines += [f"| | {' | '.join(row)} |", ""]
        elif isinstance(value, float):
            lines += [f"{heading}: {value:.4f}", ""]
    metadata = ModelCardData(library_name="transformers", **known_metadata(arguments))
    return f"---\n{metadata.to_yaml()}\n---\n\n" + "\n".join(lines) + CITATION


def write_card(folder: str | os.PathLike, text: str | None = None, **metadata: Any) -> ModelCard:
    """
    Write the card of a saved model: `text`, by default that of the card it has, with what the folder and its training know. Scores
    are always those of `accuracy_table.json`; `metadata` (license, datasets, base_model, ...) wins over what the text says, and that
    over the `arguments.json` of the training, which is in the folder or in the one around it.
    """
    folder = Path(folder)
    config = AdaPerceiverConfig.from_pretrained(folder)
    arguments = next(
        (path for path in (folder / "arguments.json", folder.parent / "arguments.json") if path.is_file()), None
    )
    known = known_metadata(json.loads(arguments.read_text(encoding="utf-8"))) if arguments else {}
    card = ModelCard(text or (folder / "README.md").read_text(encoding="utf-8"))
    for name in ("eval_results", "model_name", "metrics", *metadata):
        card.data[name] = None
    text = str(card) + (CITATION if PAPER not in card.text else "")
    name = folder.parent.name if folder.name == "final" else folder.resolve().name
    card = complete_card(
        text, name, task_of(config, str(folder)), AccuracyTable.from_pretrained(folder), **known | metadata
    )
    card.save(folder / "README.md")
    return card
