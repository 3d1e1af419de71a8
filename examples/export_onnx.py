"""
    python examples/export_onnx.py --model FOLDER_OR_HUB_ID --tokens 64 --width 416 --depth 12 --output model.onnx
    python examples/export_onnx.py --output model.onnx    # a small model with random weights, for a look

One operating point as an ONNX file. The sub-network is cut out, exported with `torch.export`, translated to ONNX and run by
onnxruntime against PyTorch; a file that gives other numbers is not written. What is left out of tokens, width and depth is
taken from the checkpoint's `adaptive_config`, or else the full model's. The images are as large as `config.image_size` says.

Needs `pip install -e ".[export]"`.
"""

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, HfArgumentParser

import adaperceiver
from adaperceiver import AdaPerceiverConfig, AdaPerceiverForImageClassification, AdaPerceiverPreTrainedModel
from adaperceiver.adaptive_adaperceiver import interleaved


TOLERANCE = 1e-4
OUTPUTS = {  # what the file returns, by the class of the checkpoint
    "AdaPerceiverForImageClassification": ("logits",),
    "AdaPerceiverForSemanticSegmentation": ("logits",),
    "AdaPerceiverForDepthEstimation": ("predicted_depth",),
    "AdaPerceiverForDistillation": ("logits", "features"),
}


@dataclass
class Arguments:
    output: str = field(metadata={"help": "The ONNX file to write; an older one is replaced."})
    model: str | None = field(
        default=None, metadata={"help": "Checkpoint: a folder or a hub id. A random model by default."}
    )
    tokens: int | None = field(default=None, metadata={"help": "Number of latents."})
    width: int | None = field(default=None, metadata={"help": "Width of the FFNs."})
    depth: int | None = field(default=None, metadata={"help": "Number of blocks."})
    batch: str = field(default="dynamic", metadata={"help": 'Batch size of the file: "dynamic" or a number.'})
    opset: int | None = field(default=None, metadata={"help": "ONNX operator set; torch's default if not given."})
    repeats: int = field(default=11, metadata={"help": "Timed runs of each side."})


class WithTensors(nn.Module):
    """pixel_values -> the named outputs: a file has tensors, not output classes."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]):
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.model(pixel_values)
        return tuple(outputs[name] for name in self.names)


def load_model(folder_or_hub_id: str | None) -> AdaPerceiverPreTrainedModel:
    """The checkpoint in the class that its config names, in float32, or a small random model."""
    if folder_or_hub_id is None:
        torch.manual_seed(0)
        config = AdaPerceiverConfig(
            hidden_size=192,
            num_attention_heads=6,
            num_hidden_layers=6,
            max_latent_tokens=64,
            num_labels=1000,
            # Far from the start of a training, where blocks change next to nothing and all logits are close to 0.
            initializer_range=0.1,
            layerscale_value=1.0,
        )
        return AdaPerceiverForImageClassification(config).eval()
    try:
        architectures = AutoConfig.from_pretrained(folder_or_hub_id).architectures or [None]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`model` must be a checkpoint's folder or hub id, got {folder_or_hub_id}: {error}"
        ) from error
    if architectures[0] not in OUTPUTS:
        raise ValueError(
            f"`model` must be a checkpoint of one of {', '.join(OUTPUTS)}, got {folder_or_hub_id} of {architectures[0]}."
        )
    model_class = getattr(adaperceiver, architectures[0])
    return model_class.from_pretrained(folder_or_hub_id, dtype=torch.float32).eval()


def load_sub_network(
    folder_or_hub_id: str | None, tokens: int | None, width: int | None, depth: int | None
) -> AdaPerceiverPreTrainedModel:
    """`load_model`, cut to an operating point; says on the screen what came of it."""
    model = load_model(folder_or_hub_id)
    point = model.operating_point(tokens=tokens, width=width, depth=depth)
    network = model.extract(tokens=tokens, width=width, depth=depth)
    source = "a small model with RANDOM weights (no --model)" if folder_or_hub_id is None else folder_or_hub_id
    print(f"{type(model).__name__} from {source}")
    print(
        f"at tokens={point.tokens}, width={point.width}, depth={point.depth}: {network.num_parameters() / 1e6:.2f} M of "
        f"{model.num_parameters() / 1e6:.2f} M parameters"
    )
    return network


def batch_size(value: str) -> int | None:
    """A number, or None for a dynamic batch."""
    if value == "dynamic":
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f'`batch` must be "dynamic" or an integer of at least 1, got {value!r}.')
    return int(value)


def export(network: WithTensors, example: torch.Tensor, dynamic: bool, opset: int | None, file: Path) -> int:
    """Write `network` to `file`; returns the operator set, which the exporter may fail to change."""
    for name in ("torch.onnx", "onnxscript"):  # remarks on optional packages and skipped optimisations
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")  # torch's own
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        network, (example,), dynamic_shapes={"pixel_values": {0: batch}} if dynamic else None
    )
    onnx_program = torch.onnx.export(
        program,
        dynamo=True,
        verbose=False,
        input_names=["pixel_values"],
        output_names=list(network.names),
        opset_version=opset,
        dynamic_shapes={"pixel_values": {0: "batch"}} if dynamic else None,  # here, only the name of the dimension
    )
    for node in onnx_program.model.graph:  # stack traces, with the paths of this machine
        node.metadata_props.clear()
    onnx_program.save(file, external_data=False)  # one file, so that it can be renamed
    return onnx_program.model.opset_imports[""]


@torch.no_grad()
def max_difference(network: WithTensors, run_onnx: Callable, pixel_values: torch.Tensor) -> float:
    """The largest absolute difference between the outputs of PyTorch and onnxruntime; NaN if either has one."""
    pairs = zip(network(pixel_values), run_onnx(pixel_values))
    return max((expected - torch.from_numpy(actual)).abs().max().item() for expected, actual in pairs)


def main() -> None:
    arguments = HfArgumentParser(Arguments).parse_args_into_dataclasses()[0]
    output = Path(arguments.output)
    try:  # what the user may get wrong, before anything takes long
        import onnxruntime  # not at the top: quantize_int8.py uses the functions above without it

        if not output.parent.is_dir():
            raise ValueError(f"`output` must be in a folder that exists, got {output}.")
        if arguments.repeats < 1:
            raise ValueError(f"`repeats` must be at least 1, got {arguments.repeats}.")
        batch = batch_size(arguments.batch)
        model = load_sub_network(arguments.model, arguments.tokens, arguments.width, arguments.depth)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    network = WithTensors(model, OUTPUTS[type(model).__name__]).eval()
    config = model.config
    example_batch = batch or 2  # not 1, which torch.export takes for a size that never changes

    def images(batch: int) -> torch.Tensor:
        return torch.randn(batch, config.num_channels, config.image_size, config.image_size)

    # Beside the output, since a file can be renamed only within one file system.
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        file = Path(folder) / "model.onnx"
        print("exporting ...", flush=True)
        opset = export(network, images(example_batch), batch is None, arguments.opset, file)
        if arguments.opset not in (None, opset):
            sys.exit(f"error: `opset` {arguments.opset} is beyond what torch can translate to; it gave {opset}.")

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # would slow PyTorch's turns
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

        def run_onnx(pixel_values: torch.Tensor) -> list:
            return session.run(None, {"pixel_values": pixel_values.numpy()})

        for size in (1, 3) if batch is None else (batch,):
            difference = max_difference(network, run_onnx, images(size))
            print(f"batch {size}: max abs difference of onnxruntime to PyTorch {difference:.1e}")
            if not difference <= TOLERANCE:  # a NaN is not <= either
                sys.exit(f"error: that is more than {TOLERANCE:g}; nothing was written to {output}.")
        size = batch or 1
        pixel_values = images(size)
        times = interleaved(
            {"pytorch": lambda: network(pixel_values), "onnxruntime": lambda: run_onnx(pixel_values)},
            arguments.repeats,
        )
        file.replace(output)
    print(f"wrote {output}: {output.stat().st_size / 1e6:.1f} MB, opset {opset}, batch {arguments.batch}")
    print(
        f"a batch of {size} takes {times['pytorch']:.1f} ms in PyTorch, {times['onnxruntime']:.1f} ms in onnxruntime "
        f"(medians of {arguments.repeats} interleaved runs, {torch.get_num_threads()} threads)"
    )


if __name__ == "__main__":
    main()
