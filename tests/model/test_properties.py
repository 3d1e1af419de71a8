"""What holds for every AdaPerceiver, on random small ones: nested tokens, independent images, grids point by point."""

import torch
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st

from adaperceiver import AdaPerceiverConfig, AdaPerceiverForImageClassification


bounded = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@st.composite
def models(draw):
    """A classifier whose every parameter matters."""
    tokens = draw(st.integers(2, 12))
    heads = draw(st.sampled_from([1, 2, 4]))
    config = AdaPerceiverConfig(
        **{
            **TINY,
            "hidden_size": 8 * heads,
            "num_attention_heads": heads,
            "num_hidden_layers": draw(st.integers(1, 3)),
            "max_latent_tokens": tokens,
            "token_granularities": sorted(draw(st.sets(st.integers(1, tokens), min_size=1, max_size=4))),
            "widths": None,
            "use_swiglu_ffn": draw(st.booleans()),
            "use_embed_ffn": draw(st.booleans()),
            "qkv_bias": draw(st.booleans()),
            "num_labels": draw(st.integers(1, 5)),
        }
    )
    torch.manual_seed(draw(st.integers(0, 2**16)))
    model = AdaPerceiverForImageClassification(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@bounded
@given(models(), st.data())
@torch.no_grad()
def test_the_first_latents_of_any_granularity_are_those_of_a_longer_run(model, data):
    tokens = data.draw(st.sampled_from(model.config.token_granularities))
    width = data.draw(st.integers(1, model.config.max_width))
    pixel_values = torch.randn(2, 3, 32, 32)
    longer = model.adaperceiver(pixel_values, width=width).last_hidden_state
    close(model.adaperceiver(pixel_values, tokens=tokens, width=width).last_hidden_state, longer[:, :tokens])


@bounded
@given(models(), st.data())
@torch.no_grad()
def test_an_image_gets_the_same_alone_and_in_any_batch_at_any_points(model, data):
    config, count = model.config, 3
    point = {
        "tokens": data.draw(st.lists(st.integers(1, 16), min_size=count, max_size=count)),
        "width": data.draw(st.lists(st.integers(1, config.max_width), min_size=count, max_size=count)),
        "depth": data.draw(st.lists(st.integers(1, config.num_hidden_layers), min_size=count, max_size=count)),
    }
    pixel_values = torch.randn(count, 3, 32, 32)
    logits = model(pixel_values, **point).logits
    for index in range(count):
        alone = model(pixel_values[index : index + 1], **{name: values[index] for name, values in point.items()})
        close(logits[index : index + 1], alone.logits)


@bounded
@given(models())
@torch.no_grad()
def test_a_grid_is_what_each_of_its_points_says(model):
    pixel_values = torch.randn(2, 3, 32, 32)
    points = list(model.predictions_grid(pixel_values))
    assert len(points) == model.config.num_hidden_layers * len(model.config.token_granularities)
    for depth, tokens, logits in points:
        close(logits, model(pixel_values, depth=depth, tokens=tokens).logits)
