"""`AdaPerceiverConfig`: which models there are. `AdaptiveConfig`: where they run."""

import json
import re

import numpy as np
import pytest
import torch
from conftest import MODEL_CLASSES, TINY, aligned, assert_equal, images
from huggingface_hub.errors import StrictDataclassError
from official import official_classifier, official_model
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

from adaperceiver import (
    AdaPerceiverConfig,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverModel,
    AdaptiveConfig,
)


# ---------------------------------------------------------------------------------------------- the architecture


@pytest.mark.parametrize(
    ("model_class", "num_labels", "parameters"),
    [
        (AdaPerceiverForImageClassification, 1000, 143_745_252),
        (AdaPerceiverForDistillation, 11821, 160_748_291),
        (AdaPerceiverForSemanticSegmentation, 150, 148_319_724),
        (AdaPerceiverForDepthEstimation, 2, 151_074_390),  # the depth head has bins, no labels
    ],
)
def test_the_default_config_has_the_parameter_count_of_the_paper(model_class, num_labels, parameters):
    with torch.device("meta"):
        model = model_class(AdaPerceiverConfig(num_labels=num_labels))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_the_default_granularities_and_widths_are_those_of_the_paper():
    config = AdaPerceiverConfig()
    assert config.token_granularities == [32, 64, 96, 128, 192, 256]
    assert config.widths == [416, 624, 832]
    assert [config.ffn_hidden_size(width) for width in config.widths] == [1069, 1603, 2138]


@pytest.mark.parametrize(
    ("max_latent_tokens", "granularities"),
    [(64, [8, 16, 24, 32, 48, 64]), (16, [2, 4, 6, 8, 12, 16]), (4, [1, 2, 3, 4]), (1, [1])],
)
def test_granularities_follow_the_number_of_latents(max_latent_tokens, granularities):
    assert AdaPerceiverConfig(max_latent_tokens=max_latent_tokens).token_granularities == granularities


@pytest.mark.parametrize(("hidden_size", "widths"), [(64, [32, 48, 64]), (4, [2, 3, 4]), (2, [1, 2])])
def test_widths_follow_the_hidden_size(hidden_size, widths):
    assert AdaPerceiverConfig(hidden_size=hidden_size, num_attention_heads=1).widths == widths


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, 0) for name in ("image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers")),
        *((name, -4) for name in ("num_attention_heads", "max_latent_tokens", "feature_size", "num_depth_bins")),
        ("num_depth_bins", 1),  # one bin has no expectation to speak of
        ("image_size", 30),  # patches of 8
        ("patch_size", 64),  # larger than the image
        ("num_attention_heads", 5),  # does not divide 32
        ("num_attention_heads", 32),  # heads of one channel: RoPE turns pairs
        ("hidden_size", 36),  # heads of nine channels
        ("ffn_ratio", 0.0),
        ("ffn_ratio", -2.57),
        ("ffn_ratio", 0.01),  # no hidden unit left
        ("ffn_ratio", float("nan")),
        ("layer_norm_eps", 0.0),
        ("rope_theta", -1.0),
        ("initializer_range", -0.02),
        ("layerscale_value", -1e-5),
        ("token_init_std", -1.0),
        ("position_init_std", -1.0),
        ("distillation_temperature", 0.0),
        ("adaptive_axes", ["tokens", "height"]),
        ("stem_layers", [[8, 2], [16, 2]]),  # patches of 4, not of 8
        ("stem_layers", [[8, 2], [16]]),
        ("stem_layers", [[0, 8]]),
        ("stem_layers", [[8, 8, 3]]),  # a kernel without an expansion
        ("stem_layers", [[8, 8, 0, 6]]),
        ("image_mean", [0.5]),
        ("image_std", [0.5, 0.5, 0.0]),
        *((name, 1.0) for name in ("hidden_dropout_prob", "attention_probs_dropout_prob")),
        *((name, -0.1) for name in ("drop_path_rate", "head_dropout_prob")),
        ("min_depth", 0.0),
        ("max_depth", 0.0005),  # below min_depth
        ("max_depth", 0.001),  # at min_depth
        ("token_granularities", []),
        ("token_granularities", [8, 4, 16]),
        ("token_granularities", [4, 8, 8, 16]),
        ("token_granularities", [0, 8, 16]),
        ("token_granularities", [8, 16, 32]),  # 16 latents
        ("widths", []),
        ("widths", [32, 16]),
        ("widths", [16, 16, 32]),
        ("widths", [0, 32]),
        ("widths", [16, 64]),  # hidden size 32
        ("max_width", 0),
        ("max_width", 64),
    ],
)
def test_an_impossible_size_is_refused_with_its_name_and_value(field, value):
    with pytest.raises(ValueError, match=re.escape(str(value))) as error:
        AdaPerceiverConfig(**{**TINY, field: value})
    assert field in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("num_hidden_layers", True),
        ("ffn_ratio", "2.57"),
        ("use_swiglu_ffn", "yes"),
        ("qkv_bias", 1),
        ("layerscale_value", "none"),
        ("token_granularities", 16),
        ("token_granularities", [4.0, 16]),
        ("widths", "32"),
        ("widths", [True, 32]),
        ("attention_type", "causal"),
        ("output_tokens", "patches"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_name_and_value(field, value):
    with pytest.raises(StrictDataclassError, match=re.escape(str(value))) as error:
        AdaPerceiverConfig(**{**TINY, field: value})
    assert field in str(error.value)


@pytest.mark.parametrize(("field", "value"), [("num_attention_heads", 5), ("patch_size", 7), ("widths", [16, 64])])
def test_an_impossible_size_that_is_set_later_is_refused_by_the_model(field, value, tiny_config, tmp_path):
    """`from_pretrained` sets what it is given on the finished config."""
    tiny_config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=re.escape(str(value))) as error:
        AdaPerceiverModel(AdaPerceiverConfig.from_pretrained(tmp_path, **{field: value}))
    assert field in str(error.value)


def test_a_config_survives_json_and_auto_config(tmp_path):
    config = AdaPerceiverConfig(
        **{**TINY, "token_granularities": (4, 16), "widths": [8, 32], "layerscale_value": None, "ffn_ratio": 3},
        use_swiglu_ffn=True,
        hidden_act="silu",
        attention_type="bidirectional",
        out_features=["stem", "stage1"],
        id2label={index: f"bird {index}" for index in range(10)},
    )
    config.save_pretrained(tmp_path)
    for loaded in (AdaPerceiverConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is AdaPerceiverConfig
        assert loaded.to_diff_dict() == config.to_diff_dict()
        assert loaded.token_granularities == [4, 16]
        assert loaded.out_indices == [0, 1]
        assert loaded.id2label[3] == "bird 3"


def test_a_saved_config_with_more_layers_has_their_stages(tiny_config, tmp_path):
    tiny_config.save_pretrained(tmp_path)
    deeper = AdaPerceiverConfig.from_pretrained(tmp_path, num_hidden_layers=3)
    assert deeper.stage_names == ["stem", "stage1", "stage2", "stage3"]


# -------------------------------------------------------------------------------------------------- its variants


VARIANTS = {
    "plain": {},
    "no embed ffn": {"use_embed_ffn": False},
    "gated": {"use_swiglu_ffn": True},
    "swiglu": {"use_swiglu_ffn": True, "hidden_act": "silu"},
    "silu": {"hidden_act": "silu"},
    "no qkv bias": {"qkv_bias": False},
    "no proj bias": {"proj_bias": False},
    "no ffn bias": {"ffn_bias": False, "use_swiglu_ffn": True},
    "no layer scale": {"layerscale_value": None},
    "zero layer scale": {"layerscale_value": 0},
    "dropouts": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "head_dropout_prob": 0.1},
    "drop path": {"drop_path_rate": 0.2},
    "bidirectional": {"attention_type": "bidirectional"},
    "own granularities": {"token_granularities": [5, 11], "widths": [7, 32]},
    "one channel": {"num_channels": 1},
    "stem": {"stem_layers": [[6, 1], [8, 2], [10, 4]]},
    "inverted stem": {"stem_layers": [[6, 2, 3, 0], [8, 2, 5, 4], [8, 1, 3, 6], [10, 2]]},
}


def test_adaptive_tokens_need_the_block_mask():
    with pytest.raises(ValueError, match=r"`attention_type` must be \"block\" for \"tokens\" in `adaptive_axes`"):
        AdaPerceiverConfig(**TINY, adaptive_axes=["tokens"], attention_type="bidirectional")
    AdaPerceiverConfig(**TINY, adaptive_axes=["depth", "width"], attention_type="bidirectional")


@pytest.mark.parametrize("std", [1e-6, 0.5])
def test_learned_tokens_start_as_the_config_says(std):
    model = AdaPerceiverModel(AdaPerceiverConfig(**TINY, token_init_std=std))
    for token in (model.read.latent_token, model.class_readout.output_token):
        assert 0.5 * std < token.std() < 1.5 * std
    assert model.embeddings.position_embeddings.std().item() == pytest.approx(0.02, rel=0.2)


def test_positions_start_as_the_config_says():
    model = AdaPerceiverModel(AdaPerceiverConfig(**TINY, position_init_std=0.7))
    assert model.embeddings.position_embeddings.std().item() == pytest.approx(0.7, rel=0.2)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_learns_at_every_parameter_and_survives_saving(changes, tiny_model, tmp_path):
    model = tiny_model(AdaPerceiverForDistillation, **changes)  # it has both readouts and the feature adapter
    pixel_values = images()[:, : model.config.num_channels]
    outputs = model.train()(pixel_values)
    (outputs.logits.sum() + outputs.features.square().sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name

    model.eval().save_pretrained(tmp_path)
    loaded = aligned(AdaPerceiverForDistillation.from_pretrained(tmp_path))
    for point in ({}, {"tokens": 5, "width": 20, "depth": 1}):
        assert_equal(loaded(pixel_values, **point).to_tuple(), model(pixel_values, **point).to_tuple())


@pytest.mark.parametrize(
    ("changes", "without_bias", "with_bias"),
    [
        ({"qkv_bias": False}, "q_proj k_proj v_proj", "o_proj fc1 gate fc2"),
        ({"proj_bias": False}, "o_proj", "q_proj k_proj v_proj fc1 gate fc2"),
        ({"ffn_bias": False}, "fc1 gate fc2", "q_proj k_proj v_proj o_proj"),
    ],
)
def test_a_bias_that_is_switched_off_is_gone_everywhere(changes, without_bias, with_bias, tiny_model):
    model = tiny_model(AdaPerceiverForDistillation, use_swiglu_ffn=True, **changes)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, linear in linears.items():
        if name.rpartition(".")[2] in without_bias.split():
            assert linear.bias is None, name
        elif name.rpartition(".")[2] in with_bias.split():
            assert linear.bias is not None, name
    last_names = {name.rpartition(".")[2] for name in linears}
    assert last_names.issuperset([*without_bias.split(), *with_bias.split()])  # neither branch was idle


@pytest.mark.parametrize(("value", "vectors"), [(1e-5, 4), (None, 0), (0, 0), (0.0, 0)])
def test_layer_scale_none_or_zero_leaves_no_gamma(value, vectors, tiny_config):
    tiny_config.layerscale_value = value
    model = AdaPerceiverModel(tiny_config)
    gammas = [parameter for name, parameter in model.named_parameters() if name.endswith("gamma")]
    assert len(gammas) == vectors  # two for each of the two blocks
    assert all((gamma == value).all() for gamma in gammas)


def test_without_embed_ffn_there_is_no_norm_either(tiny_model):
    model = tiny_model(AdaPerceiverModel, use_embed_ffn=False)
    assert [name for name, _ in model.embeddings.named_parameters()] == [
        "position_embeddings",
        "patch_embeddings.weight",
        "patch_embeddings.bias",
    ]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "field", ["hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate", "head_dropout_prob"]
)
def test_dropout_acts_in_training_and_only_there(field, implementation, tiny_model):
    model = tiny_model(AdaPerceiverForDistillation, **{field: 0.5})
    model.set_attn_implementation(implementation)
    pixel_values = images(batch=8)
    with torch.no_grad():
        evaluated = model(pixel_values).features
        assert_equal(model(pixel_values).features, evaluated)
        model.train()
        assert not torch.equal(model(pixel_values).features, model(pixel_values).features)

        plain = AdaPerceiverForDistillation(AdaPerceiverConfig(**TINY)).eval()
        plain.set_attn_implementation(implementation)
        plain.load_state_dict(model.state_dict())
        assert_equal(plain(pixel_values).features, evaluated)


@pytest.mark.parametrize(
    ("model_class", "output"),
    [(AdaPerceiverForSemanticSegmentation, "logits"), (AdaPerceiverForDepthEstimation, "predicted_depth")],
)
def test_the_dense_heads_drop_out_once_more_before_their_convolution(model_class, output, tiny_model):
    model = tiny_model(model_class, head_dropout_prob=0.5)
    model.head.train()  # and nothing else
    pixel_values = images()
    assert not torch.equal(model(pixel_values)[output], model(pixel_values)[output])


def test_drop_path_grows_linearly_with_depth_from_zero(tiny_model):
    model = tiny_model(AdaPerceiverModel, num_hidden_layers=5, drop_path_rate=0.4)
    assert [layer.drop_path.probability for layer in model.layers] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    single = tiny_model(AdaPerceiverModel, num_hidden_layers=1, drop_path_rate=0.4)
    assert single.layers[0].drop_path.probability == 0.0


def test_drop_path_drops_whole_images_and_scales_up_the_others(tiny_model):
    drop_path = tiny_model(AdaPerceiverModel, drop_path_rate=0.25).layers[-1].drop_path.train()
    states = torch.ones(4000, 2, 3)
    factors = drop_path(states)
    per_image = factors.flatten(1)
    assert (per_image == per_image[:, :1]).all()
    torch.testing.assert_close(per_image[:, 0].unique(), torch.tensor([0.0, 1 / 0.75]))
    assert factors.mean().item() == pytest.approx(1.0, abs=0.03)


def test_a_bidirectional_model_is_a_block_model_asked_for_bidirectional_attention(tiny_model):
    block = tiny_model(AdaPerceiverForImageClassification)
    bidirectional = tiny_model(AdaPerceiverForImageClassification, attention_type="bidirectional")
    bidirectional.load_state_dict(block.state_dict())
    pixel_values = images()
    assert_equal(bidirectional(pixel_values).logits, block(pixel_values, attention="bidirectional").logits)
    assert_equal(bidirectional(pixel_values, attention="block").logits, block(pixel_values).logits)
    assert not torch.allclose(bidirectional(pixel_values).logits, block(pixel_values).logits)


# ------------------------------------------------------------------------------------------- the operating point


IMPOSSIBLE = [
    *((name, value) for name in ("tokens", "width", "depth") for value in (0, -1, True, "64", 3.5)),
    *(("attention", value) for value in ("causal", "", 1)),
    *(("exit_threshold", value) for value in (-0.1, 1.5, True, "0.5", float("nan"))),
    *((name, value) for name in ("exit_after", "exit_every") for value in (0, 1.5, True)),
    *((name, value) for name in ("max_gflops", "max_latency_ms") for value in (-1.0, True, "8")),
]


def test_an_adaptive_config_has_no_other_fields():
    with pytest.raises(TypeError, match="token"):
        AdaptiveConfig(token=4)
    with pytest.raises(ValueError, match="`token`"):
        AdaptiveConfig().update(token=4)


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE)
def test_a_value_no_model_can_run_at_is_refused_with_its_name_and_value(field, value):
    message = rf"`{field}`.*{re.escape(repr(value))}"
    with pytest.raises(ValueError, match=message):
        AdaptiveConfig(**{field: value})
    with pytest.raises(ValueError, match=message):
        official_classifier()(images(), **{field: value})


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize(("field", "value", "maximum"), [("width", 33, 32), ("depth", 3, 2)])
def test_more_than_the_model_has_is_refused_at_the_call(model_class, field, value, maximum, tiny_model):
    model = tiny_model(model_class)
    for arguments in ({field: value}, {"adaptive_config": AdaptiveConfig(**{field: value})}):
        with pytest.raises(ValueError, match=rf"`{field}`.*{maximum}.*{value}"):
            model(images(), **arguments)


@pytest.mark.parametrize(("field", "value", "maximum"), [("width", 65, 64), ("depth", 5, 4)])
def test_more_than_the_model_has_is_refused_when_set_and_when_saved(field, value, maximum, tmp_path):
    model = official_model(AdaPerceiverForImageClassification)
    message = rf"`{field}`.*{maximum}.*{value}"
    with pytest.raises(ValueError, match=message):
        model.adaptive_config = AdaptiveConfig(**{field: value})
    assert model.adaptive_config == AdaptiveConfig()

    setattr(model.adaptive_config, field, value)  # behind the setter's back
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=message):
        model(images())


@pytest.mark.parametrize("widths", [[], [32], [32, 64, 64], [32, 65], [32, 0], [32, 48.5]])
def test_one_width_per_image_must_be_one_possible_width_for_each_image(widths):
    with pytest.raises(ValueError, match="`width"):
        official_classifier()(images(batch=2), width=widths)


@pytest.mark.parametrize(
    "point",
    [
        {"tokens": 6},
        {"tokens": 1},
        {"tokens": 24},
        {"width": 41},
        {"width": 1},
        {"tokens": 7, "width": 63, "depth": 2},
    ],
    ids=str,
)
def test_points_that_were_never_trained_run(point):
    model = official_classifier()  # trained at 4, 8, 16 tokens and widths 32, 48, 64
    pixel_values = images()
    logits = model(pixel_values, **point).logits
    assert logits.isfinite().all()
    assert not torch.allclose(logits, model(pixel_values).logits)


def test_the_full_model_runs_when_nothing_is_said():
    model = official_classifier()
    pixel_values = images()
    everything = {"tokens": 16, "width": 64, "depth": 4, "attention": "block"}
    assert_equal(model(pixel_values).logits, model(pixel_values, **everything).logits)
    point = model.adaperceiver.operating_point()
    assert {name: getattr(point, name) for name in everything} == everything


def test_arguments_win_over_a_passed_config_which_wins_over_the_models_own():
    model = official_model(AdaPerceiverForImageClassification)
    model.adaptive_config = AdaptiveConfig(tokens=4, width=32, depth=1)
    outputs = model(
        pixel_values := images(),
        adaptive_config=AdaptiveConfig(tokens=8, depth=3),
        tokens=12,
        output_hidden_states=True,
    )
    assert outputs.hidden_states[-1].shape[1] == 12  # the argument, over the passed config
    assert len(outputs.hidden_states) == 1 + 3  # the passed config, over the model's own
    expected = official_classifier()(pixel_values, tokens=12, width=32, depth=3)  # the width is the model's own
    assert_equal(outputs.logits, expected.logits)


def test_a_head_and_its_base_model_share_one_adaptive_config():
    model = official_model(AdaPerceiverForImageClassification)
    model.adaptive_config = AdaptiveConfig(tokens=4)
    assert model.adaperceiver.adaptive_config is model.adaptive_config
    assert model.adaperceiver(images()).last_hidden_state.shape[1] == 4


def test_nothing_is_remembered_between_calls():
    model, fresh = (official_model(AdaPerceiverForImageClassification) for _ in range(2))
    for untouched in (model, fresh):
        untouched.adaptive_config = AdaptiveConfig(tokens=8)
    pixel_values = images()
    passed = AdaptiveConfig(tokens=4, depth=2)
    for point in ({"tokens": 4, "width": 32}, {"attention": "bidirectional"}, {"width": [32, 48]}):
        model(pixel_values, adaptive_config=passed, **point)
    model(images(batch=3), tokens=24, output_hidden_states=True)
    assert model.adaptive_config == AdaptiveConfig(tokens=8)
    assert passed == AdaptiveConfig(tokens=4, depth=2)
    assert_equal(model(pixel_values).logits, fresh(pixel_values).logits)


@pytest.mark.parametrize("value", [np.int64(8), np.int32(8), torch.tensor(8)], ids=["int64", "int32", "tensor"])
def test_integers_of_numpy_and_torch_are_integers(value, tmp_path):
    adaptive_config = AdaptiveConfig(tokens=value, width=value)
    adaptive_config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adaptive_config.json").read_text()) == {"tokens": 8, "width": 8}
    pixel_values, model = images(), official_classifier()
    expected = model(pixel_values, tokens=8, width=8, depth=2).logits
    assert_equal(model(pixel_values, tokens=value, width=value, depth=value // 4).logits, expected)


# ------------------------------------------------------------------------------------------ ... beside the weights


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_the_adaptive_config_is_saved_beside_the_weights_and_loaded_with_them(model_class, tiny_model, tmp_path):
    model = tiny_model(model_class)
    model.adaptive_config = AdaptiveConfig(tokens=8, width=24, attention="bidirectional")
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adaptive_config.json").read_text()) == {
        "tokens": 8,
        "width": 24,
        "attention": "bidirectional",
    }
    assert AdaptiveConfig.from_pretrained(tmp_path) == model.adaptive_config
    for loader in (model_class, AutoModel, AdaPerceiverForImageClassification):
        assert loader.from_pretrained(tmp_path).adaptive_config == model.adaptive_config


def test_a_loaded_model_runs_where_it_was_saved(tmp_path):
    model = official_model(AdaPerceiverForImageClassification)
    model.adaptive_config = AdaptiveConfig(tokens=4, width=32, depth=2)
    model.save_pretrained(tmp_path)
    loaded = aligned(AutoModelForImageClassification.from_pretrained(tmp_path))
    pixel_values = images()
    expected = official_classifier()(pixel_values, tokens=4, width=32, depth=2).logits
    assert_equal(loaded(pixel_values).logits, expected)


def test_a_checkpoint_without_the_file_runs_the_full_model(tiny_model, tmp_path):
    tiny_model(AdaPerceiverModel).save_pretrained(tmp_path)
    (tmp_path / "adaptive_config.json").unlink()
    assert AdaPerceiverModel.from_pretrained(tmp_path).adaptive_config == AdaptiveConfig()
    assert AdaptiveConfig.from_pretrained(tmp_path) == AdaptiveConfig()


@pytest.mark.parametrize(
    "content",
    ["{not json", '{"token": 4}', '{"tokens": 0}', '{"tokens": "4"}', '{"attention": "causal"}', "[4]", "4", "null"],
)
def test_a_broken_file_is_named_in_the_error(content, tiny_model, tmp_path):
    tiny_model(AdaPerceiverModel).save_pretrained(tmp_path)
    (tmp_path / "adaptive_config.json").write_text(content)
    for loader in (AdaptiveConfig, AdaPerceiverModel):
        with pytest.raises(ValueError, match=re.escape(str(tmp_path / "adaptive_config.json"))):
            loader.from_pretrained(tmp_path)


def test_a_file_for_a_larger_model_is_refused(tiny_model, tmp_path):
    tiny_model(AdaPerceiverModel).save_pretrained(tmp_path)
    (tmp_path / "adaptive_config.json").write_text('{"depth": 21}')
    with pytest.raises(ValueError, match=r"`depth`.*2.*21"):
        AdaPerceiverModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("loader", [AdaPerceiverModel, AutoModel])
def test_an_adaptive_config_given_at_loading_wins_and_is_copied(loader, tiny_model, tmp_path):
    model = tiny_model(AdaPerceiverModel)
    model.adaptive_config = AdaptiveConfig(tokens=4, depth=1)
    model.save_pretrained(tmp_path)
    given = AdaptiveConfig(tokens=8)
    loaded = loader.from_pretrained(tmp_path, adaptive_config=given)
    given.tokens = 2
    assert loaded.adaptive_config == AdaptiveConfig(tokens=8)  # and not depth=1: it replaces the file


def test_loading_info_comes_with_the_adaptive_config(tiny_model, tmp_path):
    model = tiny_model(AdaPerceiverModel)
    model.adaptive_config = AdaptiveConfig(tokens=4)
    model.save_pretrained(tmp_path)
    loaded, info = AdaPerceiverModel.from_pretrained(tmp_path, output_loading_info=True)
    assert loaded.adaptive_config == AdaptiveConfig(tokens=4)
    assert not info["missing_keys"]
