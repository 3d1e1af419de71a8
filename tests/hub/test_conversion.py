"""Research checkpoints become folders of ours: every tensor finds its place, or nothing is written."""

import json
import re
from pathlib import Path

import convert_official_checkpoint as converter
import pytest
import torch
from conftest import assert_equal, command_line, run_script
from official import FIXTURES, OFFICIAL, TINY, official_model, official_tensors, recorded
from safetensors.torch import save_file

from adaperceiver import (
    AdaPerceiverConfig,
    AdaPerceiverForDistillation,
    AdaPerceiverModel,
    AdaPerceiverPreTrainedModel,
)
from adaperceiver.official_adaperceiver import infer_task, official_weights, our_name


TASKS = list(converter.TASKS)
SECTIONS = {"classification": "classification", "distill": "distillation", "seg": "segmentation", "depth": "depth"}
# One config for all tasks: the numbers of classes, features and depth bins are what the tensors show.
CONFIG = {name: value for name, value in OFFICIAL.items() if name != "num_classes"}


def full_size(task: str) -> tuple[dict[str, torch.Tensor], int]:
    """Names and shapes of the released model, and its number of parameters."""
    tensors = {}
    for section in (FIXTURES / "official_names.txt").read_text().split("== ")[1:]:
        header, *lines = section.splitlines()
        name, _, parameters = header.split()[:3]
        if SECTIONS[name] == task:
            for line in lines:
                template, shape, copies = re.fullmatch(r"\s*(\S+)\s+\((.*)\)\s+x(\d+)", line).groups()
                sizes = [int(size) for size in shape.split(",") if size]
                for index in range(int(copies)):
                    tensors[template.replace("{i}", str(index))] = torch.empty(sizes, device="meta")
            return tensors, int(parameters)
    raise AssertionError(task)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the tiny reference's config.json, where the script is run."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def convert(here, capsys):
    """Run the script in this process; returns what it prints."""

    def run_here(**arguments) -> str:
        converter.main(command_line(**arguments))
        return capsys.readouterr().out

    return run_here


@pytest.fixture
def refusal(convert):
    """The message with which the script gives up, once it is sure that no file has changed."""

    def run_here(**arguments) -> str:
        def files():
            return {path: path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}

        before = files()
        with pytest.raises((ValueError, OSError)) as stopped:
            convert(**arguments)
        assert files() == before
        return str(stopped.value)

    return run_here


def assert_converted(folder: str | Path, task: str = "classification") -> AdaPerceiverPreTrainedModel:
    """`folder` holds the model that the reference weights make, bit for bit."""
    model_class = converter.TASKS[task]
    expected, model = official_model(model_class), model_class.from_pretrained(folder)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert_equal(model.state_dict()[name], tensor)
    unseen = {"classification": ("feature_size", "num_depth_bins"), "depth": ()}.get(task, ("num_depth_bins",))
    for name in TINY.keys() - set(unseen):
        assert getattr(model.config, name) == TINY[name], name
    return model


# --- names, shapes and the config


@pytest.mark.parametrize(
    ("task", "sizes"),
    [
        ("classification", {"num_labels": 1000}),
        ("distillation", {"num_labels": 11821, "feature_size": 1280}),
        ("segmentation", {"num_labels": 150, "feature_size": 1280}),
        ("depth", {"num_depth_bins": 256, "feature_size": 1280}),
    ],
)
def test_every_tensor_of_the_released_models_has_one_place_in_the_papers_model(task, sizes):
    tensors, parameters = full_size(task)
    assert infer_task(tensors) == task
    config, weights = official_weights(converter.TASKS[task], tensors, {})
    with torch.device("meta"):
        model = converter.TASKS[task](config)
    assert len(weights) == len(tensors)
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    assert model.num_parameters() == parameters
    free = {"id2label": None, "label2id": None, "output_tokens": None}
    assert {**config.to_dict(), **free} == {**AdaPerceiverConfig(**sizes).to_dict(), **free}


@pytest.mark.parametrize(
    "name", [name for name in official_tensors("distillation") if not re.match(r"blocks\.[012]", name)]
)
def test_no_tensor_can_be_missing_unnoticed(name):
    tensors = official_tensors("distillation")
    del tensors[name]
    with pytest.raises(ValueError, match=re.escape(f"missing: {our_name(name)}")):
        official_weights(converter.TASKS["distillation"], tensors, OFFICIAL)


# --- from file to folder


RECORDED = {  # the name of a task's outputs in the recordings, and their names there and here
    "classification": ("cls", {"logits": "logits"}),
    "distillation": ("distill", {"logits": "logits", "features": "features"}),
    "segmentation": ("seg", {"pred": "logits"}),
    "depth": ("depth", {"pred": "predicted_depth"}),
}
POINTS = {"": "/t16_wNone_d4", "/tokens=4": "/t4_wNone_d4", "/tokens=8,width=32,depth=2": "/t8_w32_d2"}


def record(task: str, change: float = 0.0) -> Path:
    """Recorded outputs of the official model, as the script takes them; `change` goes to the last point."""
    part, outputs = RECORDED[task]
    tensors = {"pixel_values": recorded()["input/x"]}
    for official_name, name in outputs.items():
        tensors |= {name + ours: recorded()[f"{part}/{official_name}{point}"] for ours, point in POINTS.items()}
        tensors[f"{name}/tokens=8,width=32,depth=2"] = tensors[f"{name}/tokens=8,width=32,depth=2"] + change
        bidirectional = recorded().get(f"{part}_bidir/{official_name}/t8_wNone_d4")
        if bidirectional is not None:
            tensors[f"{name}/tokens=8,attention=bidirectional"] = bidirectional
    save_file(tensors, "outputs.safetensors")
    return Path("outputs.safetensors")


@pytest.mark.parametrize("task", TASKS)
def test_a_checkpoint_of_each_task_is_converted_and_gives_the_recorded_outputs(convert, task):
    save_file(official_tensors(task), "official.safetensors")
    printed = convert(checkpoint="official.safetensors", output="ours", expected=record(task), tolerance=2e-5)
    differences = re.findall(r"max abs difference to recorded (\S+): (\S+)", printed)
    assert len(differences) == {"distillation": 6}.get(task, 4)
    assert 0 < max(float(difference) for _, difference in differences) <= 2e-5
    assert_converted("ours", task)
    names = {"config.json", "official.safetensors", "ours", "outputs.safetensors"}
    assert {path.name for path in Path().iterdir()} == names


def averaged(tensors):
    return {"n_averaged": torch.tensor(7), **{f"module.{name}": tensor for name, tensor in tensors.items()}}


def with_older_shapes(tensors):
    tensors["patch_embed.pos_embed"] = tensors["patch_embed.pos_embed"][0]
    tensors["process_latents.token"] = tensors["process_latents.token"][None, None]
    tensors["output_latents.token"] = tensors["output_latents.token"][0]
    return tensors


def with_zeros_beside(tensors):
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    return {"model": zeros, "ema": averaged(tensors) | {"ema_n_averaged": torch.tensor(7)}}


NESTED = {  # what a .pth file of the research code may hold, and the `--key` for it
    "a state dict": (lambda tensors: tensors, None),
    "older shapes": (with_older_shapes, None),
    "averaged": (averaged, None),
    "one of model": (lambda tensors: {"model": tensors, "epoch": 3, "optimizer": {"state": {0: torch.ones(2)}}}, None),
    "compiled": (lambda tensors: {"x": {f"module._orig_mod.module.{name}": t for name, t in tensors.items()}}, None),
    "compiled blocks": (
        lambda tensors: {name.replace(".attn", "._orig_mod.attn"): tensors[name] for name in tensors},
        None,
    ),
    "ema of two": (with_zeros_beside, "ema"),
    "deeper": (lambda tensors: {"model": tensors, "model_ema": {"state_dict": tensors}}, "model_ema.state_dict"),
    "doubles": (lambda tensors: {name: tensor.double() for name, tensor in tensors.items()}, None),
}


@pytest.mark.parametrize("how", NESTED)
def test_research_checkpoints_are_unwrapped(convert, how):
    nest, key = NESTED[how]
    torch.save(nest(official_tensors("classification")), "last.pth")
    convert(checkpoint="last.pth", output="ours", **({} if key is None else {"key": key}))
    assert_converted("ours")


def test_the_config_that_is_named_wins_over_the_one_beside_the_weights(convert):
    save_file(official_tensors("classification"), "official.safetensors")
    Path("other.json").write_text(json.dumps({**OFFICIAL, "num_heads": 8, "rope_theta": 100}))
    printed = convert(checkpoint="official.safetensors", output="ours", config="other.json")
    config = AdaPerceiverConfig.from_pretrained("ours")
    assert (config.num_attention_heads, config.rope_theta, config.num_labels) == (8, 100, 10)
    assert "config: other.json" in printed


def test_without_a_config_the_model_is_the_papers_and_has_to_fit(refusal):
    Path("config.json").unlink()
    save_file(official_tensors("classification"), "official.safetensors")
    message = refusal(checkpoint="official.safetensors", output="ours")
    assert "missing: adaperceiver.layers.20.norm1.weight" in message
    assert "shape mismatch: blocks.0.norm1.weight is (64,), not (832,)" in message
    assert "output_adapter.ffn.bias" not in message  # as many labels as the tensors show


def test_a_hub_id_is_loaded_from_the_cache(tmp_path):
    """The hub's own layout of downloads."""
    repository = tmp_path / "cache" / "models--pjajal--adaperceiver-v1"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    save_file(official_tensors("distillation"), snapshot / "model.safetensors")
    (snapshot / "config.json").write_text(json.dumps({**OFFICIAL, "output_feat_dim": 80}))
    for revision in ("main", snapshot.name):
        arguments = {"revision": revision, "cache_dir": tmp_path / "cache"}
        AdaPerceiverForDistillation.from_pretrained("pjajal/adaperceiver-v1", **arguments).save_pretrained(tmp_path)
        assert_converted(tmp_path, "distillation")


@pytest.mark.slow
def test_bad_input_is_one_line_and_exit_code_2(here):
    result = run_script("convert_official_checkpoint.py", here, checkpoint="nowhere.pth", output="ours")
    assert result.returncode == 2
    assert result.stderr == "error: --checkpoint must be a file that exists, got nowhere.pth.\n"


# --- what is refused leaves nothing behind


@pytest.mark.parametrize("change", [1e-3, float("nan")])
def test_a_model_with_other_outputs_than_the_recorded_ones_is_not_written(refusal, change):
    save_file(official_tensors("segmentation"), "official.safetensors")
    message = refusal(checkpoint="official.safetensors", output="ours", expected=record("segmentation", change))
    assert message == "further than --tolerance 0.0001 from the recorded logits/tokens=8,width=32,depth=2."


class Code:
    """What a pickle may hold that runs when it is loaded."""

    def __reduce__(self):
        return (Path.touch, (Path("touched"),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with one official checkpoint, and much that is none; what is refused leaves it as it is."""
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_files()
    return folder


def write_files() -> None:
    tensors = official_tensors("classification")
    Path("config.json").write_text(json.dumps(OFFICIAL))
    Path("heads.json").write_text(json.dumps({**OFFICIAL, "num_heads": 13}))
    Path("gated.json").write_text(json.dumps({**OFFICIAL, "ffn_layer": "swiglu"}))
    Path("part.json").write_text(json.dumps({"num_heads": 4}))
    save_file(tensors, "official.safetensors")
    torch.save({"model": tensors, "ema": tensors}, "two.pth")
    torch.save({"model": tensors, "code": Code()}, "code.pth")
    torch.save([1, 2], "list.pth")
    torch.save({**tensors, "module.blocks.0.norm1.bias": torch.ones(64)}, "twice.pth")
    torch.save({**tensors, "epoch": 3}, "number.pth")
    save_file({"blocks.0.attn.qkv.weight": torch.ones(2), "cls_token": torch.ones(2)}, "vit.safetensors")
    Path("damaged.safetensors").write_bytes(b"\x10")
    Path("damaged.pth").write_bytes(b"")
    Path("list.json").write_text("[1]")
    Path("taken").mkdir()
    Path("taken/thesis.txt").write_text("years of work")
    AdaPerceiverModel(AdaPerceiverConfig(**TINY)).save_pretrained("model")
    pixel_values = torch.zeros(1, 3, 32, 32)
    for name, outputs in {
        "no_images": {"logits": torch.zeros(1, 10)},
        "no_outputs": {"pixel_values": pixel_values},
        "features": {"pixel_values": pixel_values, "features": torch.zeros(1, 64, 80)},
        "argument": {"pixel_values": pixel_values, "logits/exit_threshold=1": torch.zeros(1, 10)},
        "width": {"pixel_values": pixel_values, "logits/width=65": torch.zeros(1, 10)},
        "shape": {"pixel_values": pixel_values, "logits": torch.zeros(1, 9)},
    }.items():
        save_file(outputs, f"{name}.safetensors")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint": "no/where"}, "--checkpoint must be a file that exists, got no/where"),
        ({"checkpoint": "model"}, "--checkpoint must be a file that exists, got model"),
        ({"checkpoint": "vit.safetensors"}, r"official AdaPerceiver, got: blocks\.0\.attn\.qkv\.weight, cls_token"),
        ({"checkpoint": "model/model.safetensors"}, r"official AdaPerceiver, got: class_readout\."),
        ({"checkpoint": "damaged.safetensors"}, r"damaged\.safetensors is damaged"),
        ({"checkpoint": "damaged.pth"}, r"damaged\.pth is damaged"),
        ({"checkpoint": "code.pth"}, r"code\.pth .* holds more than tensors"),
        ({"checkpoint": "list.pth"}, r"list\.pth must hold a dict of tensors, got list"),
        ({"checkpoint": "twice.pth"}, r"one tensor for each name; module\.blocks\.0\.norm1\.bias is there beside"),
        ({"checkpoint": "number.pth"}, "one tensor for each name; epoch is a int"),
        ({"checkpoint": "two.pth"}, r"--key must be one of model, ema for two\.pth, got None"),
        ({"checkpoint": "two.pth", "key": "best"}, r"--key must be one of model, ema for two\.pth, got best"),
        ({"key": "ema"}, r"--key must be left out for official\.safetensors, got ema"),
        ({"config": "nowhere.json"}, r"--config must be a file that exists, got nowhere\.json"),
        ({"config": "list.json"}, r"--config must be that of an official model, got list\.json"),
        ({"config": "part.json"}, r"--config must be that of an official model, got part\.json"),
        ({"config": "model/config.json"}, r"--config must be that of an official model, got model/config\.json"),
        ({"config": "heads.json"}, r"`num_attention_heads` must divide `hidden_size` \(64\), got 13"),
        ({"config": "gated.json"}, r"`ffn_layer` in gated\.json must be 'mlp' .* got 'swiglu'"),
        ({"expected": "nowhere.safetensors"}, r"--expected must be a file that exists, got nowhere\.safetensors"),
        ({"expected": "no_images.safetensors"}, "--expected must hold `pixel_values` and outputs, .* with logits"),
        ({"expected": "no_outputs.safetensors"}, "--expected must hold .* with pixel_values"),
        ({"expected": "features.safetensors"}, "outputs of AdaPerceiverForImageClassification, .*got features"),
        ({"expected": "argument.safetensors"}, "--expected must hold .*, got logits/exit_threshold=1"),
        ({"expected": "width.safetensors"}, "`width` must be an integer from 1 to 64, got 65"),
        ({"expected": "shape.safetensors"}, r"--expected has logits of shape \(1, 9\), not \(1, 10\)"),
        ({"output": "official.safetensors"}, r"--output must be a new or empty folder, got official\.safetensors"),
        ({"output": "taken"}, "--output must be a new or empty folder, got taken"),
        ({"output": "model"}, "--output must be a new or empty folder, got model"),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_what_cannot_be_converted_is_refused_and_nothing_is_written(folder, refusal, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    assert re.search(message, refusal(**{"checkpoint": "official.safetensors", "output": "ours", **arguments}))


def test_an_empty_folder_is_free(convert):
    save_file(official_tensors("classification"), "official.safetensors")
    Path("empty").mkdir()
    convert(checkpoint="official.safetensors", output="empty")
    assert_converted("empty")
