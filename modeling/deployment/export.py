"""One operating point as a file of ONNX Runtime, OpenVINO or `torch.export`, by the exporters of transformers."""

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.image_processing_utils import BaseImageProcessor
from transformers.utils import ModelOutput

from ..adaptive_adaperceiver import write_json
from ..configuration_adaperceiver import AdaPerceiverConfig
from ..modeling_adaperceiver import AdaPerceiverPreTrainedModel
from .quiet import quiet


FORMATS = {"onnx": "model.onnx", "openvino": "model.xml", "torch": "model.pt2"}
TOLERANCE = 1e-4  # of any output in float32
INT8_TOLERANCE = 0.3  # root mean square of the differences, as a share of the outputs' deviation
REPORT = "export.json"

Predictor = Callable[[np.ndarray], dict[str, np.ndarray]]  # from pixel values (images, channels, height, width)


@contextmanager
def whole_folder(folder: Path, marker: str) -> Iterator[Path]:
    """
    A folder to fill, which appears as `folder` when that succeeds, and not at all otherwise. It replaces an older one only
    if that has the file `marker`, so is of the same kind.
    """
    if folder.exists() and not (folder.is_dir() and ((folder / marker).is_file() or not any(folder.iterdir()))):
        raise ValueError(f"`output` must be a new folder, or one of an earlier export (with {marker}), got {folder}.")
    incomplete = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    try:
        yield incomplete
        shutil.rmtree(folder, ignore_errors=True)
        incomplete.rename(folder)
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)


def export(
    network: AdaPerceiverPreTrainedModel,
    folder: Path,
    file_format: str,
    image_size: Sequence[int],
    dynamic_size: bool = False,
    calibration: Sequence[torch.Tensor] | None = None,
) -> None:
    """
    Write `network`, a whole model or a sub-network of `model.extract`, to `folder`. The batch size stays open, with
    `dynamic_size` the image size too. With `calibration`, batches of pixel values, products with weights run in int8.
    """
    if file_format not in FORMATS:
        raise ValueError(f"`format` must be one of {', '.join(FORMATS)}, got {file_format!r}.")
    if dynamic_size and file_format != "onnx":  # OpenVINO resamples the position embedding in another way
        raise ValueError(f'`dynamic_size` needs the format "onnx", got {file_format!r}.')
    if calibration is not None and file_format == "torch":
        raise ValueError('`calibration` needs the format "onnx" or "openvino", got "torch".')
    from transformers import exporters

    patch, channels = network.config.patch_size, network.config.num_channels
    # Two images, since the exporter takes a size of 1 for one that never changes; and another size than that of the training,
    # so that the position embedding is resampled, to its own size if need be.
    rows, columns = (network.config.image_size + patch * more for more in (1, 2)) if dynamic_size else image_size
    inputs = {"pixel_values": torch.randn(2, channels, rows, columns)}
    automatic = torch.export.Dim.AUTO
    axes = {0: torch.export.Dim("batch"), **({2: automatic, 3: automatic} if dynamic_size else {})}
    options: dict[str, Any] = {"dynamic_shapes": {"pixel_values": axes}}
    samples = None if calibration is None else [{"pixel_values": batch} for batch in calibration]
    path = folder / FORMATS[file_format]
    with quiet():
        if file_format == "torch":
            program = exporters.DynamoExporter().export(network, inputs, exporters.DynamoConfig(**options))
            torch.export.save(program, path)
        elif file_format == "onnx":
            if samples is not None:
                options["quantizer"] = exporters.NNCFOnnxQuantizer(quantization(), samples)
            program = exporters.OnnxExporter().export(network, inputs, exporters.OnnxConfig(**options))
            for node in program.model.graph:  # stack traces, with the paths of this machine
                node.metadata_props.clear()
            large = network.num_parameters() * 4 > 1.5e9  # a file of protobuf holds 2 GB
            program.save(path, external_data=large)
        else:
            if samples is not None:
                options["quantizer"] = exporters.NNCFOpenVINOQuantizer(quantization(), samples)
            config = exporters.OpenVINOConfig(**options, output_path=path, compress_to_fp16=False)
            exporters.OpenVINOExporter().export(network, inputs, config)


def quantization() -> Any:
    from transformers.exporters import NNCFQuantizationConfig

    return NNCFQuantizationConfig(subset_size=10_000)  # batches: all that are given


def load(folder: Path, threads: int | None = None) -> Predictor:
    """What was exported to `folder`, as a function from pixel values to outputs by name."""
    (path,) = (folder / name for name in FORMATS.values() if (folder / name).is_file())
    if path.suffix == ".pt2":
        program = torch.export.load(path).module()

        @torch.no_grad()
        def run_torch(pixel_values: np.ndarray) -> dict[str, np.ndarray]:
            return named_outputs(program(pixel_values=torch.from_numpy(pixel_values)))

        return run_torch
    if path.suffix == ".onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return lambda pixel_values: dict(zip(names, session.run(None, {"pixel_values": pixel_values})))
    import openvino

    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}  # else bfloat16 where the CPU has it
    if threads is not None:
        hints["INFERENCE_NUM_THREADS"] = str(threads)
    compiled = openvino.Core().compile_model(path, "CPU", hints)
    request = compiled.create_infer_request()

    def run_openvino(pixel_values: np.ndarray) -> dict[str, np.ndarray]:
        results = request.infer({"pixel_values": pixel_values})
        return {output.get_any_name(): np.array(results[output]) for output in compiled.outputs}

    return run_openvino


def named_outputs(outputs: ModelOutput) -> dict[str, np.ndarray]:
    """The tensors of a model's output, by the names that the exporters give them."""
    named: dict[str, Any] = {}
    for name, value in outputs.items():
        several = value if isinstance(value, (tuple, list)) else None
        named |= {name: value} if several is None else {f"{name}.{index}": one for index, one in enumerate(several)}
    return {name: value.numpy() for name, value in named.items()}


@torch.no_grad()
def differences(network: Callable, predict: Predictor, pixel_values: torch.Tensor) -> tuple[float, float]:
    """
    The largest absolute difference of any output to PyTorch's, and the root mean square of the differences as a share of the
    outputs' deviation; NaN if either side has one.
    """
    expected, actual = named_outputs(network(pixel_values)), predict(pixel_values.numpy())
    if expected.keys() != actual.keys():
        raise ValueError(f"The export must return {', '.join(expected)}, it returns {', '.join(actual)}.")
    largest, relative = [], []
    for name, value in expected.items():
        difference = actual[name] - value
        largest.append(np.abs(difference).max())
        relative.append(np.sqrt(np.mean(difference**2)) / max(value.std(), 1e-12))
    return float(np.max(largest)), float(np.max(relative))


def verify(
    network: AdaPerceiverPreTrainedModel | Callable,
    predict: Predictor,
    image_size: Sequence[int],
    dynamic_size: bool = False,
    images: torch.Tensor | None = None,
    config: AdaPerceiverConfig | None = None,
) -> dict[str, float]:
    """
    Compare an export with PyTorch at two batch sizes, and at several image sizes if that is open: in float32 on random images,
    in int8 on `images`, which are some of its kind. Raises if they differ.
    """
    config = network.config if config is None else config  # type: ignore[union-attr]  # a function comes with one
    sizes = [tuple(image_size)]
    if dynamic_size:
        own, patch = config.image_size, config.patch_size
        sizes += [(own, own), (own + 2 * patch, own - patch if own > patch else own)]
    if images is not None:
        compared = [differences(network, predict, images)]
    else:
        batches = (torch.randn(count, config.num_channels, *size) for size in sizes for count in (1, 3))
        compared = [differences(network, predict, pixel_values) for pixel_values in batches]
    return judge(compared, images is not None)


def judge(compared: Sequence[tuple[float, float]], int8: bool) -> dict[str, float]:
    """The largest of the `differences`; raises if they are too large."""
    largest, relative = (float(np.max(values)) for values in zip(*compared))
    if not int8 and not largest <= TOLERANCE:  # a NaN is not <= either
        raise ValueError(
            f"The export differs from PyTorch by {largest:.1e}, more than {TOLERANCE:g}; nothing was written."
        )
    if int8 and not relative <= INT8_TOLERANCE:
        raise ValueError(
            f"The int8 export differs from PyTorch by {relative:.0%} of the outputs' deviation, more than "
            f"{INT8_TOLERANCE:.0%}; nothing was written."
        )
    return {"largest_difference": largest, "relative_difference": relative}


def size_of(processor: BaseImageProcessor, default: int) -> tuple[int, int]:
    """(height, width) of what the processor returns."""
    size = processor.crop_size if processor.do_center_crop else processor.size
    if size["height"] and size["width"]:
        return size["height"], size["width"]
    return default, default


def preprocessing_of(processor: BaseImageProcessor) -> dict[str, Any]:
    names: tuple[str, ...] = ("do_convert_rgb", "do_resize", "size", "resample", "do_center_crop", "crop_size")
    names += ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
    values = processor.to_dict()
    options = {name: values.get(name) for name in names}
    options["resample"] = int(options["resample"])
    for name in ("size", "crop_size"):
        if options[name] is not None:
            options[name] = {key: value for key, value in dict(options[name]).items() if value is not None}
    return options


def write_report(folder: Path, report: dict[str, Any], processor: BaseImageProcessor) -> None:
    """What was exported and how it compares, and the preprocessing, beside the file."""
    packages = ("torch", "transformers", "onnx", "onnxruntime", "openvino", "nncf")
    versions = {
        name: importlib.metadata.version(name) for name in packages if importlib.util.find_spec(name) is not None
    }
    processor.save_pretrained(folder)
    write_json({**report, "versions": versions}, folder / REPORT)
