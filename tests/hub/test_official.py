"""The official release, loaded as it is: its config is translated and its tensors are renamed on the way in, strictly."""

import json

import pytest
import torch
from conftest import assert_equal
from official import FIXTURES, OFFICIAL, TINY, official_model, official_tensors, recorded
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification, pipeline

from adaperceiver import (
    AdaPerceiverBackbone,
    AdaPerceiverConfig,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverModel,
    image_processor_for,
)
from adaperceiver.official_adaperceiver import CHOICES, FIELDS, is_official, label_names, translate_config


@pytest.fixture
def folder(tmp_path):
    """Write an official folder; `changes` go to its config."""

    def write(task, tensors=None, **changes):
        extra = {"output_feat_dim": 80} if task == "distillation" else {}
        (tmp_path / "config.json").write_text(json.dumps({**OFFICIAL, **extra, **changes}))
        save_file(official_tensors(task) if tensors is None else tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write


@torch.no_grad()
@pytest.mark.parametrize(
    ("task", "model_class"),
    [("classification", AdaPerceiverForImageClassification), ("distillation", AdaPerceiverForDistillation)],
)
def test_an_official_folder_loads_in_one_line_and_gives_the_recorded_outputs(task, model_class, folder):
    model = model_class.from_pretrained(folder(task))
    assert not model.training
    unlike = {"num_depth_bins", "dtype", "_name_or_path", "output_tokens", "architectures"}
    unlike |= {"feature_size"} if task == "classification" else set()
    expected = official_model(model_class).config.to_dict()
    actual = model.config.to_dict()
    assert {name: actual[name] for name in actual.keys() - unlike} == {
        name: expected[name] for name in expected.keys() - unlike
    }
    assert model.name_or_path == str(folder(task))
    name = "cls" if task == "classification" else "distill"
    for tokens in (4, 8, 16):
        expected = recorded()[f"{name}/logits/t{tokens}_wNone_d4"][:, 0]
        torch.testing.assert_close(model(recorded()["input/x"], tokens=tokens).logits, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_saving_writes_our_format(folder, tmp_path):
    model = AdaPerceiverForImageClassification.from_pretrained(folder("classification"))
    model.save_pretrained(tmp_path / "ours")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "ours")
    assert_equal(loaded.state_dict(), model.state_dict())


def test_another_rope_base_is_read(folder):
    model = AdaPerceiverForImageClassification.from_pretrained(folder("classification", rope_theta=500))
    plain = official_model(AdaPerceiverForImageClassification)
    pixel_values = recorded()["input/x"]
    assert model.config.rope_theta == 500
    assert (model(pixel_values).logits - plain(pixel_values).logits).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("model_class", [AdaPerceiverForSemanticSegmentation, AdaPerceiverForDepthEstimation])
def test_a_dense_model_takes_its_backbone_from_a_distillation_checkpoint(model_class, folder, caplog):
    source = folder("distillation")
    model = model_class.from_pretrained(source, num_labels=7)
    distilled = AdaPerceiverForDistillation.from_pretrained(source)
    pixel_values = recorded()["input/x"]
    tokens = model.adaperceiver(pixel_values).output_tokens
    torch.testing.assert_close(model.feature_adapter(tokens), distilled(pixel_values).features, rtol=0, atol=1e-5)
    assert model.config.num_labels == 7
    text = caplog.text
    assert "newly initialised: head." in text
    assert "not used: adaperceiver.class_readout.output_token" in text
    assert "classifier.weight" in text
    head = next(
        parameter for name, parameter in model.named_parameters() if name.startswith("head.") and parameter.ndim > 1
    )
    assert 0.01 < head.std() < 0.04  # drawn anew, not left as memory was


@torch.no_grad()
@pytest.mark.parametrize(
    ("task", "model_class"),
    [("segmentation", AdaPerceiverForSemanticSegmentation), ("depth", AdaPerceiverForDepthEstimation)],
)
def test_a_dense_checkpoint_loads_with_the_head_that_its_tensors_show(task, model_class, folder):
    model = model_class.from_pretrained(folder(task))
    assert_equal(model.state_dict(), official_model(model_class).state_dict())


@torch.no_grad()
def test_the_base_model_and_the_backbone_load_too(folder):
    source, pixel_values = folder("distillation"), recorded()["input/x"]
    distilled = AdaPerceiverForDistillation.from_pretrained(source)
    base = AdaPerceiverModel.from_pretrained(source)
    expected = distilled.adaperceiver(pixel_values).output_tokens
    torch.testing.assert_close(base(pixel_values).output_tokens, expected, rtol=0, atol=1e-6)
    (feature_map,) = AdaPerceiverBackbone.from_pretrained(source)(pixel_values).feature_maps
    torch.testing.assert_close(feature_map.flatten(2).transpose(1, 2), expected, rtol=0, atol=1e-6)


def test_a_tensor_that_is_missing_unexpected_or_of_another_shape_is_named(folder):
    tensors = official_tensors("classification")
    del tensors["read_head.cattn.q.bias"]
    tensors["blocks.9.norm1.weight"] = torch.ones(64)
    tensors["blocks.0.norm1.weight"] = torch.ones(63)
    with pytest.raises(ValueError, match="does not fit AdaPerceiverForImageClassification") as error:
        AdaPerceiverForImageClassification.from_pretrained(folder("classification", tensors))
    message = str(error.value)
    assert "missing: adaperceiver.read.cross_attention.q_proj.bias" in message
    assert "unexpected: blocks.9.norm1.weight" in message
    assert "shape mismatch: blocks.0.norm1.weight is (63,), not (64,)" in message


def test_a_given_config_is_used_and_still_all_tensors_have_to_fit(folder):
    """transformers would load none of them, and leave the model as it was drawn."""
    source, config = folder("classification"), official_model(AdaPerceiverForImageClassification).config
    config.rope_theta = 500
    model = AdaPerceiverForImageClassification.from_pretrained(source, config=config)
    assert model.config.rope_theta == 500
    assert_equal(model.state_dict(), official_model(AdaPerceiverForImageClassification).state_dict())
    with pytest.raises(ValueError, match=r"missing: adaperceiver\.layers\.4\."):
        AdaPerceiverForImageClassification.from_pretrained(
            source, config=AdaPerceiverConfig(**TINY | {"num_hidden_layers": 5})
        )


def test_weights_that_are_cut_short_are_refused_with_their_file(folder):
    path = folder("classification") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match=r"cannot be read: .*model\.safetensors .*Are they complete"):
        AdaPerceiverForImageClassification.from_pretrained(path.parent)


def test_a_dtype_is_that_of_the_loaded_weights(folder):
    model = AdaPerceiverForImageClassification.from_pretrained(folder("classification"), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_classification_checkpoint_has_no_features_to_offer(folder):
    source = folder("classification")
    for model_class in (AdaPerceiverForDistillation, AdaPerceiverForSemanticSegmentation):
        with pytest.raises(ValueError, match=r"missing: adaperceiver\.dense_readout"):
            model_class.from_pretrained(source)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_mask": "causal"}, "`block_mask` in .* must be 'block' or 'none' to be loaded here, got 'causal'"),
        ({"ffn_layer": "swiglu"}, "`ffn_layer` in .* must be 'mlp' .*got 'swiglu'"),
        ({"use_output_ffn": True}, "`use_output_ffn` .*got True"),
        ({"norm_layer": "rmsnorm"}, "`norm_layer` .*got 'rmsnorm'"),
        ({"process_token_init": "fps"}, "`process_token_init` .*got 'fps'"),
        ({"act_layer": ["gelu"]}, r"`act_layer` .*got \['gelu'\]"),
        ({"embed_dim": "wide"}, r"config\.json of .*hidden_size.*'wide'"),
        ({"cls_token": True}, "has `cls_token`, which no AdaPerceiver is known to have"),
        ({"depth": 0}, "`num_hidden_layers` must be an integer of at least 1, got 0"),
    ],
)
def test_what_does_not_exist_here_is_refused_by_name(changes, message, folder):
    with pytest.raises(ValueError, match=message):
        AdaPerceiverForImageClassification.from_pretrained(folder("classification", **changes))


@pytest.mark.parametrize("changes", [{"block_mask": "none"}, {"attn_layer": "full"}])
def test_attention_without_a_mask_is_bidirectional(changes):
    assert translate_config({**OFFICIAL, **changes})["attention_type"] == "bidirectional"


@pytest.mark.parametrize("name", ["classification", "distill"])
def test_the_configs_of_the_release_are_read_whole(name):
    official = json.loads((FIXTURES / f"official_config_{name}.json").read_text())
    assert is_official(official)
    assert official.keys() <= FIELDS.keys() | CHOICES.keys()
    ours = AdaPerceiverConfig(**translate_config(official))
    paper = AdaPerceiverConfig(num_labels=official["num_classes"])
    labels = {"id2label": None, "label2id": None}
    assert {**ours.to_dict(), **labels} == {**paper.to_dict(), **labels}
    assert ours.id2label[0] == {1000: "tench", 11821: label_names(11821)[0]}[official["num_classes"]]
    assert "LABEL_0" not in ours.id2label.values()


def test_labels_have_names_where_their_number_says_which_they_are():
    assert len(label_names(1000)) == 1000
    assert len(set(label_names(11821))) == 11821
    assert label_names(10) is None


def test_code_without_the_label_files_says_that_there_are_no_names(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("adaperceiver.official_adaperceiver.__file__", str(tmp_path / "official_adaperceiver.py"))
    assert label_names(1000) is None
    assert "The 1000 labels stay LABEL_0" in caplog.text


def test_the_image_processor_of_the_release_is_one_line():
    model = AdaPerceiverConfig(**translate_config({**OFFICIAL, "img_size": 224, "patch_size": 14}))
    processor = image_processor_for(model, "image-classification")
    assert (processor.size["shortest_edge"], processor.crop_size["height"]) == (256, 224)
    assert list(processor.image_mean) == [0.48145466, 0.4578275, 0.40821073]
    assert list(processor.image_std) == [0.26862954, 0.26130258, 0.27577711]


def test_auto_classes_and_pipelines_refuse_an_official_folder(folder):
    source = folder("classification")
    for load in (AutoConfig.from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(ValueError, match=r"model_type|Unrecognized"):
            load(source)
    with pytest.raises(ValueError, match=r"model_type|Unrecognized"):
        pipeline("image-classification", str(source))


@pytest.mark.parametrize(
    ("task", "checkpoint", "model_class"),
    [
        ("image-classification", "classification", AdaPerceiverForImageClassification),
        ("image-classification", "distillation", AdaPerceiverForDistillation),
        ("image-segmentation", "distillation", AdaPerceiverForSemanticSegmentation),
        ("depth-estimation", "distillation", AdaPerceiverForDepthEstimation),
        ("image-feature-extraction", "distillation", AdaPerceiverModel),
    ],
)
def test_a_pipeline_takes_a_loaded_model(task, checkpoint, model_class, folder):
    model = model_class.from_pretrained(folder(checkpoint))
    pipe = pipeline(task, model=model, image_processor=image_processor_for(model.config, task))
    result = pipe(Image.new("RGB", (40, 30)), tokens=4, report=True)
    assert result["report"]["tokens"] == 4
