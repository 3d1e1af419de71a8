"""
    python examples/convert_official_checkpoint.py --checkpoint run/last.pth --key ema --output converted
    python examples/convert_official_checkpoint.py --checkpoint pjajal/adaperceiver-v1 --output adaperceiver-v1

A checkpoint of the official code as a folder of ours: loaded strictly, compared with recorded outputs if there are any, and
only then saved. If anything is wrong, the script says what and writes nothing. Folders and hub ids of the release need no
conversion, `from_pretrained` loads them; this is for what the research code writes. See docs/conversion.md.
"""

import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import HfArgumentParser, PreTrainedConfig
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

import adaperceiver
from adaperceiver.official_adaperceiver import infer_task, is_official, official_weights


TASKS = {
    "classification": adaperceiver.AdaPerceiverForImageClassification,
    "distillation": adaperceiver.AdaPerceiverForDistillation,
    "segmentation": adaperceiver.AdaPerceiverForSemanticSegmentation,
    "depth": adaperceiver.AdaPerceiverForDepthEstimation,
}
FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
WRAPPERS = re.compile(r"\b(module|_orig_mod)\.")  # of DistributedDataParallel, AveragedModel and torch.compile
COUNTERS = ("n_averaged", "ema_n_averaged")  # of averaged weights; no part of the model
OFFICIAL = re.compile(r"(backbone\.)?(process_latents|read_head|write_head)\.")  # no other transformer has these
OUTPUT = re.compile(r"(logits|features|predicted_depth)(/(,?(tokens|width|depth|attention)=\w+)+)?")


# fmt: off
@dataclass
class Arguments:
    checkpoint: str = field(metadata={"help": "A file (.safetensors, or of torch.save), a folder, or a hub id."})
    output: str = field(metadata={"help": "The folder to write."})
    config: str | None = field(default=None, metadata={"help": "An official config.json, if there is none beside the weights."})
    key: str | None = field(default=None, metadata={"help": "Which of several state dicts of a file, such as ema."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a hub id."})
    expected: str | None = field(default=None, metadata={"help": "A .safetensors file of images and recorded outputs."})
    tolerance: float = field(default=1e-4, metadata={"help": "Largest absolute difference to a recorded output."})
    overwrite: bool = field(default=False, metadata={"help": "Replace the model in the output folder, if it has one."})
    push_to_hub: str | None = field(default=None, metadata={"help": "The hub id to upload the converted model to."})
# fmt: on


def weight_files(checkpoint: str, revision: str | None) -> list[str]:
    """The file of a hub id, or the file itself, or those of a folder: several if they are sharded."""
    folder = Path(checkpoint)
    if folder.is_file():
        return [checkpoint]
    if not folder.is_dir():
        try:
            return [cached_file(checkpoint, "model.safetensors", revision=revision)]
        except OSError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"`checkpoint` {checkpoint} is no local path, nor found on the hub: {reason}") from error
    for name in FILES:
        if (folder / name).is_file():
            sharded = name.endswith(".index.json")
            return get_checkpoint_shard_files(folder, folder / name)[0] if sharded else [str(folder / name)]
    raise ValueError(f"`checkpoint` must be a file, or a folder with {' or '.join(FILES)}, got {checkpoint}.")


def load(file: str) -> Mapping[str, Any]:
    try:
        if file.endswith(".safetensors"):
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (EOFError, RuntimeError, SafetensorError, UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file} is damaged, or holds more than tensors and plain values: {reason}") from error
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{file} must hold a dict of tensors, got {type(loaded).__name__}.")
    return loaded


def state_dicts(loaded: Mapping, path: str = "") -> dict[str, Mapping]:
    """Every dict in `loaded`, or itself, that holds tensors of an AdaPerceiver, by the dotted path of keys to it."""
    found = {}
    for name, value in loaded.items():
        if isinstance(value, Mapping):
            found |= state_dicts(value, f"{path}.{name}".lstrip("."))
        elif isinstance(value, torch.Tensor) and OFFICIAL.match(WRAPPERS.sub("", str(name))):
            found[path] = loaded
    return found


def official_tensors(loaded: Mapping, key: str | None, where: str) -> dict[str, torch.Tensor]:
    """The tensors of one of the state dicts in `loaded`, in float32, by their official names."""
    found = state_dicts(loaded)
    if not found:
        names = ", ".join(map(str, list(loaded)[:5])) or "nothing"
        raise ValueError(f"{where} must hold tensors of an official AdaPerceiver, got: {names}")
    if key is None and len(found) == 1:
        key = next(iter(found))
    if key not in found:
        allowed = "left out" if list(found) == [""] else f"one of {', '.join(found)}"
        raise ValueError(f"`key` must be {allowed} for {where}, got {key}.")
    tensors = {}
    for stored_name, tensor in found[key].items():
        name = WRAPPERS.sub("", str(stored_name))
        if name in tensors or not isinstance(tensor, torch.Tensor):
            what = f"there beside another {name}" if name in tensors else f"a {type(tensor).__name__}"
            raise ValueError(f"{where} must hold one tensor for each name; {stored_name} is {what}.")
        if name not in COUNTERS:
            tensors[name] = tensor.to(torch.float32, copy=True)  # no shared memory, which cannot be saved
    return tensors


def read_config(source: str | Path, revision: str | None = None) -> dict[str, Any]:
    """The config of a file, folder or hub id; empty if it has none."""
    config = PreTrainedConfig.get_config_dict(source, revision=revision)[0]
    if not isinstance(config, dict):
        raise ValueError(f"The config of {source} must be a JSON object, got {type(config).__name__}.")
    return config


@torch.no_grad()
def compare(model: adaperceiver.AdaPerceiverPreTrainedModel, file: str, tolerance: float) -> None:
    """Print how far the model is from each recorded output; raise if one is further than `tolerance`."""
    recorded, failed = load(file), []
    if "pixel_values" not in recorded or len(recorded) == 1:
        raise ValueError(f"`expected` must hold `pixel_values` and outputs, got {file} with {', '.join(recorded)}.")
    for key in sorted(recorded.keys() - {"pixel_values"}):
        if not OUTPUT.fullmatch(key):
            raise ValueError(f"`expected` must hold outputs such as logits or logits/tokens=64,depth=12, got {key}.")
        name, *point = re.split("[/,]", key)
        pairs = (pair.split("=") for pair in point)
        point = {argument: int(value) if value.isdecimal() else value for argument, value in pairs}
        actual, expected = model(recorded["pixel_values"], **point).get(name), recorded[key].float()
        if actual is None:
            raise ValueError(f"`expected` must hold outputs of {type(model).__name__}, got {key}.")
        # The official model keeps the axis of the single output token in its logits, and a channel in its depth maps.
        if expected.ndim == actual.ndim + 1 and expected.shape[1] == 1:
            expected = expected[:, 0]
        if expected.shape != actual.shape:
            raise ValueError(f"`expected` has {key} of shape {tuple(expected.shape)}, not {tuple(actual.shape)}.")
        difference = (actual - expected).abs().max().item()
        print(f"max abs difference to recorded {key}: {difference:.1e}")
        if not difference <= tolerance:  # a NaN is not <= either
            failed.append(key)
    if failed:
        raise ValueError(f"further than `tolerance` {tolerance:g} from the recorded {', '.join(failed)}.")


def check_output(output: Path, overwrite: bool) -> None:
    """Only an empty place or, to be overwritten, a folder that holds one of our models and so can be thrown away."""
    if not output.parent.is_dir():
        raise ValueError(f"`output` must be in a folder that exists, got {output}.")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        if not output.is_dir() or read_config(output).get("model_type") != "adaperceiver":
            raise ValueError(f"`output` must be new, empty, or the folder of a converted model, got {output}.")
        if not overwrite:
            raise ValueError(f"`output` {output} is not empty; `--overwrite` replaces all of it.")


def save(model: adaperceiver.AdaPerceiverPreTrainedModel, output: Path) -> None:
    """Write the model, read it again, and put it in place only if it is the same."""
    # Beside the output, since a folder can be renamed only within one file system.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        folder = Path(scratch) / output.name
        model.save_pretrained(folder)
        saved, expected = type(model).from_pretrained(folder).state_dict(), model.state_dict()
        changed = [name for name in expected if name not in saved or not torch.equal(saved[name], expected[name])]
        if changed:
            raise ValueError(f"not the same when read again: {', '.join(changed)}.")
        if output.exists():
            output.replace(Path(scratch) / "replaced")
        folder.replace(output)


def convert(arguments: Arguments) -> None:
    """All of it. If a step fails, it raises and nothing has been written."""
    checkpoint, output = arguments.checkpoint, Path(arguments.output).resolve()
    check_output(output, arguments.overwrite)
    if Path(checkpoint).resolve().is_relative_to(output):
        raise ValueError(f"`output` must not hold the checkpoint {checkpoint}, got {output}.")
    for name, suffix in (("config", ".json"), ("expected", ".safetensors")):
        file = getattr(arguments, name)
        if file and not (file.endswith(suffix) and Path(file).is_file()):
            raise ValueError(f"`{name}` must be a {suffix} file that exists, got {file}.")
    if Path(checkpoint).exists() and arguments.revision:
        raise ValueError(f"`revision` is for hub ids, got {arguments.revision!r} with the local {checkpoint}.")

    files = weight_files(checkpoint, arguments.revision)
    loaded = {name: value for file in files for name, value in load(file).items()}
    tensors = official_tensors(loaded, arguments.key, ", ".join(files))
    source = arguments.config or str(Path(checkpoint).parent if Path(checkpoint).is_file() else checkpoint)
    official_config = read_config(source, arguments.revision)
    if not is_official(official_config) and (official_config or arguments.config):
        raise ValueError(
            f"`config` must be that of an official model, got {source} with {', '.join(official_config)}."
        )
    model_class = TASKS[infer_task(tensors)]
    print(f"{model_class.__name__}, config: {f'that of {source}' if official_config else 'the paper (see --config)'}")
    config, weights = official_weights(model_class, tensors, official_config, f"the config of {source}")
    model = model_class.from_pretrained(None, config=config, state_dict=weights)
    if arguments.expected:
        compare(model, arguments.expected, arguments.tolerance)
    save(model, output)
    print(f"wrote {output}" + " (no recorded outputs to compare with: --expected)" * (not arguments.expected))
    if arguments.push_to_hub:
        try:
            model.push_to_hub(arguments.push_to_hub)
        except (OSError, ValueError) as error:
            raise ValueError(f"wrote {output}, but could not upload it to {arguments.push_to_hub}: {error}") from error
        print(f"uploaded to {arguments.push_to_hub}")


def main() -> None:
    arguments = HfArgumentParser(Arguments).parse_args_into_dataclasses()[0]
    try:
        convert(arguments)
    except (OSError, ValueError, StrictDataclassError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
