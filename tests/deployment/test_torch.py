"""What needs no runtime beside PyTorch: `torch.export`, and folders that are whole or not there."""

import pytest
import torch
from official import official_model

from adaperceiver import (
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
)
from adaperceiver.deployment.export import export, load, verify, whole_folder


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "model_class",
    [AdaPerceiverForImageClassification, AdaPerceiverForSemanticSegmentation, AdaPerceiverForDepthEstimation],
)
def test_an_exported_operating_point_equals_the_model_at_every_batch_size(model_class, tmp_path):
    model = official_model(model_class)
    export(model.extract(tokens=8, width=41, depth=3), tmp_path, "torch", (32, 32))
    assert verify(lambda x: model(x, tokens=8, width=41, depth=3), load(tmp_path), (32, 32), config=model.config)


def test_a_folder_appears_when_it_is_complete_and_not_before(tmp_path):
    def interrupted():
        with whole_folder(tmp_path / "export", "marker") as incomplete:
            (incomplete / "marker").write_text("half")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        interrupted()
    assert not list(tmp_path.iterdir())
    for text in ("first", "second"):
        with whole_folder(tmp_path / "export", "marker") as incomplete:
            (incomplete / "marker").write_text(text)
            assert [path.name for path in tmp_path.iterdir() if path != incomplete] == ["export"] * (text == "second")
    assert (tmp_path / "export" / "marker").read_text() == "second"


def test_a_folder_of_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "photographs").mkdir()
    (tmp_path / "photographs" / "cat.png").write_bytes(b"")
    with (
        pytest.raises(ValueError, match=r"`output` must be a new folder, .* got .*photographs"),
        whole_folder(tmp_path / "photographs", "marker"),
    ):
        pass
    assert (tmp_path / "photographs" / "cat.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"file_format": "tflite"}, "`format` must be one of onnx, openvino, torch, got 'tflite'"),
        (
            {"file_format": "openvino", "dynamic_size": True},
            "`dynamic_size` needs the format \"onnx\", got 'openvino'",
        ),
        (
            {"file_format": "torch", "calibration": []},
            '`calibration` needs the format "onnx" or "openvino", got "torch"',
        ),
    ],
    ids=str,
)
def test_what_a_format_cannot_do_is_refused(arguments, message, tiny_model, tmp_path):
    with pytest.raises(ValueError, match=message):
        export(tiny_model(AdaPerceiverForImageClassification), tmp_path, image_size=(32, 32), **arguments)
    assert not list(tmp_path.iterdir())
