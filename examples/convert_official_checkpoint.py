"""
    python examples/convert_official_checkpoint.py --checkpoint pjajal/adaperceiver-v1-in1k-ft --output adaperceiver-in1k
    python examples/convert_official_checkpoint.py --checkpoint run/last.pth --key ema --output run/ours \
        --expected outputs.safetensors

A checkpoint of the official AdaPerceiver release under our names: tensors are renamed, loaded strictly, compared with recorded
outputs if there are any, and only then saved. If a tensor is missing, superfluous or of another shape, or an output differs,
the script says which and writes nothing. See docs/conversion.md.
"""

import json
import pickle
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import HfArgumentParser

from adaperceiver import (
    AdaPerceiverConfig,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverPreTrainedModel,
)


# fmt: off
NAMES = [  # `task:official name` -> our name; applied one after the other
    (r"^segmentation:head\.conv_seg\.",        r"head.classifier."),
    (r"^depth:head\.conv_seg\.",               r"head.bins."),
    (r"^\w+:",                                 r""),
    (r"^head\.bn\.",                           r"head.norm."),
    # The backbone of a segmentation or depth model has a single write, and calls it by the classifier's name.
    (r"^backbone\.write_head\.",               r"write_head_feat."),
    (r"^backbone\.output_(latents|adapter)\.", r"output_\1_feat."),
    (r"^backbone\.",                           r""),
    (r"^patch_embed\.pos_embed$",              r"adaperceiver.embeddings.position_embeddings"),
    (r"^patch_embed\.embed\.proj\.",           r"adaperceiver.embeddings.patch_embeddings."),
    (r"^patch_embed\.",                        r"adaperceiver.embeddings."),
    (r"^process_latents\.token$",              r"adaperceiver.read.latent_token"),
    (r"^read_head\.",                          r"adaperceiver.read.cross_attention."),
    (r"^blocks\.(\d+)\.attn\.",                r"adaperceiver.layers.\1.attention."),
    (r"^blocks\.(\d+)\.ls([12])\.",            r"adaperceiver.layers.\1.layer_scale\2."),
    (r"^blocks\.",                             r"adaperceiver.layers."),
    (r"^output_latents\.token$",               r"adaperceiver.class_readout.output_token"),
    (r"^output_latents_feat\.proj\.",          r"adaperceiver.dense_readout.projection."),
    (r"^write_head\.",                         r"adaperceiver.class_readout.write."),
    (r"^write_head_feat\.",                    r"adaperceiver.dense_readout.write."),
    (r"^output_adapter\.ffn\.(weight|bias)$",  r"classifier.\1"),
    (r"^output_adapter_feat\.",                r"feature_adapter."),
    (r"\.cattn\.",                             r"."),
    (r"\.src_norm\.",                          r".source_norm."),
    (r"\.snk_norm\.",                          r".sink_norm."),
    (r"(attention|write)\.([qkv])\.",          r"\1.\2_proj."),
    (r"(attention|write)\.proj\.",             r"\1.o_proj."),
]
# fmt: on
WRAPPERS = re.compile(r"\b(module|_orig_mod)\.")  # of DistributedDataParallel, AveragedModel and torch.compile
COUNTERS = ("n_averaged", "ema_n_averaged")  # of averaged weights; no part of the model
OFFICIAL = re.compile(
    r"^(backbone\.)?(process_latents|read_head|write_head)\."
)  # no other vision transformer has these

TASKS = {
    "classification": AdaPerceiverForImageClassification,
    "distillation": AdaPerceiverForDistillation,
    "segmentation": AdaPerceiverForSemanticSegmentation,
    "depth": AdaPerceiverForDepthEstimation,
}
OUTPUTS = {  # what can be recorded, by task
    "classification": ("logits",),
    "distillation": ("logits", "features"),
    "segmentation": ("logits",),
    "depth": ("predicted_depth",),
}
POINT_ARGUMENTS = ("tokens", "width", "depth", "attention")
SETTINGS = {  # what shapes cannot tell, and the name of it in the official settings
    "num_attention_heads": "num_heads",
    "max_latent_tokens": "max_latent_tokens",
    "token_granularities": "mask_token_grans",
    "widths": None,
    "ffn_ratio": "ffn_ratio",
    "hidden_act": None,
    "rope_theta": None,
}
SUFFIXES = (".safetensors", ".bin", ".pth", ".pt")
FILES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")


@dataclass
class Arguments:
    checkpoint: str = field(
        metadata={"help": "What to convert: a hub id, a folder, or a file (.safetensors, .bin, .pth, .pt)."}
    )
    output: str = field(metadata={"help": "The folder to write."})
    task: Literal["classification", "distillation", "segmentation", "depth"] | None = field(
        default=None, metadata={"help": "What the model is for; the names of the tensors say so if not given."}
    )
    key: str | None = field(
        default=None, metadata={"help": "Which of several state dicts in a .pth file, such as model or ema."}
    )
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a hub id."})
    expected: str | None = field(
        default=None, metadata={"help": "A .safetensors file of recorded `pixel_values` and outputs to compare with."}
    )
    tolerance: float = field(default=1e-4, metadata={"help": "Largest absolute difference to a recorded output."})
    overwrite: bool = field(default=False, metadata={"help": "Replace the model in the output folder, if it has one."})
    push_to_hub: str | None = field(default=None, metadata={"help": "The hub id to upload the converted model to."})

    # What shapes cannot tell: as given here, or else as in config.json beside the weights, or else as in the paper.
    num_attention_heads: int | None = field(
        default=None, metadata={"help": "Heads; if not given, those of config.json or 13."}
    )
    max_latent_tokens: int | None = field(
        default=None, metadata={"help": "Latents in training; if not given, those of config.json or 256."}
    )
    token_granularities: list[int] | None = field(
        default=None,
        metadata={"help": "Trained token counts; if not given, those of config.json or 1/8 to all of the latents."},
    )
    widths: list[int] | None = field(
        default=None, metadata={"help": "Trained widths; if not given, 1/2, 3/4 and all of the hidden size."}
    )
    ffn_ratio: float | None = field(
        default=None,
        metadata={"help": "Hidden units per unit of width; if not given, that of config.json or 2.57 if it fits."},
    )
    hidden_act: str | None = field(default=None, metadata={"help": "Activation of the FFNs; if not given, gelu."})
    rope_theta: float | None = field(default=None, metadata={"help": "Base of RoPE; if not given, 10000."})


# --- from files to tensors


def find_files(checkpoint: str, revision: str | None) -> list[Path]:
    """The files of the weights (several if they are sharded), downloaded if `checkpoint` is a hub id."""
    path = Path(checkpoint)
    if path.exists() and revision is not None:
        raise ValueError(f"`revision` is for hub ids, got {revision!r} with the local {checkpoint}.")
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = weight_files(path)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", checkpoint) and path.suffix not in SUFFIXES:
        files = download(checkpoint, revision)
    else:
        raise ValueError(f"`checkpoint` must be a hub id, or a folder or file that exists, got {checkpoint}.")
    if len(files) != 1:
        found = ", ".join(map(str, files)) or "none"
        raise ValueError(f"`checkpoint` must hold one file of weights, or be one of them; {checkpoint} has: {found}.")
    return shards(files[0]) if files[0].name.endswith(".index.json") else files


def download(hub_id: str, revision: str | None) -> list[Path]:
    """The repository's safetensors files or, only if it has none, its other files of weights."""
    files = []
    for suffixes in (SUFFIXES[:1], SUFFIXES[1:]):
        if not files:
            patterns = ["*.json", *(f"*{suffix}" for suffix in suffixes)]
            try:
                folder = snapshot_download(hub_id, revision=revision, allow_patterns=patterns)
            except OSError as error:
                raise ValueError(f"`checkpoint` {hub_id} is no local path, nor found on the hub: {error}") from error
            files = weight_files(Path(folder))
    return files


def weight_files(folder: Path) -> list[Path]:
    """The file with a name that transformers gives, or else all that may hold weights."""
    for name in FILES:
        if (folder / name).is_file():
            return [folder / name]
    return sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)


def shards(index: Path) -> list[Path]:
    files = sorted({index.parent / name for name in read_json(index).get("weight_map", {}).values()})
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ValueError(f"{index} must name files beside it; these are missing: {', '.join(missing) or 'all'}.")
    return files


def read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(values).__name__}.")
    return values


def load(file: Path) -> dict[str, Any]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} is not a checkpoint that is safe to load: it must hold tensors, numbers, strings, lists and dicts "
            f"only. If you trust it, save its state dict to a file of its own. ({str(error).splitlines()[0]})"
        ) from error
    except (EOFError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{file} is not a checkpoint, or is damaged: {error}") from error
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{file} must hold a dict of tensors, got {type(loaded).__name__}.")
    return loaded


def load_tensors(files: list[Path], key: str | None) -> dict[str, torch.Tensor]:
    """The official model's tensors under their official names."""
    loaded = {}
    for file in files:
        loaded |= load(file)
    found = state_dicts(loaded)
    where = ", ".join(str(file) for file in files)
    if not found:
        raise ValueError(
            f"{where} must hold tensors of an official AdaPerceiver, such as read_head.cattn.q.weight, got: "
            f"{', '.join(map(str, list(loaded)[:5])) or 'nothing'}{', ...' * (len(loaded) > 5)}."
        )
    if key is None and len(found) == 1:
        key = next(iter(found))
    if key not in found:
        allowed = "left out" if list(found) == [""] else f"one of {', '.join(found)}"
        raise ValueError(f"`key` must be {allowed} for {where}, got {key}.")
    tensors = {}
    for stored_name, tensor in found[key].items():
        name = WRAPPERS.sub("", str(stored_name))
        if name in COUNTERS:
            continue
        if name in tensors or not isinstance(tensor, torch.Tensor):
            what = f"a {type(tensor).__name__}" if name not in tensors else f"there beside another {name}"
            raise ValueError(f"{where} must hold one tensor for each name; {stored_name} is {what}.")
        tensors[name] = tensor
    return tensors


def state_dicts(loaded: Mapping, path: str = "") -> dict[str, Mapping]:
    """Every dict in `loaded`, itself included, that holds tensors of an AdaPerceiver, by the dotted path of keys to it."""
    found = {}
    for name, value in loaded.items():
        if isinstance(value, Mapping):
            found |= state_dicts(value, f"{path}.{name}".lstrip("."))
        elif isinstance(value, torch.Tensor) and OFFICIAL.match(WRAPPERS.sub("", str(name))):
            found[path] = loaded
    return found


# --- from tensors to a model


def infer_task(names: list[str]) -> str:
    """What a model with tensors of these official names is for."""
    if any(name.startswith("backbone.") for name in names):
        return "segmentation" if any(name.startswith("head.bn.") for name in names) else "depth"
    return "distillation" if any("_feat." in name for name in names) else "classification"


def our_name(name: str, task: str = "classification") -> str:
    """Our name of the tensor that the official model for `task` calls `name`."""
    name = f"{task}:{name}"
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def rename(tensors: dict[str, torch.Tensor], task: str) -> dict[str, torch.Tensor]:
    """Official tensors under our names. Learned tokens and positions have three axes, (1, tokens, hidden_size), here."""
    ours = {}
    for official_name, tensor in tensors.items():
        name = our_name(official_name, task)
        if name in ours:
            raise ValueError(f"{official_name} is one of two tensors of the checkpoint that become {name}.")
        if name.endswith(("_token", "position_embeddings")):
            tensor = tensor[(None,) * (3 - tensor.ndim)]
        ours[name] = tensor
    return ours


def infer_config(tensors: dict[str, torch.Tensor], **settings) -> AdaPerceiverConfig:
    """
    The config of a model with these tensors (under our names), as far as shapes tell; `settings` tell the rest. Where
    several tensors show a size the most common one counts, so that a tensor that is off does not hide in the config.
    """

    def size(pattern: str, axis: int = 0) -> int | None:
        sizes = Counter(
            tensor.shape[axis] for name, tensor in tensors.items() if re.search(pattern, name) and tensor.ndim > axis
        )
        return sizes.most_common(1)[0][0] if sizes else None

    def has(pattern: str) -> bool:
        return any(re.search(pattern, name) for name in tensors)

    default = AdaPerceiverConfig
    layers = [int(match[1]) for name in tensors if (match := re.match(r"adaperceiver\.layers\.(\d+)\.", name))]
    sizes = {
        "hidden_size": size(r"norm\d?\.weight$"),
        "num_hidden_layers": max(layers) + 1 if layers else None,
        "num_channels": size(r"\.patch_embeddings\.weight$", axis=1),
        "patch_size": size(r"\.patch_embeddings\.weight$", axis=3),
        "feature_size": size(r"^feature_adapter\.ffn\.fc2\."),
        "num_labels": size(r"^(head\.)?classifier\."),
        "num_depth_bins": size(r"^head\.bins\."),
    }
    config = {name: value for name, value in sizes.items() if value is not None}
    config |= {
        "qkv_bias": has(r"\.[qkv]_proj\.bias$"),
        "proj_bias": has(r"\.o_proj\.bias$"),
        "ffn_bias": has(r"\.ffn\.fc[12]\.bias$"),
        "use_embed_ffn": has(r"\.embeddings\.(norm|ffn)\."),
        "use_swiglu_ffn": has(r"\.ffn\.gate\."),
        "layerscale_value": default.layerscale_value if has(r"\.layer_scale[12]\.") else None,
    }
    positions = size(r"\.position_embeddings$", axis=1)
    if positions is not None:
        grid = round(positions**0.5)
        if grid**2 != positions:
            raise ValueError(f"patch_embed.pos_embed must hold a square grid of positions, got {positions}.")
        config["image_size"] = grid * config.get("patch_size", default.patch_size)
    hidden_units = size(r"\.ffn\.fc1\.")
    if hidden_units is not None:
        config["ffn_ratio"] = infer_ffn_ratio(config.get("hidden_size", default.hidden_size), hidden_units)
    return AdaPerceiverConfig(**{**config, **settings})


def infer_ffn_ratio(hidden_size: int, hidden_units: int) -> float:
    """The paper's ratio if it gives `hidden_units`, or else the one with the fewest decimals that does."""
    ratio = AdaPerceiverConfig.ffn_ratio
    if int(hidden_size * ratio) == hidden_units:
        return ratio
    for decimals in count():
        smallest = -(-hidden_units * 10**decimals // hidden_size)
        for ratio in (smallest / 10**decimals, (smallest + 1) / 10**decimals):  # the first may be a rounding too small
            if int(hidden_size * ratio) == hidden_units:
                return ratio


def build_model(tensors: dict[str, torch.Tensor], task: str, **settings) -> AdaPerceiverPreTrainedModel:
    """Our model for `task` with the official `tensors`, in float32; every tensor that does not fit is listed."""
    official_names = {our_name(name, task): name for name in tensors}
    ours = rename(tensors, task)
    config = infer_config(ours, **settings)
    with torch.device("meta"):
        model = TASKS[task](config)
    wanted = model.state_dict()
    problems = [f"missing: {name}" for name in wanted.keys() - ours.keys()]
    problems += [f"superfluous: {official_names[name]}" for name in ours.keys() - wanted.keys()]
    problems += [
        f"of another shape: {official_names[name]} is {tuple(ours[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in wanted.keys() & ours.keys()
        if ours[name].shape != wanted[name].shape
    ]
    if problems:
        likely = infer_task(list(tensors))
        hint = f" (its names are those of a {likely} model)" * (likely != task)
        lines = "\n  ".join(sorted(problems))
        raise ValueError(f"the checkpoint does not fit a {task} model{hint}:\n  {lines}")
    # A copy: tensors of a .pth file may share memory, which a saved model must not.
    model.load_state_dict({name: tensor.to(torch.float32, copy=True) for name, tensor in ours.items()}, assign=True)
    return model.eval()


# --- check and save


@torch.no_grad()
def compare(model: AdaPerceiverPreTrainedModel, task: str, file: Path, tolerance: float) -> None:
    """Print how far the model is from each recorded output; raise if one is further than `tolerance`."""
    recorded = load(file)
    keys = sorted(recorded.keys() - {"pixel_values"})
    if "pixel_values" not in recorded or not keys:
        raise ValueError(
            f"`expected` must hold `pixel_values` and {' or '.join(OUTPUTS[task])}, got {file} with {', '.join(recorded)}."
        )
    failed = []
    for key in keys:
        output, arguments = parse_key(key, task)
        actual, expected = model(recorded["pixel_values"], **arguments)[output], recorded[key].float()
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


def parse_key(key: str, task: str) -> tuple[str, dict[str, int | str]]:
    """`logits/tokens=64,depth=12` -> the output and the arguments of the call."""
    output, _, point = key.partition("/")
    pairs = [pair.partition("=") for pair in point.split(",")] if point else []
    arguments = {name: int(value) if value.isdecimal() else value for name, _, value in pairs}
    if output not in OUTPUTS[task] or not arguments.keys() <= set(POINT_ARGUMENTS):
        raise ValueError(
            f"`expected` must hold {' or '.join(OUTPUTS[task])} for a {task} model, alone or followed by a slash and "
            f"values of {', '.join(POINT_ARGUMENTS)} as in {OUTPUTS[task][0]}/tokens=64,depth=12, got {key}."
        )
    return output, arguments


def check_output(output: Path, overwrite: bool) -> None:
    """Only an empty place or, to be overwritten, a folder that holds one of our models and so can be thrown away."""
    if not output.parent.is_dir():
        raise ValueError(f"`output` must be in a folder that exists, got {output}.")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    config = output / "config.json"
    if not config.is_file() or read_json(config).get("model_type") != AdaPerceiverConfig.model_type:
        raise ValueError(f"`output` must be new, empty, or the folder of a converted model, got {output}.")
    if not overwrite:
        raise ValueError(f"`output` {output} is not empty; `--overwrite` replaces all of it.")


def save(model: AdaPerceiverPreTrainedModel, output: Path) -> None:
    """Write the model, read it again, and put it in place only if it is the same."""
    # Beside the output, since a folder can be renamed only within one file system.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        folder = Path(scratch) / "model"
        model.save_pretrained(folder)
        saved, expected = type(model).from_pretrained(folder).state_dict(), model.state_dict()
        changed = [name for name in expected if name not in saved or not torch.equal(saved[name], expected[name])]
        if changed:
            raise ValueError(f"not the same when read again: {', '.join(changed)}.")
        if output.exists():
            output.replace(Path(scratch) / "replaced")
        folder.replace(output)


def convert(arguments: Arguments) -> AdaPerceiverPreTrainedModel:
    """All of it. If a step fails, it raises and nothing has been written."""
    output = Path(arguments.output).resolve()
    check_output(output, arguments.overwrite)
    if Path(arguments.checkpoint).resolve().is_relative_to(output):
        raise ValueError(f"`output` must not hold the checkpoint {arguments.checkpoint}, got {output}.")
    expected = arguments.expected and Path(arguments.expected)
    if expected is not None and (expected.suffix != ".safetensors" or not expected.is_file()):
        raise ValueError(f"`expected` must be a .safetensors file that exists, got {expected}.")

    files = find_files(arguments.checkpoint, arguments.revision)
    print(f"reading {', '.join(map(str, files))}")
    tensors = load_tensors(files, arguments.key)
    task = arguments.task or infer_task(list(tensors))
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    config_file = files[0].parent / "config.json"
    if config_file.is_file():
        official = read_json(config_file)
        for name, official_name in SETTINGS.items():
            if settings[name] is None:
                settings[name] = official.get(official_name)
        read = [name for name in official if name in SETTINGS.values()]
        print(f"{config_file} has {', '.join(official)}; read: {', '.join(read) or 'nothing'}")
    model = build_model(tensors, task, **{name: value for name, value in settings.items() if value is not None})

    config = model.config
    dtypes = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}))
    print(
        f"{type(model).__name__}: {len(tensors)} tensors ({dtypes}, to be saved in float32), {model.num_parameters() / 1e6:.1f} M parameters"
    )
    print(f"by the shapes: {config.num_hidden_layers} blocks of {config.hidden_size}, images of {config.image_size}")
    print(f"not in the shapes: {', '.join(f'{name}={getattr(config, name)}' for name in SETTINGS)}")
    if expected is None:
        print("no recorded outputs to compare with (--expected)")
    else:
        compare(model, task, expected, arguments.tolerance)
    save(model, output)
    print(f"wrote {output}")
    if arguments.push_to_hub is not None:
        try:
            model.push_to_hub(arguments.push_to_hub)
        except (OSError, ValueError) as error:
            raise ValueError(f"wrote {output}, but could not upload it to {arguments.push_to_hub}: {error}") from error
        print(f"uploaded to {arguments.push_to_hub}")
    return model


def main() -> None:
    arguments = HfArgumentParser(Arguments).parse_args_into_dataclasses()[0]
    try:
        convert(arguments)
    except (OSError, ValueError, StrictDataclassError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
