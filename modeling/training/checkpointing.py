"""What a run writes: checkpoints that are whole or not there, and metrics."""

import errno
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from .checks import as_text


def write_whole(folder: Path, write: Callable[[Path], None], accelerator: Accelerator | None = None) -> None:
    """
    Have `write` fill a folder that appears under its name when it is complete, or not at all. With an `accelerator` all
    processes take part.
    """
    incomplete = folder.with_name(f".{folder.name}.part")
    wait, main = (accelerator.wait_for_everyone, accelerator.is_main_process) if accelerator else (lambda: None, True)
    if main:
        shutil.rmtree(incomplete, ignore_errors=True)
    wait()
    try:
        write(incomplete)
    except OSError as error:
        shutil.rmtree(incomplete, ignore_errors=True)
        raise OSError(
            f"{folder} could not be written: {error}. What was saved before is whole, and --resume goes on from there."
        ) from error
    wait()
    if main:
        shutil.rmtree(folder, ignore_errors=True)
        incomplete.rename(folder)
    wait()


def checkpoints(folder: Path) -> list[Path]:
    """From the oldest to the newest."""
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def load_newest(folder: Path, accelerator: Accelerator) -> None:
    """Load the newest checkpoint of a run, if it has one."""
    found = checkpoints(folder)
    if not found:
        return
    *earlier, newest = found
    try:
        accelerator.load_state(str(newest))
    except Exception as error:  # whatever reads the damaged file raises
        instead = f"go on from {earlier[-1].name}" if earlier else "start over"
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"{newest} cannot be loaded. Remove it to {instead}. ({reason})") from error


# --------------------------------------------------------------------------------------------------- one run in a folder


FREE = {  # arguments that a resumed run may change, because they do not change what is trained
    "output_dir",
    "resume",
    "overwrite",
    "smoke",
    "tracker",
    "log_steps",
    "save_steps",
    "eval_steps",
    "eval_batch_size",
    "workers",
    "compile_teacher",
    "trust_remote_code",
}
PLACES = {"dataset", "model", "teacher", "init_from", "stem_from", "label_map"}  # may move, under the same name


def record_arguments(folder: Path, arguments: dict[str, Any]) -> None:
    (folder / "arguments.json").write_text(json.dumps(arguments, indent=2) + "\n")


def check_resumed(folder: Path, arguments: dict[str, Any]) -> None:
    """Raise where a run is resumed with other arguments than it was started with."""
    path = folder / "arguments.json"
    if not path.exists() or not checkpoints(folder):
        return

    def comparable(name: str, value: Any) -> Any:
        if name not in PLACES or value is None:
            return value
        return [Path(one).name for one in value] if isinstance(value, (list, tuple)) else Path(value).name

    before, now = json.loads(path.read_text()), json.loads(json.dumps(arguments))
    free = FREE - {"workers"} if now.get("streaming") else FREE  # a stream is divided among its workers
    changed = [
        f"--{name} was {as_text(before[name])}, not {as_text(now[name])}"
        for name in now
        if name in before and name not in free and comparable(name, now[name]) != comparable(name, before[name])
    ]
    if changed:
        raise ValueError(f"--resume goes on with the arguments that {folder} was started with: {'; '.join(changed)}.")


_locks: dict[Path, Any] = {}  # open files: a lock is gone when its file is closed, or its process has ended


def lock(folder: Path, option: str = "output_dir") -> None:
    """Reserve the folder of an option for this process until it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        return
    path = folder.resolve() / ".lock"
    if path in _locks:
        return
    file = path.open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not inherited by the loader's processes
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            raise ValueError(f"--{option} {folder} is in use by {file.read().strip()}.") from error
        return  # a file system without locks
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _locks[path] = file


# --------------------------------------------------------------------------------------------------------------- metrics


class Metrics:
    """
    One JSON object per line, in `metrics.jsonl`. What an interrupted run wrote after its last checkpoint is dropped: losses
    after `step`, scores after `evaluated`.
    """

    def __init__(self, path: Path, step: int, evaluated: int, accelerator: Accelerator):
        self.path, self.accelerator = path, accelerator
        if accelerator.is_main_process:
            lines = read_metrics(path) if path.exists() and step else []
            kept = [line for line in lines if line["step"] <= (step if "loss" in line else evaluated)]
            incomplete = path.with_name(f".{path.name}.part")
            incomplete.write_text("".join(json.dumps(line) + "\n" for line in kept))
            incomplete.rename(path)

    def log(self, step: int, values: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        self.accelerator.log({name: value for name, value in values.items() if isinstance(value, (int, float))}, step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`. The last may be cut short, where a process was killed as it wrote."""
    found, lines = [], path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"Line {number} of {path} must be JSON, got {line[:50]!r}.") from error
    return found
