"""examples/distill.py: real runs on a handful of small images, whole and interrupted, alone and in company."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import EXAMPLES, assert_equal
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    pipeline,
)

from adaperceiver import OnceForAll
from adaperceiver.training import augmentation, checkpointing, loop
from adaperceiver.training.arguments import OptimizationArguments, RunArguments, as_options, parse, shrink


pytest.importorskip("kornia", reason="augmentation needs kornia")
import distill
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, Features, load_dataset
from datasets import Image as DatasetImage

from adaperceiver.training import data
from adaperceiver.training import teacher as teachers


NAMES = ["apple", "book", "cup"]
STUDENT = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_latent_tokens": 8,
    "token_granularities": [2, 4, 8],
    "layerscale_value": 0.1,
}
STEPS = 6


def picture(index):
    rng = np.random.default_rng(index)
    return Image.fromarray(rng.integers(0, 256, (18, 20, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    """train/ and validation/ with a folder for each class; the 12 training images differ in size from nothing else."""
    folder = tmp_path_factory.mktemp("images")
    for split, count in (("train", 4), ("validation", 2)):
        for label, name in enumerate(NAMES):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                picture(100 * label + number).save(folder / split / name / f"{number}.png")
    return folder


def save_teacher(folder, names=NAMES, kind="vit"):
    torch.manual_seed(0)
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    if kind == "vit":
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        model = ViTForImageClassification(ViTConfig(**sizes, image_size=24, patch_size=8, **labels))
    else:
        model = ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], **labels))
    torch.nn.init.normal_(model.classifier[-1].weight if kind != "vit" else model.classifier.weight)
    model.save_pretrained(folder)
    size = {"height": 24, "width": 24}
    ViTImageProcessor(size=size, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture
def arguments(image_folder, teacher_folder, tmp_path):
    """Command line of a run of seconds; `changes` override it."""

    def build(**changes):
        values = {
            "output_dir": tmp_path / "run",
            "dataset": image_folder,
            "teacher": teacher_folder,
            "student": STUDENT,
            "steps": STEPS,
            "batch_size": 8,
            "micro_batch_size": 4,
            "warmup_steps": 2,
            "log_steps": 1,
            "save_steps": 2,
            "eval_steps": 3,
            "workers": 0,
            "tracker": "none",
            **changes,
        }
        return [empty_recipe(tmp_path), *as_options(values)]

    return build


def empty_recipe(folder):
    path = folder / "empty.yaml"
    path.write_text("{}")
    return str(path)


def losses(folder):
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def command(arguments, processes=1):
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []
    )
    return [sys.executable, *launcher, str(EXAMPLES / "distill.py"), *arguments]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


@pytest.fixture(scope="module")
def whole_run(image_folder, teacher_folder, tmp_path_factory):
    """One run without interruption, that others are held against."""
    folder = tmp_path_factory.mktemp("whole")
    values = {"output_dir": folder / "run", "dataset": image_folder, "teacher": teacher_folder, "student": STUDENT}
    values |= {"steps": STEPS, "batch_size": 8, "micro_batch_size": 4, "warmup_steps": 2, "log_steps": 1}
    values |= {"save_steps": 2, "eval_steps": 3, "workers": 0, "tracker": "none"}
    distill.main([empty_recipe(folder), *as_options(values)])
    return folder / "run"


def test_a_run_leaves_ordinary_checkpoints_metrics_and_a_card(whole_run):
    assert sorted(losses(whole_run)) == list(range(1, STEPS + 1))
    for name in ("final", "best"):
        model = AutoModelForImageClassification.from_pretrained(whole_run / name)
        assert [model.config.id2label[i] for i in range(3)] == NAMES
        assert "steps: 6" in (whole_run / name / "README.md").read_text()
        assert AutoImageProcessor.from_pretrained(whole_run / name).crop_size["height"] == 16
    assert (whole_run / "curves.png").read_bytes().startswith(b"\x89PNG")
    classify = pipeline("image-classification", str(whole_run / "final"), trust_remote_code=True)
    assert {answer["label"] for answer in classify(picture(1), tokens=2)} == set(NAMES)
    last = [json.loads(line) for line in (whole_run / "metrics.jsonl").read_text().splitlines()][-1]
    assert set(last["top1_by_tokens"]) == {"2", "4", "8"}
    assert set(last["top1_by_depth"]) == {"1", "2"}
    model = AutoModelForImageClassification.from_pretrained(whole_run / "final")
    assert len(model.accuracy_table.points) == 3 * 3 * 2  # tokens x widths x depths, for budgets to be spent by


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_loss_curve(arguments, whole_run, tmp_path):
    slow = command(arguments(steps=STEPS), 1)
    process = subprocess.Popen(slow, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = tmp_path / "run"
    deadline = time.monotonic() + 120
    while not (run / "checkpoint-2").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (run / "checkpoint-2").exists()
    assert not (run / "final").exists(), "the run was over before it could be killed"
    distill.main([*arguments(), "--resume"])
    expected, actual = losses(whole_run), losses(run)
    assert actual.keys() == expected.keys()
    for step, loss in expected.items():
        assert actual[step] == pytest.approx(loss, rel=1e-6), step
    final = (AutoModelForImageClassification.from_pretrained(folder / "final") for folder in (run, whole_run))
    for ours, theirs in zip(*(model.parameters() for model in final)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(arguments, whole_run, tmp_path):
    subprocess.run(command(arguments(), 2), env=ENVIRONMENT, check=True, capture_output=True)
    expected, actual = losses(whole_run), losses(tmp_path / "run")
    assert actual.keys() == expected.keys()
    for step, loss in expected.items():
        assert actual[step] == pytest.approx(loss, rel=1e-5), step


def test_processes_that_do_not_see_each_other_are_stopped(arguments, monkeypatch):
    monkeypatch.setenv(
        "WORLD_SIZE", "2"
    )  # as torchrun leaves it; Accelerate takes it up for GPUs, or when told to use CPUs
    with pytest.raises(ValueError, match=r"2 processes were started, but Accelerate sees 1.*ACCELERATE_USE_CPU=true"):
        distill.main(arguments())


def test_tensorboard_gets_the_curves_where_it_is_installed(arguments, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes = arguments(steps=2, eval_steps=0)
    position = changes.index("--tracker")
    distill.main([*changes[:position], *changes[position + 2 :]])  # nobody names a tracker
    (events,) = (tmp_path / "run" / "logs").glob("events*")
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    recorded = {event.step: event.value for event in accumulator.Scalars("loss")}
    assert recorded == pytest.approx(losses(tmp_path / "run"), rel=1e-6)
    assert "top1" in accumulator.Tags()["scalars"]


def test_a_finished_run_is_neither_repeated_nor_overwritten(arguments, whole_run):
    before = {path: path.stat().st_mtime_ns for path in whole_run.rglob("*") if path.is_file()}
    distill.main([*arguments(output_dir=whole_run), "--resume"])
    with pytest.raises(ValueError, match="holds an earlier run: --resume it, --overwrite it, or choose another"):
        distill.main(arguments(output_dir=whole_run))
    assert before == {path: path.stat().st_mtime_ns for path in whole_run.rglob("*") if path.is_file()}


def test_stages_run_in_sequence_each_from_the_average_of_the_one_before(arguments, tmp_path, monkeypatch):
    seen = []
    original = distill.build_student

    def build_student(args, teacher):
        student = original(args, teacher)
        seen.append((args.init_from, student.config.adaptive_axes, [p.clone() for p in student.parameters()]))
        return student

    monkeypatch.setattr(distill, "build_student", build_student)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "stages:\n  - adaptive_axes: [tokens]\n  - adaptive_axes: [tokens, depth]\n    learning_rate: 1.0e-4\n"
    )
    distill.main([str(recipe), *arguments(steps=2)[1:]])
    first = AutoModelForImageClassification.from_pretrained(tmp_path / "run" / "stage1" / "final")
    assert seen[0][0] is None
    assert [axes for _, axes, _ in seen] == [["tokens"], ["tokens", "depth"]]
    for started, ended in zip(seen[1][2], first.parameters()):
        assert_equal(started.data, ended.data)


def test_the_full_model_may_be_favoured(arguments, tmp_path, monkeypatch):
    steps = []
    draw = OnceForAll.draw.__func__

    def noted(cls, *args, **fields):
        steps.append(draw(cls, *args, **fields))
        return steps[-1]

    monkeypatch.setattr(OnceForAll, "draw", classmethod(noted))
    options = {"full_share": 0.5, "partial_gradient": 0.1, "self_distillation": 1.0}
    distill.main(arguments(steps=2, eval_steps=0, output_dir=tmp_path / "run", **options))
    assert [step[3:] for step in steps] == [(0.5, 0.1, 1.0)] * 2
    with pytest.raises(ValueError, match=r"--full_share must be from 0 to 1, got 1\.5"):
        distill.main(arguments(steps=2, output_dir=tmp_path / "other", full_share=1.5))


def test_no_axis_trains_the_full_model_as_a_single_width_does(arguments, tmp_path):
    student = {**STUDENT, "widths": [16]}
    for name, axes in (("none", []), ("width", ["width"])):
        distill.main(arguments(student=student, adaptive_axes=axes, steps=3, eval_steps=0, output_dir=tmp_path / name))
    assert losses(tmp_path / "none") == losses(tmp_path / "width")
    none, width = (
        AutoModelForImageClassification.from_pretrained(tmp_path / name / "final") for name in ("none", "width")
    )
    assert none.config.adaptive_axes == []
    for ours, theirs in zip(none.parameters(), width.parameters()):
        assert_equal(ours.data, theirs.data)


@pytest.mark.slow
def test_two_processes_go_from_stage_to_stage(arguments, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("stages:\n  - adaptive_axes: [tokens]\n  - adaptive_axes: [tokens, depth]\n")
    subprocess.run(
        command([str(recipe), *arguments(steps=2)[1:]], 2), env=ENVIRONMENT, check=True, capture_output=True
    )
    assert sorted(losses(tmp_path / "run" / "stage2")) == [1, 2]
    assert (tmp_path / "run" / "stage2" / "final" / "model.safetensors").exists()


def test_a_stage_may_change_what_is_not_a_weight_but_not_the_sizes(arguments, whole_run, tmp_path):
    changes = {"init_from": whole_run / "final", "steps": 1, "eval_steps": 0}
    distill.main(arguments(**changes, student={**STUDENT, "widths": [4, 16]}))
    assert AutoModelForImageClassification.from_pretrained(tmp_path / "run" / "final").config.widths == [4, 16]
    with pytest.raises(RuntimeError, match=r"size mismatch|mismatched"):
        distill.main(arguments(**changes, output_dir=tmp_path / "other", student={**STUDENT, "hidden_size": 32}))


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_features_are_distilled_from_transformers_and_convolutional_teachers(kind, arguments, tmp_path):
    teacher = save_teacher(tmp_path / "teacher", kind=kind)
    distill.main(arguments(teacher=teacher, distill="features", steps=3))
    recorded = losses(tmp_path / "run")
    assert len(recorded) == 3
    assert all(np.isfinite(list(recorded.values())))
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert -1 <= last["cosine"] <= 1
    assert last["cosine_by_tokens"]["8"] == last["cosine_by_depth"]["2"] == pytest.approx(last["cosine"])


def test_the_teacher_sees_its_own_normalisation_and_size(teacher_folder):
    teacher = teachers.Teacher(teacher_folder, Accelerator(cpu=True))
    view = torch.rand(2, 3, 16, 16)
    pixel_values = teacher.pixel_values(view)
    assert pixel_values.shape == (2, 3, 24, 24)
    restored = (
        pixel_values * torch.tensor([0.4, 0.5, 0.6])[:, None, None] + torch.tensor([0.1, 0.2, 0.3])[:, None, None]
    )
    torch.testing.assert_close(restored.mean((2, 3)), view.mean((2, 3)), atol=0.05, rtol=0)
    expected = teacher.model(pixel_values=pixel_values).logits
    assert_equal(teacher.logits(view), expected)


def test_features_drop_prefix_tokens_and_follow_the_students_grid(teacher_folder):
    teacher = teachers.Teacher(teacher_folder, Accelerator(cpu=True))
    view = torch.rand(2, 3, 24, 24)
    states = teacher.model(pixel_values=teacher.pixel_values(view), output_hidden_states=True).hidden_states[-1]
    assert states.shape[1] == 1 + 9
    assert_equal(teacher.features(view, (3, 3)), states[:, 1:])
    coarse = teacher.features(view, (1, 1))
    torch.testing.assert_close(coarse[:, 0], states[:, 1:].mean(1), atol=0.2, rtol=0.2)
    assert teacher.feature_size() == 8


def test_label_spaces_must_match(arguments, tmp_path):
    teacher = save_teacher(tmp_path / "teacher", names=["apple", "bottle", "cup"])
    with pytest.raises(ValueError, match="must have the same labels, got 3 and 3; 'book' there is 'bottle' here"):
        distill.main(arguments(teacher=teacher))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cached_views": 2, "streaming": True}, "--streaming is for one --dataset without --cached_views"),
        ({"cached_flips": True}, "--cached_flips and --cached_shift need --cached_views"),
        (
            {"cached_views": 2, "cached_shift": 2, "distill": "features"},
            "--cached_shift 2 needs --distill logits: features would not move with the image",
        ),
        ({"label_loss": True, "distill": "features"}, "--label_loss needs --distill logits"),
        ({"init_from": "a", "stem_from": "b"}, "--init_from and --stem_from exclude each other"),
        ({"teacher": "scenes"}, "--dataset .* needs a --teacher"),
        ({"label_loss": True, "mixup_alpha": 0.5}, "--label_loss needs --mixup_alpha 0"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message, arguments):
    with pytest.raises(ValueError, match=message):
        distill.main(arguments(**changes))


def test_the_effective_batch_must_divide(arguments):
    with pytest.raises(ValueError, match=r"--batch_size must be a multiple of .* 3 x 1 = 3, got 8"):
        distill.main(arguments(micro_batch_size=3))


def test_a_loss_that_is_not_finite_stops_the_run_with_a_good_checkpoint(arguments, tmp_path, monkeypatch):
    original = teachers.Teacher.logits
    calls = []

    def logits(self, images):
        calls.append(1)
        return original(self, images) * (float("nan") if len(calls) > 6 else 1)  # two micro-batches a step

    monkeypatch.setattr(teachers.Teacher, "logits", logits)
    with pytest.raises(
        FloatingPointError, match=r"The loss is nan at step 3\. .*checkpoint-3 holds the state before it"
    ):
        distill.main(arguments())
    monkeypatch.undo()
    distill.main([*arguments(), "--resume"])
    assert (tmp_path / "run" / "final").exists()


def test_a_full_disk_stops_the_run_and_leaves_whole_checkpoints(arguments, tmp_path, monkeypatch):
    original = Accelerator.save_state

    def save_state(self, folder, *args, **kwargs):
        original(self, folder, *args, **kwargs)
        if "checkpoint-4" in folder:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Accelerator, "save_state", save_state)
    with pytest.raises(OSError, match=r"checkpoint-4 could not be written: .*No space left on device"):
        distill.main(arguments())
    assert [path.name for path in checkpointing.checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    assert not list((tmp_path / "run").glob(".*part"))
    monkeypatch.undo()
    distill.main([*arguments(), "--resume"])
    assert (tmp_path / "run" / "final").exists()


def test_images_that_cannot_be_read_are_skipped_counted_and_reported(arguments, image_folder, tmp_path, capsys):
    folder = tmp_path / "images"
    subprocess.run(["cp", "-r", image_folder, folder], check=True)
    (folder / "train" / "cup" / "3.png").write_bytes(b"not an image")
    distill.main(arguments(dataset=folder, steps=3))  # 24 views of 12 images: each twice
    assert "2 images could not be read and were left out" in capsys.readouterr().out
    assert len(losses(tmp_path / "run")) == 3


# ---------------------------------------------------------------------------------------------------------------- data


def parquet(image_folder, tmp_path):
    folder = tmp_path / "parquet"
    for split, rows in load_dataset(str(image_folder)).items():
        rows.to_parquet(folder / f"{split}.parquet")
    return {"dataset": folder}


def streamed_parquet(image_folder, tmp_path):
    return {**parquet(image_folder, tmp_path), "streaming": True}


def webdataset(image_folder, tmp_path):
    """Shards as on the hub: n.jpg beside n.cls; the splits are told apart by their file names."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for split in ("train", "validation"):
        with tarfile.open(folder / f"{split}-0000.tar", "w") as tar:
            for number, path in enumerate(sorted((image_folder / split).rglob("*.png"))):
                stored = io.BytesIO()
                Image.open(path).save(stored, "JPEG")
                label = str(NAMES.index(path.parent.name)).encode()
                for name, content in ((f"{number:03}.jpg", stored.getvalue()), (f"{number:03}.cls", label)):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    return {"dataset": folder, "streaming": True}


@pytest.mark.parametrize("form", [parquet, streamed_parquet, webdataset])
def test_data_may_come_as_parquet_or_shards_whole_or_streamed(form, arguments, image_folder, tmp_path):
    distill.main(arguments(**form(image_folder, tmp_path), steps=2))
    assert len(losses(tmp_path / "run")) == 2
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_streamed_run_resumes_where_it_stopped(arguments, image_folder, tmp_path, monkeypatch):
    form = {**streamed_parquet(image_folder, tmp_path), "workers": 1}
    distill.main(arguments(**form, output_dir=tmp_path / "whole"))

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        checkpointing.Metrics, "log", interrupt_after(checkpointing.Metrics.log, calls=5, interrupt=interrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        distill.main(arguments(**form))
    monkeypatch.undo()
    distill.main([*arguments(**form), "--resume"])
    expected, actual = losses(tmp_path / "whole"), losses(tmp_path / "run")
    assert actual.keys() == expected.keys()
    for step, loss in expected.items():
        assert actual[step] == pytest.approx(loss, rel=1e-6), step


def interrupt_after(function, calls, interrupt):
    made = []

    def counted(*args, **kwargs):
        made.append(1)
        return interrupt() if len(made) > calls else function(*args, **kwargs)

    return counted


def test_a_column_or_split_that_is_not_there_is_named(arguments):
    with pytest.raises(ValueError, match=r"--label_column must be one of the columns \['image', 'label'\], got kind"):
        distill.main(arguments(label_column="kind"))
    with pytest.raises(ValueError, match=r"must have the splits 'train' and 'dev', it has"):
        distill.main(arguments(validation_split="dev"))


def augmenter(**changes):
    return augmentation.Augment(augmentation.AugmentationArguments(**changes), image_size=16)


def images_and_labels(count=12):
    return [torch.from_numpy(np.array(picture(i))).permute(2, 0, 1) for i in range(count)], torch.arange(count) % 3


@pytest.mark.parametrize(
    "changes",
    [{}, {"mixup_alpha": 0.0}, {"cutmix_alpha": 0.5, "mixup_alpha": 0.0}, {"erasing": 1.0, "cutmix_alpha": 1.0}],
)
def test_views_depend_on_their_seed_and_on_nothing_else(changes):
    augment, (images, labels) = augmenter(**changes), images_and_labels()
    before = torch.random.get_rng_state()
    first = augment(images, labels, [1, 2])
    assert_equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    again, other = augment(images, labels, [1, 2]), augment(images, labels, [1, 3])
    for name, values in first.items():
        assert_equal(again[name], values)
    assert not torch.equal(first["images"], other["images"])
    assert first["images"].shape == (12, 3, 16, 16)
    assert 0 <= first["images"].min() <= first["images"].max() <= 1


def test_mixed_labels_tell_what_the_images_show():
    plain = [torch.full((3, 16, 16), float(label) * 100, dtype=torch.uint8) for label in range(3)]
    for changes in ({"mixup_alpha": 1.0}, {"mixup_alpha": 0.0, "cutmix_alpha": 1.0}):
        augment = augmenter(randaugment_magnitude=0, crop_scale=[1.0, 1.0], **changes)
        views = augment(plain, torch.arange(3), [0])
        shown = views["share"] * views["labels"] + (1 - views["share"]) * views["other_labels"]
        torch.testing.assert_close(views["images"].mean((1, 2, 3)) * 2.55, shown.float(), atol=0.02, rtol=0)


def test_a_micro_batch_does_not_depend_on_who_asks_for_it(image_folder):
    args = data.DataArguments(dataset=str(image_folder))
    dataset, _ = data.load_splits(args)
    batches = data.MicroBatches(dataset, 4, augmenter(), seed=3)
    alone = batches[5]
    loader = torch.utils.data.DataLoader(batches, sampler=range(3, 7), batch_size=None, num_workers=2)
    in_company = list(loader)[2]
    for name, value in alone.items():
        assert_equal(in_company[name], value)
    epoch = torch.cat([batches[micro]["indices"] for micro in range(3)])
    assert sorted(epoch.tolist()) == list(range(12))  # every image once


def test_cached_views_hold_what_the_teacher_says_of_them(image_folder, teacher_folder, tmp_path):
    accelerator = Accelerator(cpu=True)
    teacher = teachers.Teacher(teacher_folder, accelerator)
    dataset, _ = data.load_splits(data.DataArguments(dataset=str(image_folder)))
    augment = augmenter(mixup_alpha=0.0)
    folder = teachers.cache_views(dataset, augment, teacher, 2, tmp_path, 0, 0, accelerator)
    batches = teachers.CachedMicroBatches(folder, 2, len(dataset), size=4, seed=0)
    first, later = batches[0], batches[3]  # the next epoch shows the other view
    torch.testing.assert_close(first["teacher_logits"], teacher.logits(first["images"]), atol=1e-5, rtol=0)
    assert first["images"].shape == (4, 3, 16, 16)
    assert not torch.equal(first["images"], later["images"])
    stamp = (folder / "view0" / "images.npy").stat().st_mtime_ns
    teachers.cache_views(dataset, augment, teacher, 2, tmp_path, 0, 0, accelerator)
    assert (folder / "view0" / "images.npy").stat().st_mtime_ns == stamp  # made once


def test_cached_features_are_those_of_the_teacher_and_are_mirrored_with_the_view(
    image_folder, teacher_folder, tmp_path, capsys
):
    accelerator, grid = Accelerator(cpu=True), (4, 4)
    teacher = teachers.Teacher(teacher_folder, accelerator)
    folder = tmp_path / "images"
    subprocess.run(["cp", "-r", image_folder, folder], check=True)
    (folder / "train" / "cup" / "3.png").write_bytes(b"not an image")
    dataset, _ = data.load_splits(data.DataArguments(dataset=str(folder)), labelled=False)
    augment = augmenter(mixup_alpha=0.0)
    views = teachers.cache_views(dataset, augment, teacher, 1, tmp_path, 0, 0, accelerator, grid)
    stored = np.load(views / "view0" / "features.npy", mmap_mode="r")
    assert (stored.dtype, stored.shape) == (np.float16, (12, 16, 8))
    assert np.isnan(stored).all(axis=(1, 2)).sum() == 1  # the image that cannot be read
    assert "1 views of 12 images will be kept" in capsys.readouterr().out

    plain, mirrored = (
        teachers.CachedMicroBatches(views, 1, 12, 12, seed=0, flips=flips, answer="features")[1]
        for flips in (False, True)
    )
    assert plain["images"].shape == (11, 3, 16, 16)
    expected = teacher.features(plain["images"], grid)
    torch.testing.assert_close(plain["teacher_features"].float(), expected, atol=2e-3, rtol=2e-3)
    flipped = [not torch.equal(*pair) for pair in zip(plain["images"], mirrored["images"])]
    assert 0 < sum(flipped) < 11
    for features, kept, is_flipped in zip(mirrored["teacher_features"], plain["teacher_features"], flipped):
        kept = kept.reshape(4, 4, 8)
        assert_equal(features.reshape(4, 4, 8), kept.flip(1) if is_flipped else kept)


def test_views_that_do_not_fit_on_the_disk_are_not_begun(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(teachers.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"--cached_views 2 needs 18,912 bytes, .* has 1,000 left"):
        distill.main(arguments(cached_views=2, mixup_alpha=0))
    assert not list(tmp_path.rglob("*.npy"))


def test_a_view_is_kept_whole_or_not_at_all(image_folder, teacher_folder, tmp_path, monkeypatch):
    accelerator = Accelerator(cpu=True)
    teacher = teachers.Teacher(teacher_folder, accelerator)
    dataset, _ = data.load_splits(data.DataArguments(dataset=str(image_folder)))

    def interrupt(self, images, grid):
        raise KeyboardInterrupt

    monkeypatch.setattr(teachers.Teacher, "features", interrupt)
    cache = (dataset, augmenter(mixup_alpha=0.0), teacher, 1, tmp_path, 0, 0, accelerator, (4, 4))
    with pytest.raises(KeyboardInterrupt):
        teachers.cache_views(*cache)
    assert not list(tmp_path.glob("views-*/view0"))
    monkeypatch.undo()
    assert (teachers.cache_views(*cache) / "view0" / "features.npy").exists()


@pytest.fixture
def kept_views(tmp_path) -> Path:
    """One view of twelve images, with logits, as `cache_views` leaves it."""
    rng = np.random.default_rng(0)
    (tmp_path / "view0").mkdir()
    arrays = {"images": rng.integers(1, 256, (12, 3, 4, 4), dtype=np.uint8), "labels": np.arange(12)}
    for name, array in {**arrays, "logits": rng.normal(size=(12, 3)).astype(np.float32)}.items():
        np.save(tmp_path / "view0" / f"{name}.npy", array)
    return tmp_path


def test_cached_views_may_be_mirrored_as_they_are_used(kept_views):
    plain, mirrored = (
        teachers.CachedMicroBatches(kept_views, 1, 12, 12, seed=0, flips=flips) for flips in (False, True)
    )
    kept, used = plain[1], mirrored[1]
    flipped = [not torch.equal(*pair) for pair in zip(kept["images"], used["images"])]
    assert 0 < sum(flipped) < 12
    for image, expected, is_flipped in zip(used["images"], kept["images"], flipped):
        assert_equal(image, expected.flip(-1) if is_flipped else expected)
    assert_equal(used["teacher_logits"], kept["teacher_logits"])
    assert_equal(mirrored[1]["images"], used["images"])


def test_cached_views_may_be_moved_as_they_are_used(kept_views):
    plain, moved = (teachers.CachedMicroBatches(kept_views, 1, 12, 12, seed=0, shift=shift) for shift in (0, 2))
    kept, used = plain[1], moved[1]
    found = set()
    for image, original in zip(used["images"], kept["images"]):
        padded = torch.nn.functional.pad(original, (2, 2, 2, 2))
        places = [(y, x) for y in range(5) for x in range(5) if torch.equal(padded[:, y : y + 4, x : x + 4], image)]
        assert len(places) == 1  # no pixel is changed
        found.update(places)
    assert len(found) > 1
    assert_equal(used["teacher_logits"], kept["teacher_logits"])
    assert_equal(moved[1]["images"], used["images"])


@pytest.mark.parametrize("kind", ["logits", "features"])
def test_cached_views_train(kind, arguments, tmp_path):
    distill.main(arguments(cached_views=2, cached_flips=True, distill=kind, mixup_alpha=0, steps=3))
    assert len(losses(tmp_path / "run")) == 3


# ------------------------------------------------------------------------------------------- several data sets, new labels


@pytest.fixture
def photographs(tmp_path):
    """A parquet file of images of three sizes without labels, and one whose `label` is a mask."""
    folders = []
    for name, extra in (("plain", {}), ("masks", {"label": [picture(index) for index in range(9)]})):
        sizes = [(20, 24), (24, 20), (18, 18)]
        images = [picture(index).resize(sizes[index % 3]) for index in range(9)]
        features = {key: DatasetImage() for key in ("image", *extra)}
        rows = Dataset.from_dict({"image": images, **extra}, features=Features(features))
        rows.to_parquet(tmp_path / name / "train.parquet")
        folders.append(tmp_path / name)
    return folders


@pytest.mark.parametrize("cached_views", [0, 1])
def test_features_are_distilled_from_several_data_sets_without_labels(
    cached_views, arguments, photographs, image_folder, tmp_path
):
    changes = {
        "dataset": [*photographs, image_folder],
        "distill": "features",
        "steps": 3,
        "cached_views": cached_views,
    }
    distill.main(arguments(**changes, train_samples=6))
    assert np.isfinite([*losses(tmp_path / "run").values()]).all()
    assert "distilled on plain, masks, images" in (tmp_path / "run" / "final" / "README.md").read_text()
    args = data.DataArguments(train_samples=6)
    train, validation = data.load_several(args, [str(one) for one in changes["dataset"]], labelled=False)
    assert train.column_names == ["image"]
    assert (len(train), len(validation)) == (18, 1 + 1 + 6)


def test_logits_need_labels_and_those_of_all_data_sets_must_agree(arguments, photographs, image_folder, tmp_path):
    with pytest.raises(ValueError, match=r"--label_column must be one of the columns \['image'\], got None"):
        distill.main(arguments(dataset=photographs[0]))
    distill.main(arguments(dataset=[image_folder, image_folder], steps=1, eval_steps=0))
    for name in ("apple", "pear"):
        (tmp_path / "fruit" / "train" / name).mkdir(parents=True)
        picture(1).save(tmp_path / "fruit" / "train" / name / "1.png")
    with pytest.raises(ValueError, match="must have the same classes"):
        distill.main(arguments(dataset=[image_folder, tmp_path / "fruit"], output_dir=tmp_path / "other"))


def test_images_of_different_sizes_are_cropped_by_size_and_keep_their_places():
    augment = augmenter(crop_scale=[1.0, 1.0], flip=False, randaugment_magnitude=0, mixup_alpha=0.0)
    sizes, calls = [(20, 24), (16, 16), (20, 24), (16, 16), (30, 20)], []
    images = [torch.full((3, *size), 40 * index, dtype=torch.uint8) for index, size in enumerate(sizes)]
    crop = augment.crop
    augment.crop = lambda images: calls.append(len(images)) or crop(images)
    views = augment(images, range(5), [0])["images"]
    assert sorted(calls) == [1, 2, 2]
    expected = (40 * torch.arange(5) / 255)[:, None, None, None].expand(5, 3, 16, 16)
    torch.testing.assert_close(views, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("names", [["cat", "dog"], ["cup", "book", "apple"]], ids=["two", "in another order"])
def test_a_checkpoint_of_other_labels_gets_a_new_classifier_and_everything_is_trained(
    names, arguments, whole_run, image_folder, tmp_path, capsys
):
    folder = tmp_path / "others"
    for split in ("train", "validation"):
        for number, name in enumerate(sorted(names)):
            (folder / split / name).mkdir(parents=True)
            for index in range(4):
                picture(10 * number + index).save(folder / split / name / f"{index}.png")
    names = sorted(names) if len(names) == 2 else names
    column = ClassLabel(names=names)
    for split in ("train", "validation"):  # in the order of `names`
        rows = load_dataset(str(folder), split=split).cast_column("label", column)
        rows.to_parquet(tmp_path / "parquet" / f"{split}.parquet")
    before = AutoModelForImageClassification.from_pretrained(whole_run / "final")
    assert before.accuracy_table is not None
    teacher = save_teacher(tmp_path / "teacher", names)
    changes = {"dataset": tmp_path / "parquet", "teacher": teacher, "label_loss": True, "mixup_alpha": 0}
    distill.main(arguments(**changes, init_from=whole_run / "final", steps=2, eval_steps=0, cached_views=1))
    assert f"A new classifier of {len(names)} classes" in capsys.readouterr().out
    after = AutoModelForImageClassification.from_pretrained(tmp_path / "run" / "final")
    assert [after.config.id2label[index] for index in range(len(names))] == names
    assert after.classifier.weight.shape == (len(names), 16)
    old, new = before.state_dict(), after.state_dict()
    changed = {key for key in new if not torch.equal(new[key], old[key])}
    parts = ("embeddings.patch_embeddings.", "read.", "layers.0.", "layers.1.", "class_readout.")
    assert all(any(key.startswith(f"adaperceiver.{part}") for key in changed) for part in parts)
    head = [key for key in new if key.startswith("classifier.")]
    body = [key for key in new if key not in head]
    assert all((new[key] - old[key]).abs().max() < 0.1 for key in body)  # two steps from where they were


def test_a_checkpoint_with_a_stem_goes_on_with_the_stem_frozen(arguments, tmp_path):
    stem = {"stem_layers": [[6, 2, 3, 0], [8, 2, 5, 2]]}
    distill.main(arguments(student={**STUDENT, **stem}, steps=1, eval_steps=0, output_dir=tmp_path / "first"))
    changes = {"init_from": tmp_path / "first" / "final", "freeze_stem": True, "steps": 2, "eval_steps": 0}
    distill.main(arguments(**changes, student="{}", learning_rate=0.1, warmup_steps=0))
    before, after = (
        AutoModelForImageClassification.from_pretrained(tmp_path / run / "final").adaperceiver.embeddings
        for run in ("first", "run")
    )
    *frozen, projection = before.patch_embeddings
    for old, new in zip(frozen, after.patch_embeddings):
        assert_equal(new.state_dict(), old.state_dict())
    assert not torch.equal(after.patch_embeddings[-1].weight, projection.weight)
    with pytest.raises(ValueError, match="--freeze_stem needs a model with a stem"):
        distill.main(arguments(freeze_stem=True, output_dir=tmp_path / "other"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_teacher_says_the_same(tmp_path):
    folder, accelerator = save_teacher(tmp_path / "teacher", kind="resnet"), Accelerator(cpu=True)
    plain, compiled = (teachers.Teacher(folder, accelerator, compiled=compiled) for compiled in (False, True))
    assert compiled.predict is not compiled.model
    for count in (4, 3):  # a last batch is smaller
        images = torch.rand(count, 3, 16, 16)
        torch.testing.assert_close(compiled.logits(images), plain.logits(images), atol=1e-4, rtol=1e-4)
    images = torch.rand(4, 3, 16, 16)
    torch.testing.assert_close(compiled.features(images, (4, 4)), plain.features(images, (4, 4)), atol=1e-4, rtol=1e-4)


def test_features_leave_the_classifier_of_other_labels_alone(arguments, whole_run, tmp_path):
    teacher = save_teacher(tmp_path / "teacher", ["cat", "dog"])
    distill.main(arguments(teacher=teacher, init_from=whole_run / "final", distill="features", steps=2, eval_steps=0))
    before, after = (
        AutoModelForImageClassification.from_pretrained(folder / "final") for folder in (whole_run, tmp_path / "run")
    )
    assert after.config.id2label == before.config.id2label
    assert_equal(after.classifier.weight, before.classifier.weight)
    assert after.accuracy_table is None  # the body is another one


# ------------------------------------------------------------------------------------------------------------- recipes


def test_a_smoke_run_fits_any_number_of_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    optimization = OptimizationArguments()
    shrink(RunArguments(), data.DataArguments(), optimization)
    assert loop.micro_batches_per_step(optimization, SimpleNamespace(num_processes=3)) == 1


def test_the_command_line_wins_over_the_stage_which_wins_over_the_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "learning_rate: 0.1\nsteps: 5\nstages:\n  - {learning_rate: 0.2}\n  - {steps: 7, clip_norm: 2.0}\n"
    )
    groups = [RunArguments, OptimizationArguments]
    (run1, first), (run2, second) = parse(groups, [str(recipe), "--clip_norm", "1", "--output_dir", "x"], recipe)
    assert (first.learning_rate, first.steps, first.clip_norm) == (0.2, 5, 1.0)
    assert (second.learning_rate, second.steps, second.clip_norm) == (0.1, 7, 1.0)
    assert (run1.output_dir, run2.output_dir) == (os.path.join("x", "stage1"), os.path.join("x", "stage2"))


def test_an_unknown_key_or_recipe_is_named(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("lerning_rate: 0.1\n")
    with pytest.raises(ValueError, match="lerning_rate"):
        parse([RunArguments], [str(recipe)], recipe)
    with pytest.raises(ValueError, match=r"There is no recipe nothing\.yaml; those at hand are .*scenes\.yaml"):
        parse([RunArguments], ["nothing.yaml"], recipe)
