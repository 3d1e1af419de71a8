"""Official checkpoints become ours: every tensor finds its place, or nothing is written."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import assert_equal, command_line, run_script
from official import FIXTURES, TINY, converter, official_model, official_tensors, recorded
from safetensors.torch import save_file

from adaperceiver import (
    AdaPerceiverConfig,
    AdaPerceiverForImageClassification,
    AdaPerceiverModel,
    AdaPerceiverPreTrainedModel,
)


TASKS = list(converter.TASKS)
SECTIONS = {"classification": "classification", "distill": "distillation", "seg": "segmentation", "depth": "depth"}
# What the shapes of the tiny reference do not tell.
OPTIONS = {"num_attention_heads": 4, "max_latent_tokens": 16, "token_granularities": [4, 8, 16]}


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
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def convert(here, monkeypatch, capsys):
    """Run the script in this process, in a folder of its own; returns what it prints."""

    def run(**arguments) -> str:
        flags = [f"--{name}" for name, value in arguments.items() if value is True]
        lists = {name: value for name, value in arguments.items() if isinstance(value, list)}
        others = {name: value for name, value in arguments.items() if value is not True and name not in lists}
        words = [word for name, values in lists.items() for word in (f"--{name}", *map(str, values))]
        command = ["convert_official_checkpoint.py", *command_line(**others), *words, *flags]
        monkeypatch.setattr(sys, "argv", command)
        converter.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def refusal(convert):
    """The message with which the script gives up, once it is sure that no file has changed."""

    def run(**arguments) -> str:
        def files():
            return {path: path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}

        before = files()
        with pytest.raises(SystemExit) as stopped:
            convert(**arguments)
        assert isinstance(stopped.value.code, str)  # goes to stderr, and the exit status is 1
        assert files() == before
        return stopped.value.code

    return run


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


@pytest.mark.parametrize("task", TASKS)
def test_every_tensor_of_the_released_models_has_one_place_in_ours(task):
    tensors, parameters = full_size(task)
    assert converter.infer_task(list(tensors)) == task
    ours = converter.rename(tensors, task)
    assert len(ours) == len(tensors)
    with torch.device("meta"):
        model = converter.TASKS[task](converter.infer_config(ours))
    wanted = model.state_dict()
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in wanted.items()
    }
    assert model.num_parameters() == parameters


@pytest.mark.parametrize(
    ("task", "sizes"),
    [
        ("classification", {"num_labels": 1000}),
        ("distillation", {"num_labels": 11821, "feature_size": 1280}),
        ("segmentation", {"num_labels": 150, "feature_size": 1280}),
        ("depth", {"num_depth_bins": 256, "feature_size": 1280}),
    ],
)
def test_the_config_of_the_released_models_is_the_papers(task, sizes):
    config = converter.infer_config(converter.rename(full_size(task)[0], task)).to_dict()
    assert config == AdaPerceiverConfig(**sizes).to_dict()


def gated(tensors):
    for block in range(4):
        for kind in ("weight", "bias"):
            tensors[f"blocks.{block}.ffn.gate.{kind}"] = tensors[f"blocks.{block}.ffn.fc1.{kind}"].clone()


def without(pattern):
    def change(tensors):
        for name in [name for name in tensors if re.search(pattern, name)]:
            del tensors[name]

    return change


def with_hidden_units(units):
    def change(tensors):
        for name in tensors:
            if "fc1" in name:
                tensors[name] = torch.randn(units, *tensors[name].shape[1:])
            elif name.endswith("fc2.weight"):
                tensors[name] = torch.randn(64, units)

    return change


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        (gated, "use_swiglu_ffn", True),
        (without(r"\.ls[12]\."), "layerscale_value", None),
        (without(r"attn\.[qkv]\.bias"), "qkv_bias", False),
        (without(r"attn\.proj\.bias"), "proj_bias", False),
        (without(r"fc[12]\.bias"), "ffn_bias", False),
        (without(r"patch_embed\.(norm|ffn)\."), "use_embed_ffn", False),
        (without(r"blocks\.[123]\."), "num_hidden_layers", 1),
        (with_hidden_units(256), "ffn_ratio", 4.0),
        (with_hidden_units(171), "ffn_ratio", 2.68),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_shapes_and_names_tell_the_variants_of_the_model(change, field, value):
    tensors = official_tensors("classification")
    change(tensors)
    config = converter.build_model(tensors, "classification", **OPTIONS).config
    assert getattr(config, field) == value
    plain = converter.infer_config(
        converter.rename(official_tensors("classification"), "classification"), **OPTIONS
    ).to_dict()
    changed = {name for name, other in config.to_dict().items() if other != plain[name]}
    assert changed - {"out_features", "out_indices"} == {field}  # stages of the backbone are numbered by the blocks


@pytest.mark.parametrize("hidden_size", [64, 100, 832, 1024])
def test_the_ffn_ratio_gives_the_hidden_units_back(hidden_size):
    for hidden_units in range(1, 4 * hidden_size + 1, 7):
        assert int(hidden_size * converter.infer_ffn_ratio(hidden_size, hidden_units)) == hidden_units
    assert converter.infer_ffn_ratio(hidden_size, int(hidden_size * 2.57)) == 2.57


# --- from file to folder


def record(task: str, changes: float = 0.0) -> Path:
    """Recorded outputs of the official model, at three operating points, as the script takes them."""
    part, outputs = {
        "classification": ("cls", {"logits": "logits"}),
        "distillation": ("distill", {"logits": "logits", "features": "features"}),
        "segmentation": ("seg", {"pred": "logits"}),
        "depth": ("depth", {"pred": "predicted_depth"}),
    }[task]
    tensors = {"pixel_values": recorded()["input/x"]}
    for official_name, name in outputs.items():
        tensors[name] = recorded()[f"{part}/{official_name}/t16_wNone_d4"]
        tensors[f"{name}/tokens=4"] = recorded()[f"{part}/{official_name}/t4_wNone_d4"]
        point = recorded()[f"{part}/{official_name}/t8_w32_d2"] + changes
        tensors[f"{name}/tokens=8,width=32,depth=2"] = point
        if f"{part}_bidir/{official_name}/t8_wNone_d4" in recorded():
            bidirectional = recorded()[f"{part}_bidir/{official_name}/t8_wNone_d4"]
            tensors[f"{name}/tokens=8,attention=bidirectional"] = bidirectional
    save_file(tensors, "outputs.safetensors")
    return Path("outputs.safetensors")


@pytest.mark.parametrize("task", TASKS)
def test_a_checkpoint_of_each_task_is_converted_and_gives_the_recorded_outputs(convert, task):
    save_file(official_tensors(task), "official.safetensors")
    printed = convert(
        checkpoint="official.safetensors", output="ours", expected=record(task), tolerance=2e-5, **OPTIONS
    )
    differences = re.findall(r"max abs difference to recorded (\S+): (\S+)", printed)
    assert len(differences) == {"distillation": 6}.get(task, 4)
    assert 0 < max(float(difference) for _, difference in differences) <= 2e-5
    assert_converted("ours", task)
    assert sorted(path.name for path in Path().iterdir()) == ["official.safetensors", "ours", "outputs.safetensors"]


def sharded(write, suffix, index):
    def store(tensors):
        names, shards = list(tensors), {}
        for number in range(3):
            shards |= dict.fromkeys(names[number::3], f"part-{number}{suffix}")
            write({name: tensors[name] for name in names[number::3]}, f"official/part-{number}{suffix}")
        Path("official", index).write_text(json.dumps({"metadata": {}, "weight_map": shards}))

    return store


STORED = {  # ways to store tensors in the folder `official`
    "model.safetensors": lambda tensors: save_file(tensors, "official/model.safetensors"),
    "another safetensors file": lambda tensors: save_file(tensors, "official/weights.safetensors"),
    "pytorch_model.bin": lambda tensors: torch.save(tensors, "official/pytorch_model.bin"),
    "sharded safetensors": sharded(save_file, ".safetensors", "model.safetensors.index.json"),
    "sharded bin": sharded(torch.save, ".bin", "pytorch_model.bin.index.json"),
}


@pytest.mark.parametrize("how", STORED)
def test_folders_are_read_however_the_weights_are_stored(convert, here, how):
    Path("official").mkdir()
    STORED[how](official_tensors("classification"))
    convert(checkpoint="official", output="ours", **OPTIONS)
    assert_converted("ours")


def averaged(tensors):
    return {"n_averaged": torch.tensor(7), **{f"module.{name}": tensor for name, tensor in tensors.items()}}


def with_older_shapes(tensors):
    tensors["patch_embed.pos_embed"] = tensors["patch_embed.pos_embed"][0]
    tensors["process_latents.token"] = tensors["process_latents.token"][None, None]
    tensors["output_latents.token"] = tensors["output_latents.token"][0]
    return tensors


NESTED = {  # what a .pth file of the research code may hold, and the `--key` for it
    "a state dict": (lambda tensors: tensors, None),
    "older shapes": (with_older_shapes, None),
    "averaged weights": (averaged, None),
    "one of model": (lambda tensors: {"model": tensors, "epoch": 3, "optimizer": {"state": {0: torch.ones(2)}}}, None),
    "compiled and wrapped": (
        lambda tensors: {"state_dict": {f"module._orig_mod.module.{name}": t for name, t in tensors.items()}},
        None,
    ),
    "compiled blocks": (
        lambda tensors: {name.replace(".attn", "._orig_mod.attn"): t for name, t in tensors.items()},
        None,
    ),
    "ema of two": (
        lambda tensors: {
            "model": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()},
            "ema": averaged(tensors) | {"ema_n_averaged": torch.tensor(7)},
        },
        "ema",
    ),
    "deeper": (lambda tensors: {"model": tensors, "model_ema": {"state_dict": tensors}}, "model_ema.state_dict"),
    "doubles": (lambda tensors: {name: tensor.double() for name, tensor in tensors.items()}, None),
}


@pytest.mark.parametrize("how", NESTED)
def test_research_checkpoints_are_unwrapped(convert, how):
    nest, key = NESTED[how]
    torch.save(nest(official_tensors("classification")), "last.pth")
    convert(checkpoint="last.pth", output="ours", **OPTIONS, **({} if key is None else {"key": key}))
    assert_converted("ours")


def test_settings_beside_the_weights_are_read_and_options_win(convert):
    Path("official").mkdir()
    save_file(official_tensors("classification"), "official/model.safetensors")
    official = {"num_heads": 4, "max_latent_tokens": 16, "mask_token_grans": [4, 8, 16], "embed_dim": 64, "x": {}}
    Path("official/config.json").write_text(json.dumps(official))
    printed = convert(checkpoint="official", output="ours")
    assert_converted("ours")
    assert "has num_heads, max_latent_tokens, mask_token_grans, embed_dim, x; " in printed
    assert "read: num_heads, max_latent_tokens, mask_token_grans\n" in printed
    convert(checkpoint="official", output="other", num_attention_heads=8, widths=[16, 64], rope_theta=100)
    config = AdaPerceiverForImageClassification.from_pretrained("other").config
    assert (config.num_attention_heads, config.widths, config.rope_theta) == (8, [16, 64], 100)
    assert config.token_granularities == [4, 8, 16]


def test_the_script_takes_a_hub_id_from_the_cache(tmp_path, monkeypatch):
    """The hub's own layout of downloads, which is all that there is of it offline."""
    repository = tmp_path / "cache" / "models--pjajal--adaperceiver-v1"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    torch.save(official_tensors("distillation"), snapshot / "pytorch_model.bin")
    (snapshot / "config.json").write_text(json.dumps({"num_heads": 4, "mask_token_grans": [4, 8, 16]}))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    arguments = {"checkpoint": "pjajal/adaperceiver-v1", "output": "ours", "max_latent_tokens": 16}
    result = run_script("convert_official_checkpoint.py", tmp_path, **arguments)
    assert result.returncode == 0, result.stderr
    assert_converted(tmp_path / "ours", "distillation")


# --- what is refused leaves nothing behind


def test_every_tensor_that_does_not_fit_is_listed_by_name(refusal, here):
    tensors = official_tensors("classification")
    del tensors["blocks.1.norm1.bias"], tensors["patch_embed.pos_embed"], tensors["read_head.cattn.k.weight"]
    tensors["blocks.2.ffn.fc1.weight"] = tensors["blocks.2.ffn.fc1.weight"][1:].clone()
    tensors["process_latents.token"] = torch.zeros(2, 64)
    tensors["output_adapter.norm.weight"] = torch.ones(64)
    save_file(tensors, "official.safetensors")
    message = refusal(checkpoint="official.safetensors", output="ours", **OPTIONS)
    assert message.splitlines() == [
        "error: the checkpoint does not fit a classification model:",
        "  missing: adaperceiver.embeddings.position_embeddings",
        "  missing: adaperceiver.layers.1.norm1.bias",
        "  missing: adaperceiver.read.cross_attention.k_proj.weight",
        "  of another shape: blocks.2.ffn.fc1.weight is (163, 64), not (164, 64)",
        "  of another shape: process_latents.token is (1, 2, 64), not (1, 1, 64)",
        "  superfluous: output_adapter.norm.weight",
    ]


@pytest.mark.parametrize(
    "name", [name for name in official_tensors("distillation") if not re.match(r"blocks\.[012]", name)]
)
def test_no_tensor_can_be_missing_unnoticed(name):
    tensors = official_tensors("distillation")
    del tensors[name]
    with pytest.raises(ValueError, match=re.escape(f"missing: {converter.our_name(name)}")):
        converter.build_model(tensors, "distillation", **OPTIONS)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("other", TASKS)
def test_another_task_than_the_checkpoints_is_refused_with_the_right_one(task, other):
    tensors = official_tensors(task)
    if task == other:
        assert type(converter.build_model(tensors, task, **OPTIONS)) is converter.TASKS[task]
    else:
        with pytest.raises(
            ValueError, match=rf"does not fit a {other} model \(its names are those of a {task} model\)"
        ):
            converter.build_model(tensors, other, **OPTIONS)


@pytest.mark.parametrize("change", [1e-3, float("nan")])
def test_a_model_with_other_outputs_than_the_recorded_ones_is_not_written(refusal, here, change):
    save_file(official_tensors("segmentation"), "official.safetensors")
    expected = record("segmentation", change)
    message = refusal(checkpoint="official.safetensors", output="ours", expected=expected, **OPTIONS)
    assert message == ("error: further than `tolerance` 0.0001 from the recorded logits/tokens=8,width=32,depth=2.")


def test_a_model_that_reads_back_differently_is_not_kept(refusal, monkeypatch):
    save_file(official_tensors("classification"), "official.safetensors")
    save_pretrained = AdaPerceiverPreTrainedModel.save_pretrained

    def save_something_else(model, folder):
        with torch.no_grad():
            model.classifier.bias[3] += 1
            save_pretrained(model, folder)
            model.classifier.bias[3] -= 1

    monkeypatch.setattr(AdaPerceiverPreTrainedModel, "save_pretrained", save_something_else)
    message = refusal(checkpoint="official.safetensors", output="ours", **OPTIONS)
    assert message == "error: not the same when read again: classifier.bias."


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
    save_file(tensors, "official.safetensors")
    torch.save({"model": tensors, "ema": tensors}, "two.pth")
    torch.save({"model": tensors, "code": Code()}, "code.pth")
    torch.save([1, 2], "list.pth")
    torch.save({**tensors, "module.blocks.0.norm1.bias": torch.ones(64)}, "twice.pth")
    torch.save({**tensors, "epoch": 3}, "number.pth")
    save_file({"blocks.0.attn.qkv.weight": torch.ones(2), "cls_token": torch.ones(2)}, "vit.safetensors")
    save_file({**tensors, "patch_embed.pos_embed": torch.ones(1, 60, 64)}, "oblong.safetensors")
    Path("damaged.safetensors").write_bytes(b"\x10")
    Path("damaged.pth").write_bytes(b"")
    for folder in ("empty", "several", "gap", "json", "taken"):
        Path(folder).mkdir()
    for name in ("a.pth", "b.pth"):
        torch.save({}, Path("several", name))
    Path("gap/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "shard.safetensors"}}))
    save_file(tensors, "json/model.safetensors")
    Path("json/config.json").write_text("[1]")
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
        ({"checkpoint": "nowhere.pth"}, "`checkpoint` must be a hub id, or a folder or file .*, got nowhere.pth"),
        ({"checkpoint": "no/where.pth"}, "`checkpoint` must be a hub id, or a folder or file .*, got no/where.pth"),
        ({"checkpoint": "no/where"}, "`checkpoint` no/where is no local path, nor found on the hub"),
        ({"checkpoint": "empty"}, "`checkpoint` must hold one file of weights.* empty has: none"),
        (
            {"checkpoint": "several"},
            r"`checkpoint` must .* be one of them; several has: several/a\.pth, several/b\.pth",
        ),
        ({"checkpoint": "gap"}, r"gap/model\.safetensors\.index\.json .* these are missing: shard\.safetensors"),
        ({"checkpoint": "vit.safetensors"}, r"official AdaPerceiver, .* got: blocks\.0\.attn\.qkv\.weight, cls_token"),
        ({"checkpoint": "model"}, r"official AdaPerceiver, .* got: class_readout\."),
        ({"checkpoint": "oblong.safetensors"}, r"patch_embed\.pos_embed must hold a square grid .*, got 60"),
        ({"checkpoint": "damaged.safetensors"}, r"damaged\.safetensors is not a checkpoint, or is damaged"),
        ({"checkpoint": "damaged.pth"}, r"damaged\.pth is not a checkpoint, or is damaged"),
        ({"checkpoint": "code.pth"}, r"code\.pth is not a checkpoint that is safe to load"),
        ({"checkpoint": "list.pth"}, r"list\.pth must hold a dict of tensors, got list"),
        ({"checkpoint": "twice.pth"}, r"one tensor for each name; module\.blocks\.0\.norm1\.bias is there beside"),
        ({"checkpoint": "number.pth"}, "one tensor for each name; epoch is a int"),
        ({"checkpoint": "two.pth"}, r"`key` must be one of model, ema for two\.pth, got None"),
        ({"checkpoint": "two.pth", "key": "best"}, r"`key` must be one of model, ema for two\.pth, got best"),
        ({"key": "ema"}, r"`key` must be left out for official\.safetensors, got ema"),
        ({"revision": "main"}, "`revision` is for hub ids, got 'main'"),
        ({"checkpoint": "json"}, r"json/config\.json must hold a JSON object, got list"),
        ({"num_attention_heads": 13}, r"`num_attention_heads` must divide `hidden_size` \(64\), got 13"),
        ({"ffn_ratio": 2.0}, r"blocks\.0\.ffn\.fc1\.weight is \(164, 64\), not \(128, 64\)"),
        ({"token_granularities": [8, 4]}, r"`token_granularities` must be sorted.* got \[8, 4\]"),
        ({"expected": "nowhere.safetensors"}, r"`expected` must be .* exists, got nowhere\.safetensors"),
        ({"expected": "no_images.safetensors"}, r"`expected` must hold `pixel_values` and logits, got .* with logits"),
        ({"expected": "no_outputs.safetensors"}, "`expected` must hold .* and logits, got .* with pixel_values"),
        ({"expected": "features.safetensors"}, "`expected` must hold logits for a classification .*, got features"),
        ({"expected": "argument.safetensors"}, "`expected` must hold .*, got logits/exit_threshold=1"),
        ({"expected": "width.safetensors"}, "`width` must be an integer from 1 to 64, got 65"),
        ({"expected": "shape.safetensors"}, r"`expected` has logits of shape \(1, 9\), not \(1, 10\)"),
        ({"output": "no/where"}, "`output` must be in a folder that exists, got .*where"),
        ({"output": "official.safetensors"}, "`output` must be new, empty, or the folder of a converted model"),
        ({"output": "taken"}, "`output` must be new, empty, or the folder of a converted model"),
        ({"output": "taken", "overwrite": True}, "`output` must be new, empty, or the folder of a converted model"),
        ({"output": "json", "overwrite": True}, r"json/config\.json must hold a JSON object"),
        (
            {"checkpoint": "model/last.pth", "output": "model", "overwrite": True},
            "`output` must not hold the checkpoint",
        ),
        ({"expected": "list.pth"}, r"`expected` must be a \.safetensors file that exists, got list\.pth"),
        ({"output": "model"}, "`output` .*model is not empty; `--overwrite` replaces all of it"),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_what_cannot_be_converted_is_refused_and_nothing_is_written(folder, refusal, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    arguments = {"checkpoint": "official.safetensors", "output": "ours", **OPTIONS, **arguments}
    assert re.search(message, refusal(**arguments))


def test_a_wrong_type_in_the_settings_beside_the_weights_is_refused(refusal):
    Path("official").mkdir()
    save_file(official_tensors("classification"), "official/model.safetensors")
    Path("official/config.json").write_text(json.dumps({"num_heads": "four"}))
    assert "num_attention_heads" in refusal(checkpoint="official", output="ours")


def test_overwriting_replaces_all_of_a_converted_model_and_an_empty_folder_is_free(convert):
    save_file(official_tensors("classification"), "official.safetensors")
    AdaPerceiverModel(AdaPerceiverConfig(**TINY)).save_pretrained("model")
    Path("model/stale.json").write_text("{}")
    convert(checkpoint="official.safetensors", output="model", overwrite=True, **OPTIONS)
    assert_converted("model")
    assert not Path("model/stale.json").exists()
    Path("empty").mkdir()
    convert(checkpoint="official.safetensors", output="empty", **OPTIONS)
    assert_converted("empty")
    assert not list(Path().glob(".*"))


def test_the_converted_model_is_uploaded_after_it_is_written(convert, monkeypatch):
    save_file(official_tensors("classification"), "official.safetensors")
    uploads = []

    def push_to_hub(model, repo_id):
        assert_converted("ours")
        uploads.append(repo_id)

    with pytest.raises(SystemExit, match=r"wrote .*early, but could not upload it to someone/else"):  # offline
        convert(checkpoint="official.safetensors", output="early", push_to_hub="someone/else", **OPTIONS)
    assert_converted("early")
    monkeypatch.setattr(AdaPerceiverPreTrainedModel, "push_to_hub", push_to_hub)
    printed = convert(checkpoint="official.safetensors", output="ours", push_to_hub="me/ours", **OPTIONS)
    assert uploads == ["me/ours"]
    assert printed.endswith("uploaded to me/ours\n")
