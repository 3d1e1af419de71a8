"""A bundle against the model that it was made of: every operating point, early exit, budgets, both runtimes, every head."""

import json
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest
import torch


pytest.importorskip("onnx", reason="bundles are written with the extra [onnx]: make test-export")
pytest.importorskip("onnxscript", reason="bundles are written with the extra [onnx]: make test-export")
pytest.importorskip("onnxruntime", reason="bundles are run with the extra [onnx]: make test-export")

from conftest import TINY, images

from adaperceiver import (
    AdaPerceiverConfig,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverModel,
    AdaptiveConfig,
    image_processor_for,
)
from adaperceiver.deployment.bundle import verify_bundle, write_bundle
from adaperceiver.deployment.session import AdaptiveSession


def random_model(model_class, std=0.3, **changes):
    torch.manual_seed(0)
    model = model_class(AdaPerceiverConfig(**{**TINY, "num_hidden_layers": 4, **changes})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


@pytest.fixture(scope="module")
def classifier():
    model = random_model(AdaPerceiverForImageClassification)
    model.adaptive_config = AdaptiveConfig(exit_temperatures=[4.0, 3.0, 2.0, 1.0])
    return model


@pytest.fixture(scope="module")
def bundle(classifier, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    write_bundle(classifier, image_processor_for(classifier.config, "image-classification"), folder)
    return folder


@pytest.fixture(params=["onnxruntime", "openvino"])
def session(request, bundle):
    pytest.importorskip(request.param, reason=f"{request.param} is not installed: make test-export")
    return AdaptiveSession(bundle, runtime=request.param, threads=1)


def assert_same(session, model, pixel_values, **point):
    with torch.no_grad():
        expected = model(pixel_values, **point)
    actual = session(pixel_values.numpy(), **point)
    for name, values in actual.outputs.items():
        torch.testing.assert_close(torch.from_numpy(values), expected[name], atol=1e-4, rtol=1e-4)
    expected = [
        {axis: getattr(one, axis) for axis in ("tokens", "width", "depth")} for one in expected.operating_points
    ]
    assert actual.points == expected


@pytest.mark.parametrize(
    "point",
    [
        {},
        {"tokens": 2, "width": 16, "depth": 1},
        {"tokens": 8, "width": 24, "depth": 3},
        {"tokens": 7},  # between the trained counts
        {"tokens": 20},  # beyond them
    ],
    ids=str,
)
def test_a_bundle_gives_what_the_model_gives(point, session, classifier):
    for batch in (1, 3):
        assert_same(session, classifier, images(batch), **point)


def test_every_image_exits_where_it_does_in_the_model(session, classifier):
    pixel_values, exits = images(16), set()
    for threshold in (0.3, 0.5, 0.7):
        assert_same(session, classifier, pixel_values, exit_threshold=threshold, width=24, tokens=12)
        exits |= {point["depth"] for point in session(pixel_values.numpy(), exit_threshold=threshold).points}
    assert len(exits) > 2  # else nothing was seen


def test_a_call_can_stop_after_any_segment(session, classifier):
    pixel_values = images(2)
    for depth, outputs in session.every_depth(pixel_values.numpy(), tokens=6):
        expected = classifier(pixel_values, tokens=6, depth=depth).logits.detach()
        torch.testing.assert_close(torch.from_numpy(outputs["logits"]), expected, atol=1e-4, rtol=1e-4)


def test_a_budget_picks_the_point_that_the_model_picks(bundle, classifier):
    session = AdaptiveSession(bundle)
    costs = sorted(point["gflops"] for point in session.manifest["points"])
    for budget in (costs[0], costs[10], costs[-1]):
        for more in ({}, {"width": 24}, {"exit_threshold": 0.5}):
            chosen = classifier.operating_point(image_size=(32, 32), max_gflops=1.5 * budget, **more)
            expected = {axis: getattr(chosen, axis) for axis in ("tokens", "width", "depth")}
            assert session.resolve(max_gflops=1.5 * budget, **more)[0] == expected
    with pytest.raises(ValueError, match=r"`max_gflops` must be at least .*, got 0"):
        session.resolve(max_gflops=0)


def test_a_latency_budget_is_kept_by_a_profile_of_this_machine(bundle):
    session = AdaptiveSession(bundle, threads=1)
    points = session.profile(batch_size=2, repeats=1)["points"]
    assert len(points) == 6 * 3 * 4
    assert min(point["ms"] for point in points) > 0
    slowest = max(point["ms"] for point in points)
    point, _ = session.resolve(2, max_latency_ms=2 * slowest)
    assert point == {"tokens": 16, "width": 32, "depth": 4}
    cheap, _ = session.resolve(2, max_latency_ms=slowest / 2)
    assert session.milliseconds(cheap, batch_size=2) <= slowest / 2
    with pytest.raises(ValueError, match=r"`max_latency_ms` must be at least"):
        session.resolve(2, max_latency_ms=0)


def test_a_checkpoints_defaults_hold_until_a_call_says_otherwise(bundle, tmp_path):
    manifest = json.loads((bundle / "manifest.json").read_text())
    session = AdaptiveSession(bundle)
    session.manifest = {**manifest, "defaults": {"tokens": 8, "exit_threshold": 0.9, "max_gflops": 1e-9}}
    with pytest.raises(ValueError, match="`max_gflops` must be at least"):
        session.resolve()
    assert session.resolve(max_gflops=False) == ({"tokens": 8, "width": 32, "depth": 4}, 0.9)
    assert session.resolve(max_gflops=False, exit_threshold=False)[1] is None
    assert session.resolve(tokens=4, width=16, depth=2)[0] == {"tokens": 4, "width": 16, "depth": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 0}, "`tokens` must be an integer of at least 1, got 0"),
        ({"width": 20}, r"`width` must be one of \[16, 24, 32\], which the bundle has, got 20"),
        ({"depth": 9}, r"`depth` must be one of \[1, 2, 3, 4\], which the bundle has, got 9"),
        ({"exit_threshold": 2}, "`exit_threshold` must be a number from 0 to 1, got 2"),
        ({"max_gflops": "few"}, "`max_gflops` must be a number of at least 0, got 'few'"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(arguments, message, bundle):
    with pytest.raises(ValueError, match=message):
        AdaptiveSession(bundle)(images(1).numpy(), **arguments)


def test_all_graphs_share_one_copy_of_the_weights(bundle, classifier):
    weights = sum(parameter.numel() * 4 for parameter in classifier.parameters())
    assert weights <= (bundle / "weights.bin").stat().st_size <= 1.1 * weights + 64 * 200  # aligned tensor by tensor
    assert not any(path.suffix == ".data" for path in bundle.iterdir())
    graphs = [path.stat().st_size for path in bundle.glob("blocks_*.onnx")]
    assert len(graphs) == 3 * 4
    assert max(graphs) < 20_000  # a graph, no weights


def test_a_bundle_runs_where_there_is_no_torch(bundle, classifier, tmp_path):
    image = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))
    image.save(tmp_path / "image.png")
    code = f"""
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "adaperceiver", "onnx")))
sys.path.insert(0, {str(bundle)!r})
import PIL.Image
from session import AdaptiveSession
predictions = AdaptiveSession()(PIL.Image.open({str(tmp_path / "image.png")!r}), tokens=8, depth=2)
print(predictions.labels, predictions.points, *predictions.logits[0])
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    processor = image_processor_for(classifier.config, "image-classification")
    expected = classifier(processor(image, return_tensors="pt").pixel_values, tokens=8, depth=2).logits[0].detach()
    printed = result.stdout.strip().rpartition("]")[2].split()
    torch.testing.assert_close(torch.tensor([float(one) for one in printed]), expected, atol=1e-4, rtol=1e-4)
    assert f"['{classifier.config.id2label[int(expected.argmax())]}']" in result.stdout
    assert "[{'tokens': 8, 'width': 32, 'depth': 2}]" in result.stdout


@pytest.mark.parametrize(
    ("model_class", "task"),
    [
        (AdaPerceiverForSemanticSegmentation, "image-segmentation"),
        (AdaPerceiverForDepthEstimation, "depth-estimation"),
        (AdaPerceiverForDistillation, "image-classification"),
    ],
)
def test_every_head_makes_a_bundle(model_class, task, tmp_path):
    model = random_model(model_class, std=0.1, num_hidden_layers=2, use_swiglu_ffn=task == "depth-estimation")
    processor = image_processor_for(model.config, task)
    write_bundle(model, processor, tmp_path)
    session = AdaptiveSession(tmp_path)
    height, width = session.manifest["network"]["image_size"]
    for point in ({}, {"tokens": 4, "width": 16, "depth": 1}):
        assert_same(session, model, images(2, height, width), **point)
    predictions = session(images(2, height, width).numpy())
    if task == "image-segmentation":
        assert predictions.masks.shape == (2, height, width)
    elif task == "depth-estimation":
        assert predictions.depths.shape == (2, height, width)
    else:
        assert predictions.outputs["features"].shape == (2, 16, 24)
        assert len(predictions.labels) == 2


def test_int8_stays_close_in_a_third_of_the_size(bundle, classifier, tmp_path):
    calibration = [images(8) for _ in range(2)]
    manifest = write_bundle(
        classifier, image_processor_for(classifier.config, "image-classification"), tmp_path, calibration=calibration
    )
    assert manifest["int8"]
    for runtime in ("onnxruntime", "openvino"):
        pytest.importorskip(runtime)
        compared = verify_bundle(classifier, AdaptiveSession(tmp_path, runtime=runtime), images(8))
        assert 1e-4 < compared["relative_difference"] < 0.3, runtime
    graphs = [path.read_bytes() for path in tmp_path.glob("blocks_*.onnx")]
    assert all(graph.count(b"DequantizeLinear") > graph.count(b"QuantizeLinear") > 0 for graph in graphs)
    assert (tmp_path / "weights.bin").stat().st_size < 0.5 * (bundle / "weights.bin").stat().st_size


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: random_model(AdaPerceiverModel), "A bundle needs a model with a head, got AdaPerceiverModel"),
        (lambda: random_model(AdaPerceiverForImageClassification).train(), "in evaluation mode, in float32 on a CPU"),
        (lambda: random_model(AdaPerceiverForImageClassification).bfloat16(), "in float32 on a CPU.* torch.bfloat16"),
    ],
    ids=["head", "training", "dtype"],
)
def test_what_makes_no_bundle_is_refused(model, message, tmp_path):
    model = model()
    with pytest.raises(ValueError, match=message):
        write_bundle(model, image_processor_for(model.config, "image-classification"), tmp_path)
    assert not list(tmp_path.iterdir())
