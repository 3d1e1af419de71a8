"""
    python examples/convert_official_checkpoint.py --checkpoint run/last.pth --key ema --output converted

A file of the research code as a folder of ours: its state dict is found and unwrapped, loaded strictly, compared with recorded
outputs if there are any, and only then saved. Folders and hub ids of the release need no conversion: `from_pretrained` loads
them. See docs/conversion.md.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import adaperceiver
from adaperceiver.official_adaperceiver import infer_task, is_official, official_weights
from adaperceiver.training.arguments import Parser, command_line


TASKS = {
    "classification": adaperceiver.AdaPerceiverForImageClassification,
    "distillation": adaperceiver.AdaPerceiverForDistillation,
    "segmentation": adaperceiver.AdaPerceiverForSemanticSegmentation,
    "depth": adaperceiver.AdaPerceiverForDepthEstimation,
}
WRAPPERS = re.compile(r"\b(module|_orig_mod)\.")  # of DistributedDataParallel, AveragedModel and torch.compile
COUNTERS = ("n_averaged", "ema_n_averaged")  # of averaged weights; no part of the model
OFFICIAL = re.compile(r"(backbone\.)?(process_latents|read_head|write_head)\.")  # no other transformer has these
OUTPUT = re.compile(r"(logits|features|predicted_depth)(/(,?(tokens|width|depth|attention)=\w+)+)?")


# fmt: off
@dataclass
class ConversionArguments:
    checkpoint: str = field(metadata={"help": "A file: .safetensors, or of torch.save."})
    output: str = field(metadata={"help": "The folder to write: new or empty."})
    config: str | None = field(default=None, metadata={"help": "An official config.json; by default the one beside the checkpoint, or the paper's."})
    key: str | None = field(default=None, metadata={"help": "Which of several state dicts of a file, such as ema."})
    expected: str | None = field(default=None, metadata={"help": "A .safetensors file of images and recorded outputs."})
    tolerance: float = field(default=1e-4, metadata={"help": "Largest absolute difference to a recorded output."})
# fmt: on


def load(file: str) -> Mapping[str, Any]:
    try:
        if file.endswith(".safetensors"):
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes of the unpickler
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
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


def official_tensors(file: str, key: str | None) -> dict[str, torch.Tensor]:
    """The tensors of one of the state dicts in `file`, in float32, by their official names."""
    loaded = load(file)
    found = state_dicts(loaded)
    if not found:
        names = ", ".join(map(str, list(loaded)[:5])) or "nothing"
        raise ValueError(f"{file} must hold tensors of an official AdaPerceiver, got: {names}")
    key = next(iter(found)) if key is None and len(found) == 1 else key
    if key not in found:
        allowed = "left out" if list(found) == [""] else f"one of {', '.join(found)}"
        raise ValueError(f"--key must be {allowed} for {file}, got {key}.")
    tensors = {}
    for stored_name, tensor in found[key].items():
        name = WRAPPERS.sub("", str(stored_name))
        if name in tensors or not isinstance(tensor, torch.Tensor):
            what = f"there beside another {name}" if name in tensors else f"a {type(tensor).__name__}"
            raise ValueError(f"{file} must hold one tensor for each name; {stored_name} is {what}.")
        if name not in COUNTERS:
            tensors[name] = tensor.to(torch.float32, copy=True)  # no shared memory, which cannot be saved
    return tensors


@torch.no_grad()
def compare(model: adaperceiver.AdaPerceiverPreTrainedModel, file: str, tolerance: float) -> None:
    """Print how far the model is from each recorded output; raise if one is further than `tolerance`."""
    recorded, failed = load(file), []
    if "pixel_values" not in recorded or len(recorded) == 1:
        raise ValueError(f"--expected must hold `pixel_values` and outputs, got {file} with {', '.join(recorded)}.")
    for key in sorted(recorded.keys() - {"pixel_values"}):
        name, *point = re.split("[/,]", key) if OUTPUT.fullmatch(key) else [key]
        pairs = (pair.split("=") for pair in point)
        point = {argument: int(value) if value.isdecimal() else value for argument, value in pairs}
        actual, expected = model(recorded["pixel_values"], **point).get(name), recorded[key].float()
        if actual is None:
            raise ValueError(
                f"--expected must hold outputs of {type(model).__name__}, as logits/tokens=64,depth=12, got {key}."
            )
        # The official model keeps the axis of the single output token in its logits, and a channel in its depth maps.
        if expected.ndim == actual.ndim + 1 and expected.shape[1] == 1:
            expected = expected[:, 0]
        if expected.shape != actual.shape:
            raise ValueError(f"--expected has {key} of shape {tuple(expected.shape)}, not {tuple(actual.shape)}.")
        difference = (actual - expected).abs().max().item()
        print(f"max abs difference to recorded {key}: {difference:.1e}")
        if not difference <= tolerance:  # a NaN is not <= either
            failed.append(key)
    if failed:
        raise ValueError(f"further than --tolerance {tolerance:g} from the recorded {', '.join(failed)}.")


def main(arguments: list[str]) -> None:
    (args,) = Parser([ConversionArguments]).parse(arguments)
    output, beside = Path(args.output), Path(args.checkpoint).with_name("config.json")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"--output must be a new or empty folder, got {output}.")
    for name in ("checkpoint", "config", "expected"):
        file = getattr(args, name)
        if file is not None and not Path(file).is_file():
            raise ValueError(f"--{name} must be a file that exists, got {file}.")
    tensors = official_tensors(args.checkpoint, args.key)
    config_file = args.config or (beside if beside.is_file() else None)
    official_config = {} if config_file is None else json.loads(Path(config_file).read_text(encoding="utf-8"))
    if config_file is not None and not (isinstance(official_config, dict) and is_official(official_config)):
        raise ValueError(f"--config must be that of an official model, got {config_file}.")
    model_class = TASKS[infer_task(tensors)]
    print(f"{model_class.__name__}, config: {config_file or 'the paper (see --config)'}")
    config, weights = official_weights(model_class, tensors, official_config, str(config_file))
    model = model_class.from_pretrained(None, config=config, state_dict=weights)
    if args.expected:
        compare(model, args.expected, args.tolerance)
    model.save_pretrained(output)
    print(f"wrote {output}" + " (no recorded outputs to compare with: --expected)" * (not args.expected))


if __name__ == "__main__":
    command_line(main)
