"""The training loop on a toy model: what interrupted, repeated and simultaneous runs keep, refuse and say."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT, assert_equal
from datasets import Dataset, Features, Value
from datasets import Image as DatasetImage

from adaperceiver.training import checkpointing, data, loop
from adaperceiver.training.arguments import OptimizationArguments, RunArguments
from adaperceiver.training.data import (
    DataArguments,
    MicroBatches,
    StreamedMicroBatches,
    classes_seen,
    hold_out,
    validation_batches,
)
from adaperceiver.training.scenes import scenes


class Numbers(torch.utils.data.Dataset):
    """Micro-batches by their number."""

    def __getitem__(self, micro):
        return {"images": torch.randn(4, 3, generator=torch.Generator().manual_seed(micro))}


class Failure(Exception):
    pass


def run(folder, steps=6, evaluate=lambda model: {"score": 0.5}, resume=False, overwrite=False, **changes):
    """A run of seconds; the final model, or None if there was nothing to do."""
    torch.manual_seed(0)
    of_run = {name: changes.pop(name) for name in ("seed", "eval_steps") if name in changes}
    values = {"output_dir": str(folder), "tracker": "none", "log_steps": 1, "save_steps": 2, "eval_steps": 0}
    options = RunArguments(**{**values, **of_run, "resume": resume, "overwrite": overwrite})
    values = {"steps": steps, "batch_size": 4, "micro_batch_size": 4, "optimizer": "adamw", "warmup_steps": 0}
    optimization = OptimizationArguments(**{**values, **changes})
    session = loop.start(options, DataArguments(workers=0), optimization)
    if session is None:
        return None

    def save(model, part, metrics):
        part.mkdir(parents=True)
        torch.save(model.state_dict(), part / "model.pt")

    def loss_of(model, batch, step):
        return model(batch["images"]).square().mean()

    loop.train(session, torch.nn.Linear(3, 2), Numbers(), loss_of, evaluate, save, optimization.total_steps(None))
    return torch.load(folder / "final" / "model.pt")


def fail(model):
    raise Failure


def steps_of(folder, name):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if name in line]


def test_a_final_evaluation_that_fails_loses_no_step(tmp_path):
    whole = run(tmp_path / "whole")
    with pytest.raises(Failure):
        run(tmp_path / "run", evaluate=fail)
    assert checkpointing.checkpoints(tmp_path / "run")[-1].name == "checkpoint-6"
    again = run(tmp_path / "run", resume=True)
    for name, value in whole.items():
        assert_equal(again[name], value)
    for folder in ("whole", "run"):
        assert steps_of(tmp_path / folder, "loss") == [1, 2, 3, 4, 5, 6]
        assert steps_of(tmp_path / folder, "score") == [6]


def test_an_evaluation_that_failed_is_made_when_the_run_resumes(tmp_path):
    scores = iter([0.1, 0.2])
    run(tmp_path / "whole", evaluate=lambda model: {"score": next(scores)}, eval_steps=4)
    with pytest.raises(Failure):
        run(tmp_path / "run", evaluate=fail, eval_steps=4)
    scores = iter([0.1, 0.2])
    run(tmp_path / "run", evaluate=lambda model: {"score": next(scores)}, eval_steps=4, resume=True)
    assert steps_of(tmp_path / "run", "score") == steps_of(tmp_path / "whole", "score") == [4, 6]


def test_a_cut_last_line_of_the_metrics_does_not_stop_a_run_from_resuming(tmp_path):
    with pytest.raises(Failure):
        run(tmp_path, evaluate=fail, eval_steps=4)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    run(tmp_path, resume=True)
    assert steps_of(tmp_path, "loss") == [1, 2, 3, 4, 5, 6]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0], "half", *lines[1:]]))
    with pytest.raises(ValueError, match=r"Line 2 of .*metrics\.jsonl must be JSON, got 'half'"):
        checkpointing.read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "--seed was 0, not 1"),
        ({"learning_rate": 0.5}, "--learning_rate was 0.001, not 0.5"),
        ({"batch_size": 8}, "--batch_size was 4, not 8"),
        ({"ema_decay": 0.5}, "--ema_decay was 0.999, not 0.5"),
        ({"steps": 3}, "--steps was 6, not 3"),
    ],
)
def test_a_run_resumes_with_the_arguments_of_before_alone(changes, message, tmp_path):
    with pytest.raises(Failure):
        run(tmp_path, evaluate=fail, eval_steps=4)
    with pytest.raises(ValueError, match=message):
        run(tmp_path, resume=True, **changes)
    assert not (tmp_path / "final").exists()
    run(tmp_path, resume=True, eval_steps=5)  # what changes nothing of the training may change
    with pytest.raises(ValueError, match=message):  # of a finished run, too
        run(tmp_path, resume=True, **changes)


def test_data_and_models_may_have_moved_when_a_run_resumes(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    before = {"dataset": ["old/cats", "old/dogs"], "teacher": "old/vit", "adaptive_axes": ["tokens"]}
    checkpointing.record_arguments(tmp_path, before)
    checkpointing.check_resumed(tmp_path, {**before, "dataset": ["new/cats", "new/dogs"], "teacher": "/vit"})
    with pytest.raises(ValueError, match="--dataset was old/cats old/dogs, not old/cats"):
        checkpointing.check_resumed(tmp_path, {**before, "dataset": ["old/cats"]})
    checkpointing.check_resumed(tmp_path, {**before, "workers": 3})
    checkpointing.record_arguments(tmp_path, {**before, "streaming": True, "workers": 1})
    with pytest.raises(ValueError, match="--workers was 1, not 3"):
        checkpointing.check_resumed(tmp_path, {**before, "streaming": True, "workers": 3})
    with pytest.raises(ValueError, match="--adaptive_axes was tokens, not nothing"):
        checkpointing.check_resumed(tmp_path, {**before, "adaptive_axes": []})


def test_a_run_that_has_more_steps_than_are_asked_for_is_refused(tmp_path, capsys):
    with pytest.raises(Failure):
        run(tmp_path, evaluate=fail)
    (tmp_path / "arguments.json").unlink()  # as runs of before had none
    with pytest.raises(ValueError, match="has been trained for 6 steps, more than the 5 of this run"):
        run(tmp_path, steps=5, resume=True)
    assert "has no arguments.json" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_named_with_the_one_before(tmp_path):
    whole = run(tmp_path / "whole")
    with pytest.raises(Failure):
        run(tmp_path / "run", evaluate=fail, eval_steps=4)
    newest = tmp_path / "run" / "checkpoint-4"
    (newest / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"checkpoint-4 cannot be loaded\. Remove it to go on from checkpoint-2"):
        run(tmp_path / "run", resume=True)
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    again = run(tmp_path / "run", resume=True)
    for name, value in whole.items():
        assert_equal(again[name], value)


def test_overwriting_removes_an_earlier_run_only_when_the_next_one_trains(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match="--batch_size must be a multiple"):
        run(tmp_path, overwrite=True, batch_size=6)
    assert (tmp_path / "final").exists()
    with pytest.raises(Failure):
        run(tmp_path, overwrite=True, evaluate=fail)
    assert not (tmp_path / "final").exists()


@pytest.mark.slow
def test_two_processes_do_not_run_into_one_folder(tmp_path):
    code = f"""
        import time
        from pathlib import Path
        from adaperceiver.training.checkpointing import lock
        lock(Path({str(tmp_path)!r}))
        print("locked", flush=True)
        time.sleep(60)
    """
    other = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(ValueError, match=rf"--output_dir {tmp_path} is in use by process {other.pid} on "):
            run(tmp_path)
    finally:
        other.kill()
        other.wait()
    run(tmp_path)  # the file of a process that is gone is no obstacle
    assert str(os.getpid()) in (tmp_path / ".lock").read_text()


# ---------------------------------------------------------------------------------------------------------------- data


def streamed(shards, count=12):
    rows = scenes(count).select_columns(["image", "label"]).cast_column("image", DatasetImage(decode=False))
    return rows.to_iterable_dataset(num_shards=shards)


def view(images, labels, seed):
    return {"images": torch.stack(images) / 255, "labels": torch.tensor(labels)}


def test_workers_without_a_shard_are_not_started(capsys):
    def batches(skip):
        return StreamedMicroBatches(streamed(2), 4, view, seed=0, skip=skip)

    accelerator = Accelerator(cpu=True)
    loader = loop.loader_from(0, 4, batches, workers=3, accumulation=1, accelerator=accelerator)
    assert loader.num_workers == 2
    assert "--workers 3 is more than the 2 shards" in capsys.readouterr().out
    micros = iter(loader)
    assert sorted(int(next(micros)["micro"]) for _ in range(4)) == [0, 1, 2, 3]


def test_a_stream_without_images_is_an_error():
    empty = streamed(1).filter(lambda row: False)
    with pytest.raises(ValueError, match="The stream has no images"):
        next(iter(StreamedMicroBatches(empty, 4, view, seed=0, skip=0)))


def test_a_stream_is_not_decoded_where_its_column_is_renamed(tmp_path):
    rows = scenes(2).select_columns(["image", "label"]).cast_column("image", DatasetImage(decode=False)).to_list()
    rows[1]["image"] = {"bytes": b"no image", "path": None}
    features = Features({"photo": DatasetImage(), "label": Value("int64")})
    columns = {"photo": [row["image"] for row in rows], "label": [0, 1]}
    Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "train.parquet")
    args = data.DataArguments(dataset=str(tmp_path / "train.parquet"), streaming=True, train_split="train")
    stored = data.stored_splits(args, streaming=True)["train"]
    read = [data.read_labelled(row) for row in data.standard_columns(stored, "train", args)]
    assert [one is None for one in read] == [False, True]


def with_gaps():
    """Eight samples, of which the second has no image, the third a damaged one, and the fourth no label."""
    rows = scenes(8).select_columns(["image", "label"]).cast_column("image", DatasetImage(decode=False)).to_list()
    rows[1]["image"] = None
    rows[2]["image"] = {"bytes": rows[2]["image"]["bytes"][:60], "path": None}
    rows[3]["label"] = None
    features = Features(image=DatasetImage(decode=False), label=Value("int64"))
    return Dataset.from_list(rows, features=features)


def test_null_and_unreadable_images_are_left_out_of_training_and_validation():
    dataset = with_gaps()
    batch = MicroBatches(dataset, 4, view, seed=0, shuffle=False)[0]
    assert batch["indices"].tolist() == [0]
    accelerator = Accelerator(cpu=True)

    def processor(images, return_tensors):
        return type("Views", (), {"pixel_values": torch.stack(images) / 255})

    (found,) = validation_batches(dataset, processor, 8, accelerator)
    assert sum(map(len, hold_out(dataset, 0.25))) == 8
    assert classes_seen(dataset) == {*dataset["label"]} - {None}
    assert found[1].tolist() == [dataset["label"][index] for index in (0, 4, 5, 6, 7)]


def test_cross_entropies_are_kept_for_the_same_weights_and_images_alone(tiny_model, tmp_path):
    from adaperceiver import AdaPerceiverForImageClassification
    from adaperceiver.training.policies import cross_entropies

    model, accelerator = tiny_model(AdaPerceiverForImageClassification, router_ratio=0.5), Accelerator(cpu=True)
    rows = scenes(6).select_columns(["image", "label"]).cast_column("image", DatasetImage(decode=False))

    def losses(dataset=rows):
        return cross_entropies(model, MicroBatches(dataset, 2, view, seed=0), tmp_path, accelerator)

    first = losses()
    with torch.no_grad():
        model.adaperceiver.router.requires_grad_(False)
        for parameter in model.adaperceiver.router.parameters():
            parameter.zero_()
        assert_equal(losses(), first)
        assert len(list(tmp_path.iterdir())) == 1
        model.classifier.weight.mul_(2)
    assert not torch.equal(losses(), first)
    assert len(losses(rows.select([0, 1]))) == 2
