"""The fine print of loading: precision, offloading, shards, new heads, and errors that say what to do."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import aligned, assert_equal, images
from official import official_classifier
from transformers import (
    AutoConfig,
    AutoModelForDepthEstimation,
    AutoModelForImageClassification,
    AutoModelForSemanticSegmentation,
    ViTConfig,
    ViTForImageClassification,
)

from adaperceiver import (
    AccuracyTable,
    AdaPerceiverConfig,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverModel,
    AdaptiveConfig,
)


# ------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_saved_in_half_precision_come_back_in_it_unless_told_otherwise(dtype, tiny_model, tmp_path):
    model = tiny_model(AdaPerceiverForImageClassification).to(dtype)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert AutoModelForImageClassification.from_pretrained(tmp_path).dtype == dtype
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=torch.float32)
    assert_equal(loaded.state_dict(), {name: tensor.float() for name, tensor in model.state_dict().items()})


# -------------------------------------------------------------------------------------------------- where weights go


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("max_memory", [{"cpu": "100KB"}, {"cpu": "0KB"}], ids=["cpu and disk", "disk"])
def test_device_map_auto_puts_on_disk_what_the_memory_does_not_hold(shards, max_memory, tmp_path):
    model = official_classifier()
    model.save_pretrained(tmp_path / "model", **({"max_shard_size": "50KB"} if shards else {}))
    assert (tmp_path / "model" / "model.safetensors.index.json").exists() == shards
    loaded = AutoModelForImageClassification.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory=max_memory, offload_folder=tmp_path / "offload"
    )
    assert set(loaded.hf_device_map.values()) == ({"cpu", "disk"} if max_memory["cpu"] == "100KB" else {"disk"})
    pixel_values = images()
    with torch.no_grad():
        for point in ({}, {"tokens": 6, "width": 41, "depth": 3}, {"exit_threshold": 0.3}):
            actual, expected = loaded(pixel_values, **point), model(pixel_values, **point)
            torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_a_model_with_weights_on_disk_is_saved_whole(tmp_path):
    official_classifier().save_pretrained(tmp_path / "model")
    offloaded = AutoModelForImageClassification.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory={"cpu": "100KB"}, offload_folder=tmp_path / "offload"
    )
    offloaded.save_pretrained(tmp_path / "again")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "again")
    assert_equal(loaded.state_dict(), official_classifier().state_dict())


@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_low_cpu_mem_usage_is_accepted_and_changes_nothing(low_cpu_mem_usage, tiny_model, tmp_path):
    model = tiny_model(AdaPerceiverForImageClassification)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert_equal(loaded.state_dict(), model.state_dict())


def test_saving_in_one_file_replaces_the_shards_of_an_earlier_save(tiny_model, tmp_path):
    tiny_model(AdaPerceiverModel).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    model = tiny_model(AdaPerceiverModel)  # of the same shapes, other weights
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("model-*-of-*.safetensors"))
    assert_equal(AdaPerceiverModel.from_pretrained(tmp_path).state_dict(), model.state_dict())


def test_loads_in_threads_do_not_disturb_each_other(tiny_model, tmp_path):
    models = [tiny_model(AdaPerceiverForImageClassification) for _ in range(2)]
    for index, model in enumerate(models):
        model.adaptive_config = AdaptiveConfig(tokens=4 + index)
        model.save_pretrained(tmp_path / str(index))

    def load(index):
        return AutoModelForImageClassification.from_pretrained(tmp_path / str(index))

    with ThreadPoolExecutor(4) as executor:
        for index, loaded in enumerate(executor.map(load, [0, 1] * 6)):
            assert_equal(loaded.state_dict(), models[index % 2].state_dict())
            assert loaded.adaptive_config.tokens == 4 + index % 2


# ------------------------------------------------------------------------------------------------------- new heads


@pytest.mark.parametrize(
    ("auto_class", "model_class"),
    [
        (AutoModelForImageClassification, AdaPerceiverForImageClassification),
        (AutoModelForSemanticSegmentation, AdaPerceiverForSemanticSegmentation),
        (AutoModelForDepthEstimation, AdaPerceiverForDepthEstimation),
    ],
)
def test_from_config_builds_what_was_saved_with_new_weights(auto_class, model_class, tiny_model, tmp_path):
    model = tiny_model(model_class)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)  # though it names code in the folder
    built = auto_class.from_config(config, dtype=torch.bfloat16)
    assert type(built) is model_class
    assert built.dtype == torch.bfloat16
    assert {name: t.shape for name, t in built.state_dict().items()} == {
        name: t.shape for name, t in model.state_dict().items()
    }
    assert built.adaptive_config == AdaptiveConfig()


def test_another_number_of_depth_bins_gives_a_new_depth_head(tiny_model, tmp_path):
    model = tiny_model(AdaPerceiverForDepthEstimation)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForDepthEstimation.from_pretrained(tmp_path, num_depth_bins=5)
    loaded, info = AutoModelForDepthEstimation.from_pretrained(
        tmp_path, num_depth_bins=5, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert {key for key, *_ in info["mismatched_keys"]} == {"head.bins.weight", "head.bins.bias"}
    assert_equal(loaded.feature_adapter.state_dict(), model.feature_adapter.state_dict())
    assert loaded(images()).predicted_depth.isfinite().all()


def test_a_dense_head_on_a_classifier_s_folder_names_what_is_new(tiny_model, tmp_path):
    model = tiny_model(AdaPerceiverForImageClassification)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForSemanticSegmentation.from_pretrained(tmp_path, output_loading_info=True)
    new = {key.split(".")[0] for key in info["missing_keys"] if not key.startswith("adaperceiver.")}
    assert new == {"feature_adapter", "head"}
    assert {key.split(".")[1] for key in info["missing_keys"] if key.startswith("adaperceiver.")} == {"dense_readout"}
    assert_equal(loaded.base_model.layers.state_dict(), model.base_model.layers.state_dict())
    loaded.save_pretrained(tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert list(config["custom_pipelines"]) == ["image-segmentation"]  # no longer the classifier's


# ---------------------------------------------------------------------------------------------------------- errors


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1234\n"


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:100], lambda data: data[:-1], lambda data: LFS_POINTER],
    ids=["empty", "header", "end", "lfs pointer"],
)
@pytest.mark.parametrize("loader", [AdaPerceiverForImageClassification, AutoModelForImageClassification])
def test_weights_that_cannot_be_read_are_named(damage, loader, tiny_model, tmp_path):
    tiny_model(AdaPerceiverForImageClassification).save_pretrained(tmp_path, max_shard_size="50KB")
    path = sorted(tmp_path.glob("model-*.safetensors"))[1]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(OSError, match="cannot be read") as error:
        loader.from_pretrained(tmp_path)
    assert str(path) in str(error.value)
    assert str(error.value).count(".safetensors") == 1  # the others are fine


@pytest.mark.parametrize("given", ["folder", "path", "object"])
def test_another_kind_of_model_is_refused_by_its_type(given, tiny_model, tmp_path):
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    tiny_model(AdaPerceiverForImageClassification).save_pretrained(tmp_path / "ours")
    folder = tmp_path / ("vit" if given == "folder" else "ours")
    kwargs = {"folder": {}, "path": {"config": tmp_path / "vit"}, "object": {"config": config}}[given]
    where = "`config`" if given == "object" else f"the config.json of {tmp_path / 'vit'}"
    with pytest.raises(ValueError, match="`model_type`") as error:
        AdaPerceiverForImageClassification.from_pretrained(folder, **kwargs)
    assert str(error.value) == f"`model_type` in {where} must be 'adaperceiver', got 'vit'."


def test_a_folder_without_a_config_is_refused(tiny_model, tmp_path):
    """transformers would go on with the default config."""
    tiny_model(AdaPerceiverForImageClassification).save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=f"config.json of {tmp_path} must be 'adaperceiver', got None"):
        AdaPerceiverForImageClassification.from_pretrained(tmp_path)


def test_without_a_folder_a_state_dict_is_loaded(tiny_model, tiny_config):
    model = tiny_model(AdaPerceiverModel)
    loaded = AdaPerceiverModel.from_pretrained(None, config=tiny_config, state_dict=model.state_dict())
    assert_equal(aligned(loaded).state_dict(), model.state_dict())


def test_a_config_by_itself_is_saved_without_code(tmp_path):
    AdaPerceiverConfig().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())


# ---------------------------------------------------------------------------------------- what was measured before


@pytest.fixture
def measured(tiny_model, tmp_path):
    """A calibrated classifier that knows its scores."""
    model = tiny_model(AdaPerceiverForImageClassification)
    model.adaptive_config = AdaptiveConfig(tokens=4, exit_threshold=0.3, exit_temperatures=[1.5, 1.0])
    points = [{"tokens": 4, "width": 16, "depth": depth, "value": 0.5 + 0.1 * depth} for depth in (1, 2)]
    model.accuracy_table = AccuracyTable("top-1", points)
    model.save_pretrained(tmp_path / "measured")
    return tmp_path / "measured"


@pytest.mark.parametrize(
    ("auto_class", "changes"),
    [
        (AutoModelForImageClassification, {"num_labels": 3, "ignore_mismatched_sizes": True}),
        (AutoModelForSemanticSegmentation, {}),
        (AutoModelForDepthEstimation, {}),
    ],
    ids=["other labels", "segmentation", "depth"],
)
def test_a_new_head_inherits_no_scores_thresholds_or_temperatures(auto_class, changes, measured, caplog):
    model = auto_class.from_pretrained(measured, **changes)
    assert "Dropped accuracy_table, exit_threshold, exit_temperatures of the checkpoint" in caplog.text
    assert model.accuracy_table is None
    assert model.adaptive_config == AdaptiveConfig(tokens=4)  # how much to spend is still the user's choice
    own = AdaptiveConfig(exit_threshold=0.7)
    assert auto_class.from_pretrained(measured, adaptive_config=own, **changes).adaptive_config == own
    model.save_pretrained(measured)  # over what was there
    assert not (measured / "accuracy_table.json").exists()


def test_the_same_head_keeps_its_scores_also_with_a_new_router(measured, caplog):
    for changes in ({}, {"router_ratio": 0.25}):
        model = AdaPerceiverForImageClassification.from_pretrained(measured, **changes)
        assert model.accuracy_table is not None
        assert model.adaptive_config.exit_threshold == 0.3
    assert "Dropped" not in caplog.text
    model, info = AdaPerceiverForImageClassification.from_pretrained(measured, output_loading_info=True)
    assert isinstance(model, AdaPerceiverForImageClassification)
    assert not info["missing_keys"]
