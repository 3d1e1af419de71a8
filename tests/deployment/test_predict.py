"""Predictions for whole data sets: every image once, whoever writes it, and each row what the model says of its image."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pyarrow.parquet
import pytest
import torch
from conftest import EXAMPLES
from datasets import Dataset, Features, Image, Value, load_dataset
from PIL import Image as PILImage

from adaperceiver import (
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    image_processor_for,
)
from adaperceiver.deployment.predict import (
    Predictor,
    Shard,
    finished_shards,
    open_sources,
    own_batches,
    write_shard,
)
from adaperceiver.training.data import open_stored


predict = pytest.importorskip("predict", reason="the script needs examples/ on the path")

pytestmark = pytest.mark.usefixtures("_own_cache")
COUNT, DAMAGED = 11, 4
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def picture(number):
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 255, (4, 5, 3), dtype=np.uint8)
    return PILImage.fromarray(pixels).resize((40, 32 + 3 * number))


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number in range(COUNT):
        picture(number).save(folder / f"{number:02d}.png")
    (folder / f"{DAMAGED:02d}.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def parquet_folder(image_folder, tmp_path_factory):
    """The same images in three files, with names."""
    folder = tmp_path_factory.mktemp("parquet")
    files = sorted(image_folder.iterdir())
    features = Features({"image": Image(), "id": Value("string")})
    for number, some in enumerate((files[:4], files[4:5], files[5:])):
        stored = [{"bytes": file.read_bytes(), "path": file.name} for file in some]
        columns = {"image": stored, "id": [file.stem for file in some]}
        table = Dataset.from_dict(columns, features=features).data.table
        pyarrow.parquet.write_table(table, folder / f"train-{number:05d}-of-00003.parquet")
    return folder


@pytest.fixture
def saved(tiny_model, tmp_path):
    """Save a model with its processor: the model, and the folder."""

    def save(model_class=AdaPerceiverForImageClassification, **changes):
        model, folder = tiny_model(model_class, **changes), tmp_path / "model"
        model.save_pretrained(folder)
        return model, folder

    return save


def dividing_threshold(model, temperature=1.0):
    """At which about half of the images exit after the first block."""
    processor = image_processor_for(model.config, "image-classification")
    with torch.no_grad():
        pictures = [picture(number) for number in range(COUNT)]
        logits = model(
            processor(pictures, return_tensors="pt").pixel_values, tokens=8, depth=1, exit_threshold=False
        ).logits
    return (logits / temperature).softmax(dim=-1).amax(dim=-1).median().item()


def run(model, dataset, output, *options):
    options = ["--shard_size", "4", "--batch_size", "3", *map(str, options)]
    predict.main([str(model), "--dataset", str(dataset), "--output", str(output), *options])
    return rows_of(output)


def rows_of(output):
    files = sorted(output.glob("*.parquet"))
    return [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]


def assert_same(rows, expected):
    """Row by row; another process may round the last bit otherwise."""
    assert [{**row, "confidence": 0} for row in rows] == [{**row, "confidence": 0} for row in expected]
    for row, other in zip(rows, expected):
        assert row["confidence"] == (other["confidence"] and pytest.approx(other["confidence"], rel=1e-5))


# ------------------------------------------------------------------------------------------------------------- what it says


def test_rows_are_what_the_model_says_of_each_image(saved, image_folder, tmp_path, capsys):
    model, folder = saved()
    threshold = dividing_threshold(model)
    rows = run(folder, image_folder, tmp_path / "out", "--exit_threshold", threshold, "--tokens", 8)
    processor, depths = image_processor_for(model.config, "image-classification"), set()
    assert [row["row"] for row in rows] == list(range(COUNT))
    for row in rows:
        assert row["path"] == str(image_folder / f"{row['row']:02d}.png")
        if row["row"] == DAMAGED:
            assert "cannot identify image" in row["error"]
            assert row["label"] is row["tokens"] is row["gflops"] is None
            continue
        pixel_values = processor(picture(row["row"]), return_tensors="pt").pixel_values
        with torch.no_grad():
            outputs = model(pixel_values, tokens=8, exit_threshold=threshold)
        (ran,) = outputs.operating_points
        confidence, label = outputs.logits.softmax(dim=-1)[0].max(dim=0)
        assert row["label"] == model.config.id2label[label.item()]
        assert row["label_id"] == label.item()
        assert row["confidence"] == pytest.approx(confidence.item(), rel=1e-4)
        assert (row["tokens"], row["width"], row["depth"], row["exit_depth"]) == (8, 32, 2, ran.depth)
        assert row["gflops"] == pytest.approx(model.flops_at(ran, (32, 32), 1)["total"] / 1e9)
        assert row["error"] is None
        depths.add(ran.depth)
    assert depths == {1, 2}, "the threshold must divide the images"
    listed = (tmp_path / "out" / "unreadable.csv").read_text().splitlines()
    assert len(listed) == 2
    assert listed[1].startswith(f"0,{DAMAGED},,{image_folder / '04.png'},UnidentifiedImageError")
    assert "11 images" in (printed := capsys.readouterr().out)
    assert "1 could not be read" in printed


def test_confidence_is_the_one_that_early_exit_goes_by(saved, image_folder, tmp_path):
    model, folder = saved()
    threshold = dividing_threshold(model, 2.0)
    saved_choices = {"tokens": 8, "exit_threshold": threshold, "exit_temperatures": [2.0, 3.0]}
    model.adaptive_config = model.adaptive_config.update(**saved_choices)
    model.save_pretrained(folder)
    rows = [row for row in run(folder, image_folder, tmp_path / "out") if row["error"] is None]
    assert {row["exit_depth"] for row in rows} == {1, 2}
    for row in rows:
        assert row["confidence"] >= threshold - 1e-6 or row["exit_depth"] == 2
    fixed = run(folder, image_folder, tmp_path / "fixed", "--no_checkpoint_choices")
    assert {row["exit_depth"] for row in fixed} == {None}


def test_a_budget_chooses_as_a_call_does(saved, image_folder, tmp_path):
    model, folder = saved()
    budget = 0.6 * model.flops()["total"] / 1e9
    point = model.operating_point(max_gflops=budget)
    assert point != model.operating_point()
    row = run(folder, image_folder, tmp_path / "out", "--max_gflops", budget)[0]
    assert (row["tokens"], row["width"], row["depth"]) == (point.tokens, point.width, point.depth)
    assert row["gflops"] <= budget


def test_masks_are_pngs_of_the_size_of_the_image(saved, image_folder, tmp_path):
    model, folder = saved(AdaPerceiverForSemanticSegmentation)
    run(folder, image_folder, tmp_path / "out", "--tokens", 6)
    rows = load_dataset("parquet", data_files=str(tmp_path / "out" / "*.parquet"), split="train")
    processor = image_processor_for(model.config, "image-segmentation")
    for row in (rows[0], rows[7]):
        image = picture(row["row"])
        with torch.no_grad():
            outputs = model(processor(image, return_tensors="pt").pixel_values, tokens=6)
        (expected,) = processor.post_process_semantic_segmentation(outputs, [(image.height, image.width)])
        assert row["mask"].mode == "L"
        assert np.mean(np.asarray(row["mask"]) == expected.numpy()) > 0.999  # a tie may be broken otherwise in a batch
        assert row["confidence"] == pytest.approx(outputs.logits.softmax(dim=1).amax(dim=1).mean().item(), rel=1e-4)
    assert rows[DAMAGED]["mask"] is None


@pytest.mark.parametrize(("deepest", "scale"), [(10.0, 0.001), (80.0, 0.01)])
def test_depth_maps_are_16_bit_pngs_whose_unit_is_in_the_manifest(saved, image_folder, tmp_path, deepest, scale):
    model, folder = saved(AdaPerceiverForDepthEstimation, max_depth=deepest)
    run(folder, image_folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["depth_scale"] == scale
    rows = load_dataset("parquet", data_files=str(tmp_path / "out" / "*.parquet"), split="train")
    processor = image_processor_for(model.config, "depth-estimation")
    image = picture(7)
    with torch.no_grad():
        outputs = model(processor(image, return_tensors="pt").pixel_values)
    expected = processor.post_process_depth_estimation(outputs, [(image.height, image.width)])[0]["predicted_depth"]
    assert rows[7]["depth_map"].mode == "I;16"
    np.testing.assert_allclose(scale * np.asarray(rows[7]["depth_map"]), expected.numpy(), atol=0.51 * scale)
    assert "confidence" not in rows.column_names


def test_images_of_several_sizes_may_be_in_one_batch(saved, image_folder, tmp_path):
    _, folder = saved()
    options = {"size": {"height": 32, "width": 32}, "do_center_crop": False}
    saved_as = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**saved_as, **options, "do_resize": False}))
    images = tmp_path / "whole_patches"
    images.mkdir()
    for number, side in enumerate((32, 40, 32, 48)):
        picture(number).resize((side, 32)).save(images / f"{number}.png")
    together = run(folder, images, tmp_path / "out", "--batch_size", 4)
    alone = run(folder, images, tmp_path / "alone", "--batch_size", 1)
    assert [row["row"] for row in together] == [0, 1, 2, 3]
    assert len({row["gflops"] for row in together}) == 3
    for one, other in zip(together, alone):
        assert one["label"] == other["label"]
        assert one["confidence"] == pytest.approx(other["confidence"], rel=1e-4)


# ----------------------------------------------------------------------------------------------- every image once, by anyone


def rows_written(batches):
    return Counter(
        (batch.shard.source, batch.first + index) for batch in batches for index in range(len(batch.samples))
    )


def data_of(count, sources):
    rows = Dataset.from_dict({"image": list(range(count))})
    return rows if sources is None else rows.to_iterable_dataset(num_shards=sources)


FEATURES = Features({"image": Value("int64")})


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
@pytest.mark.parametrize("sources", [None, 1, 3])
@pytest.mark.parametrize("count", [24, 29])
def test_any_number_of_processes_goes_on_where_another_stopped(count, sources, processes, tmp_path):
    rows, size = data_of(count, sources), 4
    seen = Counter()
    # Three runs with other numbers of processes, the first two of which are killed after two shards of each process.
    for now, kept in ((processes, 2), (processes % 3 + 1, 2), (processes, None)):
        finished = finished_shards(tmp_path)
        for process in range(now):
            ended, samples = 0, []
            for batch in own_batches(rows, tmp_path, finished, size, 3, process, now):
                samples += [
                    {**sample, "at": (batch.shard.source, batch.first + i)} for i, sample in enumerate(batch.samples)
                ]
                if batch.last:
                    assert not batch.shard.file(tmp_path).exists()
                    write_shard(samples, FEATURES, batch.shard.file(tmp_path))
                    seen.update(sample["image"] for sample in samples)
                    assert len({sample["at"] for sample in samples}) == len(samples) <= size
                    ended, samples = ended + 1, []
                if ended == kept:
                    break
    assert seen == Counter(range(count))
    assert sorted(row["image"] for row in rows_of(tmp_path)) == list(range(count))
    assert not list(own_batches(rows, tmp_path, finished_shards(tmp_path), size, 3))


def test_a_source_that_ends_with_a_full_shard_is_not_open_for_ever(tmp_path):
    rows = data_of(8, 2)  # two sources of one full shard
    for source in range(2):
        write_shard([{"image": 0}] * 4, FEATURES, Shard(source, 0).file(tmp_path))
    assert open_sources(rows, tmp_path, finished_shards(tmp_path), 4) == [0, 1]
    write_shard([], FEATURES, Shard(0, 1).file(tmp_path))
    assert open_sources(rows, tmp_path, finished_shards(tmp_path), 4) == [1]


def test_a_stream_gives_what_the_stored_data_give(saved, image_folder, parquet_folder, tmp_path):
    _, folder = saved()
    stored = run(folder, image_folder, tmp_path / "stored")
    streamed = run(folder, parquet_folder, tmp_path / "streamed", "--streaming")
    assert [(row["source"], row["row"]) for row in streamed] == [
        *((0, row) for row in range(4)),
        (1, 0),
        *((2, row) for row in range(6)),
    ]
    assert [row["id"] for row in streamed] == [f"{number:02d}" for number in range(COUNT)]
    for one, other in zip(stored, streamed):
        assert one["label"] == other["label"]
        assert (one["error"] is None) == (other["error"] is None)
        assert one["confidence"] == (other["confidence"] and pytest.approx(other["confidence"], rel=1e-4))


def test_files_of_a_stream_are_opened_where_they_are(tmp_path):
    picture(0).save(tmp_path / "image.png")
    image = open_stored({"bytes": None, "path": f"file://{tmp_path / 'image.png'}"})
    assert np.array_equal(np.asarray(image), np.asarray(picture(0)))


def test_an_interrupted_run_goes_on_without_what_is_there(saved, image_folder, tmp_path, monkeypatch):
    _, folder = saved()
    whole = run(folder, image_folder, tmp_path / "whole")
    seen = []
    original = Predictor.__call__

    def interrupted(self, batch, *rest):
        seen.append(batch.first)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return original(self, batch, *rest)

    monkeypatch.setattr(Predictor, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(folder, image_folder, tmp_path / "out")
    assert finished_shards(tmp_path / "out") == {Shard(0, 0)}
    assert_same(run(folder, image_folder, tmp_path / "out"), whole)
    assert seen == [0, 3, 4, 7, 4, 7, 8]
    assert_same(run(folder, image_folder, tmp_path / "out"), whole)
    assert len(seen) == 7


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_killed_run_goes_on_with_two_processes(saved, image_folder, parquet_folder, tmp_path, stream):
    _, folder = saved()
    data = parquet_folder if stream else image_folder
    if not stream:  # enough for a kill in the middle
        data = tmp_path / "many"
        data.mkdir()
        for number in range(60):
            picture(number % 8).save(data / f"{number:02d}.png")
    options = ["--shard_size", "2", "--batch_size", "1", *(["--streaming"] if stream else [])]
    whole = run(folder, data, tmp_path / "whole", *options)
    arguments = [EXAMPLES / "predict.py", folder, "--dataset", data, "--output", tmp_path / "out", *options]
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while len(finished_shards(tmp_path / "out")) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {
        shard.file(tmp_path / "out"): shard.file(tmp_path / "out").stat().st_mtime_ns
        for shard in finished_shards(tmp_path / "out")
    }
    assert 2 <= len(before) < len(finished_shards(tmp_path / "whole")), "it must be killed in the middle"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    result = subprocess.run(
        [command[0], *launcher, *command[1:]], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("The predictions are in") == 1
    assert all(file.stat().st_mtime_ns == written for file, written in before.items())
    assert_same(rows_of(tmp_path / "out"), whole)
    assert not list((tmp_path / "out").glob(".*.part"))


# ------------------------------------------------------------------------------------------------------------ what is refused


def test_other_predictions_are_refused_by_name(saved, tiny_model, image_folder, parquet_folder, tmp_path):
    _, folder = saved()
    out = tmp_path / "out"
    run(folder, image_folder, out, "--max_gflops", 0.01)
    with pytest.raises(ValueError, match=r"another call: --max_gflops was 0\.01, not 0\.02\."):
        run(folder, image_folder, out, "--max_gflops", 0.02)
    with pytest.raises(ValueError, match=rf"another call: --dataset was {image_folder}, not {parquet_folder}\."):
        run(folder, parquet_folder, out, "--max_gflops", 0.01)
    with pytest.raises(ValueError, match=r"another call: --shard_size was 4, not 5\."):
        run(folder, image_folder, out, "--max_gflops", 0.01, "--shard_size", 5)
    tiny_model(AdaPerceiverForImageClassification).save_pretrained(folder)  # other weights under the same name
    with pytest.raises(ValueError, match=r"another call: --model was model \(\w+\), not model \(\w+\)\."):
        run(folder, image_folder, out, "--max_gflops", 0.01)
    (out / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"holds parquet files and no manifest\.json"):
        run(folder, image_folder, out)


def test_a_budget_that_is_too_small_leaves_nothing_behind(saved, image_folder, tmp_path):
    _, folder = saved()
    with pytest.raises(ValueError, match="`max_gflops` must be at least"):
        run(folder, image_folder, tmp_path / "out", "--max_gflops", 1e-9)
    assert not (tmp_path / "out").exists()
