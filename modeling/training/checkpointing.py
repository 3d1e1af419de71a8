"""What a run writes: checkpoints that are whole or not there, metrics, and the card of the model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator


def write_whole(folder: Path, write: Callable[[Path], None], accelerator: Accelerator | None = None) -> None:
    """
    Have `write` fill a folder that appears under its name when it is complete, or not at all. With an `accelerator` all
    processes take part.
    """
    part = folder.with_name(f".{folder.name}.part")
    wait, main = (accelerator.wait_for_everyone, accelerator.is_main_process) if accelerator else (lambda: None, True)
    if main:
        shutil.rmtree(part, ignore_errors=True)
    wait()
    try:
        write(part)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise OSError(
            f"{folder} could not be written: {error}. What was saved before is whole, and --resume goes on from there."
        ) from error
    wait()
    if main:
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    wait()


def checkpoints(folder: Path) -> list[Path]:
    """From the oldest to the newest."""
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


class Metrics:
    """One JSON object a line, in `metrics.jsonl`; what an interrupted run wrote after its last checkpoint is dropped."""

    def __init__(self, path: Path, step: int, accelerator: Accelerator):
        self.path, self.accelerator = path, accelerator
        if accelerator.is_main_process:
            lines = path.read_text().splitlines() if path.exists() and step else []
            path.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= step))

    def log(self, step: int, values: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        self.accelerator.log({name: value for name, value in values.items() if isinstance(value, (int, float))}, step)


def model_card(title: str, script: str, arguments: dict[str, Any], metrics: dict[str, Any]) -> str:
    """What the weights are, how they came to be, and what they score."""
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
    return "\n".join(lines)
