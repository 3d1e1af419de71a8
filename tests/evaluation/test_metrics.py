"""The metrics: scores held against scikit-learn, plain loops and cases computed by hand; in one process and in two."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import evaluate
import numpy as np
import pytest
import torch
from conftest import run
from PIL import Image
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score, top_k_accuracy_score

import adaperceiver


METRICS = Path(adaperceiver.__file__).parent / "evaluation" / "metrics"
SAMPLES = 11  # neither a multiple of the batch of 2 nor of two processes
OPTIONS = {"top_k_accuracy": {"k": [1, 3]}, "mean_iou": {"num_labels": 6}, "depth_estimation": {"crop": "none"}}
SCORES = ("rmse", "abs_rel", "log10", "delta1", "delta2", "delta3", "silog")


def load(name, **options):
    return evaluate.load(str(METRICS / name), **options)


@pytest.fixture(scope="module")
def samples():
    """Predictions and references for each metric."""
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 5, (SAMPLES, 8, 8))  # class 5 is nowhere
    masks[rng.random(masks.shape) < 0.1] = 255
    depth = rng.uniform(0, 12, (SAMPLES, 8, 8))
    depth[3] = 0
    arrays = {
        "top_k_accuracy": (rng.normal(size=(SAMPLES, 4)), rng.integers(0, 4, SAMPLES)),
        "mean_iou": (rng.integers(0, 5, (SAMPLES, 8, 8)), masks),
        "depth_estimation": (rng.uniform(-1, 12, (SAMPLES, 8, 8)), depth),
    }
    return {name: tuple(map(torch.from_numpy, both)) for name, both in arrays.items()}


def assert_scores(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, **(tolerance or {"rtol": 1e-12}), err_msg=name)


# ---------------------------------------------------------------------------------------------------- what all of them do


@pytest.mark.parametrize("name", OPTIONS)
def test_metrics_load_by_path_without_a_network(name, monkeypatch):
    def refuse(*args):
        raise AssertionError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    metric = load(name, **OPTIONS[name])
    assert isinstance(metric, evaluate.Metric)
    assert metric.name == name
    assert "predictions" in metric.add_batch.__doc__


@pytest.mark.slow
def test_metrics_load_from_the_installed_package_away_from_the_repository(tmp_path):
    code = f"""
import os
os.environ["HF_MODULES_CACHE"] = "modules"  # nothing of an earlier load
import evaluate
from adaperceiver.evaluation.grid import METRICS
from adaperceiver.evaluation.running_sums import RunningSums
for name, options in {OPTIONS}.items():
    metric = evaluate.load(str(METRICS / name), **options)
    print(metric.name, isinstance(metric, RunningSums), type(metric).__module__.startswith("evaluate_modules"))
"""
    assert run(code, tmp_path).splitlines() == [f"{name} True True" for name in OPTIONS]


@pytest.mark.parametrize("name", OPTIONS)
def test_batches_single_samples_and_one_call_give_the_same_scores(name, samples):
    metric, (predictions, references) = load(name, **OPTIONS[name]), samples[name]
    whole = metric.compute(predictions=predictions, references=references)
    for start in range(0, SAMPLES, 4):
        part = slice(start, start + 4)
        metric.add_batch(predictions=predictions[part].numpy(), references=references[part].numpy())
    assert_scores(metric.compute(), whole, rtol=1e-6)
    for prediction, reference in zip(predictions, references):
        metric.add(prediction=prediction, reference=reference)
    assert_scores(metric.compute(), whole, rtol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_compute_starts_anew_and_needs_something(name, samples):
    metric, (predictions, references) = load(name, **OPTIONS[name]), samples[name]
    with pytest.raises(ValueError, match="`compute` needs"):
        metric.compute()
    first = metric.compute(predictions=predictions[:5], references=references[:5])
    metric.compute(predictions=predictions[5:], references=references[5:])
    assert_scores(metric.compute(predictions=predictions[:5], references=references[:5]), first)
    with pytest.raises(ValueError, match="`compute` needs"):
        metric.compute()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_metric_keeps_sums_alone_and_no_files(name, samples, tmp_path):
    metric, (predictions, references) = load(name, **OPTIONS[name], cache_dir=str(tmp_path)), samples[name]
    before, shape = dict(vars(metric)), metric.state.shape
    for _ in range(3):
        metric.add_batch(predictions=predictions.clone().requires_grad_(name != "mean_iou"), references=references)
    assert metric.state.shape == shape
    assert not metric.state.requires_grad
    assert {**vars(metric), "state": None} == {**before, "state": None}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", OPTIONS)
def test_hundreds_of_metrics_at_once_do_not_mix(name, samples):
    (predictions, references), kind = samples[name], type(load(name, **OPTIONS[name]))
    metrics = [kind(**OPTIONS[name]) for _ in range(200)]
    for _ in range(2):
        for number, metric in enumerate(metrics):
            metric.add_batch(predictions=predictions.roll(number % 7, 0), references=references)
    scores = [metric.compute() for metric in metrics]
    for number in range(7):
        alone = kind(**OPTIONS[name]).compute(predictions=predictions.roll(number, 0), references=references)
        images = {key: 2 * alone[key] for key in ("images", "skipped_images") if key in alone}
        assert_scores(scores[number + 7], {**alone, **images})
    assert scores[0] != scores[1]


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_is_silently_ignored(name, samples):
    predictions, references = samples[name]
    metric = load(name, **OPTIONS[name])
    with pytest.raises(TypeError, match="num_classes"):
        load(name, **OPTIONS[name], num_classes=3)
    with pytest.raises(TypeError, match="weights"):
        metric.add_batch(predictions=predictions, references=references, weights=references)
    with pytest.raises(TypeError, match="normalize"):
        metric.compute(predictions=predictions, references=references, normalize=True)
    with pytest.raises(TypeError, match="references"):
        metric.compute(predictions=predictions)
    with pytest.raises(ValueError, match=r"`num_process` must be 1, got 2; .* `compute\(accelerator=\)`"):
        load(name, **OPTIONS[name], num_process=2)


# --------------------------------------------------------------------------------------------------------- two processes


WORKER = """
import json, sys
from pathlib import Path
import evaluate, torch
from accelerate import Accelerator

folder, metrics, options = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
accelerator, found = Accelerator(), {}
rank, processes = accelerator.process_index, accelerator.num_processes
for name, (predictions, references) in torch.load(folder / "samples.pt").items():
    metric = evaluate.load(str(metrics / name), **options[name])
    data = torch.utils.data.TensorDataset(predictions, references)

    for batch in accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2)):
        predicted, wanted = accelerator.gather_for_metrics(tuple(batch))
        metric.add_batch(predictions=predicted, references=wanted)
    gathered = metric.compute()

    for number, batch in enumerate(torch.utils.data.DataLoader(data, batch_size=2)):
        if number % processes == rank:
            metric.add_batch(predictions=batch[0], references=batch[1])
    reduced = metric.compute(accelerator=accelerator)

    if rank == 0:
        metric.add_batch(predictions=predictions, references=references)
    late = metric.compute(accelerator=accelerator)
    found[name] = {"gathered": gathered, "reduced": reduced, "one process has it all": late}
found["processes"] = processes
(folder / f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def two_processes(samples, tmp_path_factory):
    """What either of two gloo processes computed."""
    folder = tmp_path_factory.mktemp("processes")
    torch.save(samples, folder / "samples.pt")
    (folder / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [folder / "worker.py", folder, METRICS, json.dumps(OPTIONS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    subprocess.run(list(map(str, command)), env=environment, check=True, capture_output=True, timeout=300)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gathered", "reduced", "one process has it all"])
@pytest.mark.parametrize("name", OPTIONS)
def test_two_processes_give_the_scores_of_one(name, way, samples, two_processes):
    predictions, references = samples[name]
    alone = load(name, **OPTIONS[name]).compute(predictions=predictions, references=references)
    for found in two_processes:
        assert found["processes"] == 2
        assert_scores(found[name][way], alone, rtol=1e-6 if name == "depth_estimation" else 1e-15)


def test_a_batch_that_is_filled_up_would_show(samples):
    for name, (predictions, references) in samples.items():  # what the test above would compare with
        filled = [torch.cat([values, values[:1]]) for values in (predictions, references)]
        metric = load(name, **OPTIONS[name])
        alone = metric.compute(predictions=predictions, references=references)
        twice = metric.compute(predictions=filled[0], references=filled[1])
        assert any(abs(twice[key] - alone[key]) > 1e-4 for key in alone if isinstance(alone[key], float))


# -------------------------------------------------------------------------------------------------------- top-k accuracy


def test_top_k_accuracy_by_hand():
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 1.0, 0.0]])
    labels = torch.tensor([0, 1, 2, 1])  # of the last one's two equal logits the first wins
    scores = load("top_k_accuracy", k=[1, 2, 3]).compute(predictions=logits, references=labels)
    assert scores == {"top1": 0.25, "top2": 0.75, "top3": 1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k_accuracy_is_that_of_scikit_learn(dtype):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 20, (500,), generator=generator)
    logits = torch.randn(500, 20, generator=generator) + 2 * torch.nn.functional.one_hot(labels, 20)
    logits = logits.to(dtype)
    scores = load("top_k_accuracy").compute(predictions=logits, references=labels)
    assert scores["top1"] == pytest.approx(accuracy_score(labels, logits.argmax(dim=1)), rel=1e-12)
    if dtype == torch.float32:  # bfloat16 has ties, which scikit-learn breaks the other way
        assert scores["top5"] == pytest.approx(
            top_k_accuracy_score(labels, logits.numpy(), k=5, labels=range(20)), rel=1e-12
        )
    assert 0.3 < scores["top1"] < scores["top5"] < 1


@pytest.mark.parametrize(
    ("options", "predictions", "references", "message"),
    [
        ({"k": []}, None, None, r"`k` must be different numbers from 1 up, got \[\]"),
        ({"k": [0, 1]}, None, None, r"`k` must be different numbers from 1 up, got \[0, 1\]"),
        ({}, torch.zeros(2, 3), torch.zeros(2).long(), "`k` must be at most the number of classes, 3, got 5"),
        (
            {"k": 1},
            torch.zeros(2),
            torch.zeros(2).long(),
            r"`predictions` must be logits .*, got torch.float32 \(2,\)",
        ),
        ({"k": 1}, torch.zeros(2, 3), torch.zeros(1).long(), r"`references` must be integers \(2,\), .* \(1,\)"),
        ({"k": 1}, torch.zeros(2, 3), torch.tensor([0, 3]), "`references` must be from 0 to 2, got 3 in sample 1"),
        ({"k": 1}, torch.tensor([[0.0], [math.nan]]), torch.zeros(2).long(), "`predictions` .* NaN in sample 1"),
    ],
)
def test_top_k_accuracy_says_what_is_wrong(options, predictions, references, message):
    with pytest.raises(ValueError, match=message):
        load("top_k_accuracy", **options).add_batch(predictions=predictions, references=references)


# --------------------------------------------------------------------------------------------------------------- mean IoU


def published_mean_iou(predictions, references, num_labels, ignore_index=255, reduce_labels=False):
    """The definition that evaluate publishes, pixel by pixel."""
    intersection, predicted, labelled = (np.zeros(num_labels) for _ in range(3))
    for prediction, reference in zip(predictions, references):
        for ours, label in zip(np.ravel(prediction).tolist(), np.ravel(reference).tolist()):
            if reduce_labels:
                label = 255 if label in (0, 255) else label - 1
            if label == ignore_index:
                continue
            intersection[label] += ours == label
            predicted[ours] += 1
            labelled[label] += 1
    union = predicted + labelled - intersection
    iou = [a / b if b else math.nan for a, b in zip(intersection, union)]
    accuracy = [a / b if b else math.nan for a, b in zip(intersection, labelled)]
    return {
        "mean_iou": np.nanmean(iou),
        "mean_accuracy": np.nanmean(accuracy),
        "overall_accuracy": intersection.sum() / labelled.sum(),
        "per_category_iou": iou,
        "per_category_accuracy": accuracy,
    }


def test_mean_iou_by_hand():
    reference = torch.tensor([[0, 0, 1], [1, 1, 255]])
    prediction = torch.tensor([[0, 1, 1], [1, 2, 3]])  # the last pixel does not count
    scores = load("mean_iou", num_labels=5).compute(predictions=prediction[None], references=reference[None])
    nan = math.nan
    expected = {
        "mean_iou": (1 / 2 + 2 / 4 + 0) / 3,
        "mean_accuracy": (1 / 2 + 2 / 3) / 2,
        "overall_accuracy": 3 / 5,
        "per_category_iou": [1 / 2, 2 / 4, 0, nan, nan],
        "per_category_accuracy": [1 / 2, 2 / 3, nan, nan, nan],
    }
    assert_scores(scores, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.int64, torch.uint64])
@pytest.mark.parametrize("options", [{}, {"ignore_index": 2}, {"reduce_labels": True}], ids=str)
def test_mean_iou_is_the_published_definition(options, dtype):
    generator = torch.Generator().manual_seed(1)
    first = int("reduce_labels" in options)
    references = torch.randint(0, 7 + first, (3, 9, 5), generator=generator)
    if "ignore_index" not in options:
        references[torch.rand(references.shape, generator=generator) < 0.2] = 255
    noise = torch.rand(references.shape, generator=generator) < 0.4
    predictions = torch.where(noise, torch.randint(0, 7, references.shape, generator=generator), references - first)
    predictions = predictions.clamp(0, 6)
    scores = load("mean_iou", num_labels=8, **options).compute(
        predictions=predictions.to(dtype), references=references.to(dtype)
    )
    assert_scores(scores, published_mean_iou(predictions, references, 8, **options))
    assert math.isnan(scores["per_category_iou"][7])


def test_the_histogram_is_scikit_learns_confusion_matrix():
    generator = torch.Generator().manual_seed(2)
    references = torch.randint(0, 150, (4, 64, 64), generator=generator)
    predictions = torch.where(torch.rand(references.shape, generator=generator) < 0.6, references, references.flip(1))
    references[:, :5] = 255
    metric = load("mean_iou", num_labels=150)
    for pair in zip(predictions.split(3), references.split(3)):
        metric.add_batch(predictions=pair[0], references=pair[1])
    counted = references != 255
    labels, classes = references[counted].numpy(), predictions[counted].numpy()
    assert np.array_equal(metric.state, confusion_matrix(labels, classes, labels=range(150)))
    scores = metric.compute()
    iou = jaccard_score(labels, classes, labels=range(150), average=None)
    np.testing.assert_allclose(scores["per_category_iou"], iou, rtol=1e-12)
    assert scores["overall_accuracy"] == pytest.approx(accuracy_score(labels, classes), rel=1e-12)


def test_mean_iou_takes_logits_and_maps_of_different_sizes():
    generator = torch.Generator().manual_seed(3)
    sizes = [(4, 6), (5, 3), (2, 2)]
    logits = [torch.randn(3, *size, generator=generator) for size in sizes]
    references = [torch.randint(0, 3, size, generator=generator) for size in sizes]
    classes = [each.argmax(dim=0) for each in logits]
    metric = load("mean_iou", num_labels=3)
    expected = published_mean_iou(classes, references, 3)
    assert_scores(metric.compute(predictions=logits, references=references), expected)
    assert_scores(metric.compute(predictions=classes, references=references), expected)
    batch = torch.stack([logits[0]] * 2), torch.stack([references[0]] * 2)
    assert_scores(
        metric.compute(predictions=batch[0], references=batch[1]), published_mean_iou(classes[:1], references[:1], 3)
    )


def test_predictions_do_not_matter_where_the_reference_is_ignored():
    metric, reference = load("mean_iou", num_labels=3), torch.tensor([[0, 1, 2, 255]])
    scores = [
        metric.compute(predictions=torch.tensor([[[0, 1, 1, anything]]]), references=reference[None])
        for anything in (0, 1, 200)
    ]
    assert scores[0] == scores[1] == scores[2]


def test_an_image_that_is_all_ignored_counts_for_nothing(samples):
    predictions, references = samples["mean_iou"]
    metric = load("mean_iou", num_labels=6)
    nothing = torch.full((1, 8, 8), 255)
    metric.add_batch(predictions=predictions[:1], references=nothing)
    with pytest.raises(ValueError, match="`compute` needs pixels whose reference is not ignored"):
        metric.compute()
    metric.add_batch(predictions=predictions[:1], references=nothing)
    found = metric.compute(predictions=predictions, references=references)
    assert_scores(found, metric.compute(predictions=predictions, references=references))


ZEROS = torch.zeros(2, 3, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("options", "predictions", "references", "message"),
    [
        ({"num_labels": 0}, None, None, "`num_labels` must be from 1 up, got 0"),
        ({}, ZEROS, torch.stack([ZEROS[0], ZEROS[0] + 4]), "`references` must be from 0 to 3 .*, got 4 in sample 1"),
        ({}, ZEROS, ZEROS - 1, "`references` must be from 0 to 3 .*, got -1 in sample 0"),
        ({"reduce_labels": True}, ZEROS, ZEROS + 5, "`references` must be from 1 to 4 .*, got 5 in sample 0"),
        ({}, ZEROS + 255, ZEROS, "`predictions` must be from 0 to 3 .*, got 255 in sample 0"),
        ({}, ZEROS, ZEROS[:1], "`references` must be 2, as `predictions`, got 1"),
        ({}, ZEROS[:, 1:], ZEROS, r"`predictions` must be integers \(3, 3\) .*, got torch.int64 \(2, 3\) in sample 0"),
        ({}, ZEROS.float(), ZEROS, r"`predictions` must be integers .*, got torch.float32 \(3, 3\) in sample 0"),
        ({}, ZEROS, ZEROS.float(), r"`references` must be integers .*, got torch.float32 \(3, 3\) in sample 0"),
        ({}, torch.zeros(2, 5, 3, 3), ZEROS, r"logits of 4 labels, got torch.float32 \(5, 3, 3\) in sample 0"),
        ({}, torch.full((2, 4, 3, 3), math.nan), ZEROS, "`predictions` must be numbers, got NaN in sample 0"),
    ],
)
def test_mean_iou_says_what_is_wrong(options, predictions, references, message):
    with pytest.raises(ValueError, match=message):
        load("mean_iou", **{"num_labels": 4, **options}).add_batch(predictions=predictions, references=references)


# ------------------------------------------------------------------------------------------------------------------ depth


def depth_by_loops(predictions, references, min_depth=0.001, max_depth=10.0):
    """The definitions of the literature, pixel by pixel."""
    images = []
    for prediction, reference in zip(predictions, references):
        pairs = [
            (min(max(ours, min_depth), max_depth), depth)
            for ours, depth in zip(np.ravel(prediction).tolist(), np.ravel(reference).tolist())
            if min_depth < depth < max_depth
        ]
        if not pairs:
            continue
        logs = [math.log(ours) - math.log(depth) for ours, depth in pairs]
        ratios = [max(ours / depth, depth / ours) for ours, depth in pairs]
        images.append(
            [
                math.sqrt(np.mean([(ours - depth) ** 2 for ours, depth in pairs])),
                np.mean([abs(ours - depth) / depth for ours, depth in pairs]),
                np.mean([abs(math.log10(ours) - math.log10(depth)) for ours, depth in pairs]),
                *[np.mean([ratio < 1.25**power for ratio in ratios]) for power in (1, 2, 3)],
                100 * math.sqrt(np.mean(np.square(logs)) - np.mean(logs) ** 2),
            ]
        )
    means = dict(zip(SCORES, np.mean(images, axis=0)))
    return {**means, "images": len(images), "skipped_images": len(references) - len(images)}


def test_depth_by_hand():
    reference = torch.tensor([[1.0, 2.0], [4.0, 0.0]])  # the last pixel was not measured
    prediction = torch.tensor([[2.0, 2.0], [4.0, 7.0]])
    metric = load("depth_estimation", crop="none")
    scores = metric.compute(predictions=prediction[None], references=reference[None])
    expected = {
        "rmse": 0.577350,  # sqrt(1 / 3)
        "abs_rel": 0.333333,
        "log10": 0.1003433,  # log10(2) / 3
        "delta1": 0.666667,
        "delta2": 0.666667,
        "delta3": 0.666667,  # a factor of 2 is more than 1.25 ** 3 = 1.953
        "silog": 32.67527,  # 100 * sqrt(ln(2)² / 3 - (ln(2) / 3)²)
        "images": 1,
        "skipped_images": 0,
    }
    assert_scores(scores, expected, rtol=2e-6)


def test_depth_is_averaged_over_images_and_not_over_pixels():
    references = torch.full((2, 2, 2), 2.0)
    references[1, 0] = references[1, 1, 0] = 0  # one pixel of the second image is valid
    predictions = torch.stack([torch.full((2, 2), 2.0), torch.full((2, 2), 3.0)])
    scores = load("depth_estimation", crop="none").compute(predictions=predictions, references=references)
    assert scores["rmse"] == pytest.approx(0.5)
    assert scores["abs_rel"] == pytest.approx(0.25)
    assert scores["delta1"] == 0.5
    assert scores["delta2"] == 1


@pytest.mark.parametrize("limits", [{}, {"min_depth": 2.0, "max_depth": 5.0}], ids=str)
def test_depth_is_the_definition_of_the_literature(limits, samples):
    predictions, references = (values.float() for values in samples["depth_estimation"])
    references[5, 0, 0], references[5, 0, 1] = math.nan, math.inf
    metric = load("depth_estimation", crop="none", **limits)
    scores = metric.compute(predictions=predictions[:, None], references=references[:, None])
    assert_scores(scores, depth_by_loops(predictions, references, **limits), rtol=1e-5)
    assert scores["skipped_images"] == 1


def test_silog_leaves_a_common_factor_out_and_keeps_its_digits():
    references = torch.rand(2, 40, 40, generator=torch.Generator().manual_seed(0)) + 1
    scores = load("depth_estimation", crop="none").compute(predictions=3 * references, references=references)
    assert scores["silog"] < 1e-4
    assert scores["abs_rel"] == pytest.approx(2)


def test_the_eigen_crop_is_the_literatures():
    reference = torch.full((1, 480, 640), 2.0)
    outside = torch.ones(480, 640, dtype=torch.bool)
    outside[45:471, 41:601] = False
    prediction = torch.where(outside, 9.0, reference)
    eigen, everything = load("depth_estimation"), load("depth_estimation", crop="none")
    assert eigen.compute(predictions=prediction, references=reference)["rmse"] == 0
    assert everything.compute(predictions=prediction, references=reference)["rmse"] > 1
    for row, column in ((45, 41), (45, 600), (470, 41), (470, 600)):  # the corners are within
        touched = reference.clone()
        touched[0, row, column] = 9.0
        assert eigen.compute(predictions=touched, references=reference)["rmse"] > 0


def test_the_eigen_crop_scales_with_the_image():
    reference, prediction = torch.full((1, 240, 320), 2.0), torch.full((1, 240, 320), 9.0)
    prediction[:, 22:235, 20:300] = 2.0
    metric = load("depth_estimation", crop="eigen")
    assert metric.compute(predictions=prediction, references=reference)["rmse"] == 0
    prediction[:, 22, 20] = 9.0
    assert metric.compute(predictions=prediction, references=reference)["rmse"] > 0


def test_predictions_are_resized_to_the_references():
    rng = np.random.default_rng(0)
    small, reference = rng.uniform(1, 9, (6, 8)).astype(np.float32), rng.uniform(1, 9, (24, 20)).astype(np.float32)
    large = np.array(Image.fromarray(small).resize((20, 24), Image.Resampling.BILINEAR))
    metric = load("depth_estimation", crop="none")
    scores = metric.compute(predictions=torch.from_numpy(small)[None], references=torch.from_numpy(reference)[None])
    assert_scores(scores, depth_by_loops([large], [reference]), rtol=1e-4)


MAPS = torch.ones(2, 3, 3)


@pytest.mark.parametrize(
    ("options", "predictions", "references", "message"),
    [
        ({"crop": "garg"}, None, None, "`crop` must be 'eigen' or 'none', got 'garg'"),
        ({"min_depth": 0}, None, None, "`min_depth` must be between 0 and `max_depth`, 10.0, got 0"),
        ({"min_depth": 80.0}, None, None, "`min_depth` must be between 0 and `max_depth`, 10.0, got 80.0"),
        ({}, MAPS, MAPS[:1], "`references` must be 2 maps, as `predictions`, got 1"),
        ({}, MAPS, (1000 * MAPS).int(), r"`references` must be metres, floats .*, got torch.int32 \(2, 3, 3\)"),
        ({}, MAPS[0], MAPS, r"`predictions` must be metres, floats .*, got torch.float32 \(3, 3\)"),
        ({}, MAPS / torch.tensor([1, 0])[:, None, None], MAPS, "must be finite, got NaN or infinity in sample 1"),
        ({}, MAPS * math.nan, MAPS, "`predictions` must be finite, got NaN or infinity in sample 0"),
    ],
)
def test_depth_says_what_is_wrong(options, predictions, references, message):
    with pytest.raises(ValueError, match=message):
        load("depth_estimation", **options).add_batch(predictions=predictions, references=references)


def test_depth_needs_an_image_with_valid_pixels():
    metric = load("depth_estimation", crop="none")
    metric.add_batch(predictions=MAPS, references=MAPS * 0)
    with pytest.raises(ValueError, match="needs images with valid pixels: none of the 2 added"):
        metric.compute()
