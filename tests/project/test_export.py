"""One operating point on its own: torch.export, ONNX and int8 against the model it was cut from; the scripts as users run them."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import EXAMPLES, command_line, run_script
from official import official_classifier, official_model
from torch import nn

from adaperceiver import (
    AdaPerceiverConfig,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverModel,
    AdaptiveConfig,
)


POINT = {"tokens": 8, "width": 48, "depth": 2}


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32)


@pytest.fixture
def script(monkeypatch):
    """A script of `examples/` as a module."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.fixture
def refusal(script, monkeypatch):
    """The message with which a script exits, run in this process."""

    def run(name: str, **arguments) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *command_line(**arguments)])
        with pytest.raises(SystemExit) as stopped:
            script(name).main()
        assert isinstance(stopped.value.code, str)  # goes to stderr, and the exit code is 1
        return stopped.value.code

    return run


# --- torch.export


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "model_class",
    [AdaPerceiverForImageClassification, AdaPerceiverForSemanticSegmentation, AdaPerceiverForDepthEstimation],
)
def test_an_exported_operating_point_equals_the_model_at_every_batch_size(model_class):
    model = official_model(model_class)
    small = model.extract(tokens=8, width=41, depth=3)
    shapes = {"pixel_values": {0: torch.export.Dim("batch")}}
    exported = torch.export.export(small, (images(2),), dynamic_shapes=shapes).module()
    for batch in (1, 5):
        pixel_values = images(batch)
        expected = model(pixel_values, tokens=8, width=41, depth=3)[0]
        torch.testing.assert_close(exported(pixel_values)[0], expected, atol=1e-5, rtol=1e-5)


# --- ONNX


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("model_class", [AdaPerceiverForImageClassification, AdaPerceiverForDepthEstimation])
def test_the_onnx_file_gives_the_models_outputs_at_another_batch_size(model_class, tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = official_model(model_class)
    model.save_pretrained(tmp_path / "checkpoint")
    point = {**POINT, "depth": 1}  # the translation takes seconds per block
    result = run_script("export_onnx.py", tmp_path, model="checkpoint", output="model.onnx", repeats=1, **point)
    assert result.returncode == 0, result.stderr
    assert re.search(r"batch 1: max abs difference .* \d\.\de-0\d\n", result.stdout)
    assert re.search(r"[\d.]+ ms in PyTorch, [\d.]+ ms in onnxruntime", result.stdout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model.onnx"]

    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    pixel_values = images(5)  # the example of the export has 2
    outputs = session.run(None, {"pixel_values": pixel_values.numpy()})
    assert len(outputs) == 1
    torch.testing.assert_close(torch.from_numpy(outputs[0]), model(pixel_values, **point)[0], atol=1e-4, rtol=0)
    assert str(EXAMPLES).encode() not in (tmp_path / "model.onnx").read_bytes()  # no paths of the exporting machine


def test_an_onnx_file_with_other_numbers_is_not_kept(script, refusal, monkeypatch, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    official_classifier().save_pretrained(tmp_path / "checkpoint")

    def export_zeros(network, example, dynamic, opset, file):
        """A file with the right shapes, all of whose logits are zero."""
        value = onnx.helper.make_tensor_value_info
        nodes = [
            onnx.helper.make_node("Flatten", ["pixel_values"], ["pixels"]),
            onnx.helper.make_node("MatMul", ["pixels", "weight"], ["logits"]),
        ]
        weight = onnx.helper.make_tensor("weight", onnx.TensorProto.FLOAT, [3072, 10], [0.0] * 30720)
        inputs = [value("pixel_values", onnx.TensorProto.FLOAT, ["batch", 3, 32, 32])]
        outputs = [value("logits", onnx.TensorProto.FLOAT, ["batch", 10])]
        graph = onnx.helper.make_graph(nodes, "zeros", inputs, outputs, [weight])
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
        onnx.save(model, file)
        return 20

    monkeypatch.setattr(script("export_onnx"), "export", export_zeros)
    message = refusal("export_onnx", model=tmp_path / "checkpoint", output=tmp_path / "model.onnx")
    assert "0.0001" in message
    assert str(tmp_path / "model.onnx") in message
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.slow
def test_a_bad_argument_stops_the_export_with_its_name(tmp_path):
    pytest.importorskip("onnxruntime")
    result = run_script("export_onnx.py", tmp_path, output="model.onnx", tokens=0)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("error: `tokens` must be an integer of at least 1, got 0.")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "empty"}, r"`model` must be .* got \S*empty"),
        ({"model": "base"}, "`model` must be .*AdaPerceiverForDepthEstimation.* got .*base of AdaPerceiverModel"),
        ({"width": 1000}, "`width` must be an integer from 1 to 192, got 1000"),
        ({"batch": "two"}, "`batch` must be .*, got 'two'"),
        ({"batch": 0}, "`batch` must be .*, got '0'"),
        ({"repeats": 0}, "`repeats` must be at least 1, got 0"),
        ({"output": "missing/model.onnx"}, r"`output` must be in a folder that exists, got missing.model\.onnx"),
    ],
    ids=str,
)
def test_what_cannot_be_exported_is_refused_before_anything_is_written(
    arguments, message, refusal, tiny_config, monkeypatch, tmp_path
):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    AdaPerceiverModel(tiny_config).save_pretrained("base")
    assert re.search(message, refusal("export_onnx", **{"output": "model.onnx", **arguments}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "empty"]


# --- int8


@torch.no_grad()
def test_int8_runs_every_linear_layer_and_stays_close(script):
    model = official_classifier().extract(tokens=8, width=48)
    quantized = script("quantize_int8").quantize(model)
    layers = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for name in layers:
        assert isinstance(quantized.get_submodule(name), torch.ao.nn.quantized.dynamic.Linear), name
        assert quantized.get_submodule(name).weight().dtype == torch.qint8
    assert len(layers) == 2 + 4 + 4 * (4 + 2) + 4 + 1  # embed FFN, read, blocks, readout, classifier

    pixel_values = images(128)
    expected, actual = model(pixel_values).logits, quantized(pixel_values).logits
    difference = (actual - expected).abs()
    # Measured: 0.04 on average, 0.20 at most, 0.96 agree; the logits are 1.1 on average.
    assert 1e-3 < difference.mean() < 0.1
    assert difference.max() < 0.6
    assert (actual.argmax(-1) == expected.argmax(-1)).float().mean() > 0.85


@pytest.mark.slow
@torch.no_grad()
def test_the_int8_script_prints_its_table_and_leaves_a_model_that_loads(script, tmp_path):
    datasets = pytest.importorskip("datasets")
    quantize_int8 = script("quantize_int8")
    model = official_classifier()
    model.save_pretrained(tmp_path / "checkpoint")
    # The labels are what the model says, so that its accuracy is known.
    pixels = torch.randint(0, 256, (6, 32, 32, 3), dtype=torch.uint8).numpy()
    processor = quantize_int8.load_processor(None, model.config)
    pixel_values = processor(list(pixels), return_tensors="pt").pixel_values
    labels = model(pixel_values, **POINT).logits.argmax(-1)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    data = datasets.Dataset.from_dict({"image": list(pixels), "label": labels.tolist()}, features=features)
    data.to_parquet(tmp_path / "data.parquet")

    files = {"model": "checkpoint", "data": "data.parquet", "output": "int8"}
    result = run_script("quantize_int8.py", tmp_path, **files, batch_size=4, **POINT)
    assert result.returncode == 0, result.stderr
    table = dict(re.findall(r"^(\S.*?)\s{2,}([\d. ]+)$", result.stdout, re.MULTILINE))
    fp32, int8, ratio = map(float, table["size on disk, MB"].split())
    assert int8 < 0.5 * fp32
    assert ratio == pytest.approx(int8 / fp32, abs=0.05)
    assert all(float(number) > 0 for number in table["ms per image, interleaved median"].split())
    assert table["top-1 accuracy"].split()[0] == "1.0000"
    assert table["top-1 accuracy"].split()[1] == table["top-1 agreement"]
    assert 0 < float(table["mean abs logit difference"]) < float(table["max abs logit difference"]) < 1

    # As the script's docstring says.
    loaded = AdaPerceiverForImageClassification(AdaPerceiverConfig.from_pretrained(tmp_path / "int8")).eval()
    loaded.adaptive_config = AdaptiveConfig.from_pretrained(tmp_path / "int8")
    loaded = quantize_int8.quantize(loaded)
    loaded.load_state_dict(torch.load(tmp_path / "int8" / "int8.pt"))
    expected = quantize_int8.quantize(model.extract(**POINT))(pixel_values).logits
    torch.testing.assert_close(loaded(pixel_values).logits, expected, atol=1e-6, rtol=0)


def test_int8_reads_a_folder_of_images_with_a_subfolder_per_class(script, monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    image_module = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(2):
            image_module.new("L", (48, 40), 100 * index).save(tmp_path / "data" / name / f"{index}.png")
    quantize_int8 = script("quantize_int8")
    dataset = quantize_int8.load_data(str(tmp_path / "data"), split="train", images=3)
    processor = quantize_int8.load_processor(None, official_classifier().config)
    (first, labels), (last, _) = quantize_int8.data_batches(dataset, processor, batch_size=2)
    assert (first.shape, last.shape) == ((2, 3, 32, 32), (1, 3, 32, 32))  # grey images get their three channels
    assert labels.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": "nowhere"}, "`data` must be .*, got nowhere"),
        ({"data": "table.parquet"}, "`data` must have a column `image`, got .* with picture"),
        ({"images": 0}, "`images` must be at least 1, got 0"),
        ({"depth": 7}, "`depth` must be an integer from 1 to 6, got 7"),
        ({"model": "depth"}, "`model` must be .*ImageClassification.*, got AdaPerceiverForDepthEstimation"),
    ],
    ids=str,
)
def test_what_int8_cannot_measure_is_refused(arguments, message, refusal, tiny_config, monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    AdaPerceiverForDepthEstimation(tiny_config).save_pretrained("depth")
    datasets.Dataset.from_dict({"picture": [1, 2]}).to_parquet("table.parquet")
    assert re.search(message, refusal("quantize_int8", **arguments))
