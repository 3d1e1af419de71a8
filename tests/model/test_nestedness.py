"""The law of the method: what a small operating point computes is part of what every larger one computes."""

from itertools import product

import pytest
import torch
from conftest import assert_close, counted_flops
from official import CONFIG, official_classifier, official_model, recorded

from adaperceiver import AdaPerceiverForImageClassification, AdaPerceiverForSemanticSegmentation
from adaperceiver.layers_adaperceiver import AdaPerceiverFFN, rotary_embedding


TOKENS, WIDTHS, DEPTHS = CONFIG.token_granularities, CONFIG.widths, range(1, CONFIG.num_hidden_layers + 1)


@pytest.fixture
def images() -> torch.Tensor:
    return recorded()["input/x"]


@torch.no_grad()
@pytest.mark.parametrize(("tokens", "width", "depth"), [*product(TOKENS, WIDTHS, DEPTHS)])
def test_the_first_latents_do_not_change_when_more_are_added(images, tokens, width, depth):
    model = official_classifier().adaperceiver
    few = model(images, tokens=tokens, width=width, depth=depth).last_hidden_state
    for more in TOKENS[TOKENS.index(tokens) :]:
        many = model(images, tokens=more, width=width, depth=depth).last_hidden_state
        assert_close(many[:, :tokens], few, 1e-6)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_slicing_equals_the_mask(images, implementation, monkeypatch):
    """Against plain masked attention, block by block."""
    model = official_model(AdaPerceiverForImageClassification).adaperceiver
    model.set_attn_implementation(implementation)
    outputs = model(images, output_hidden_states=True)
    mask = recorded()["mask/t16"].bool()

    def masked(module, query, key, value, groups, scaling, dropout):
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    monkeypatch.setattr("adaperceiver.layers_adaperceiver.block_attention", masked)
    rope = rotary_embedding(CONFIG, 16, images.device)
    for layer, before, after in zip(model.layers, outputs.hidden_states, outputs.hidden_states[1:]):
        assert_close(layer(before, rope, groups=None, width=64), after, 1e-6)


@torch.no_grad()
def test_depth_l_of_a_full_run_equals_a_run_of_depth_l(images):
    model = official_classifier().adaperceiver
    full = model(images, output_hidden_states=True).hidden_states
    for depth in DEPTHS:
        assert torch.equal(model(images, depth=depth).last_hidden_state, full[depth])


@torch.no_grad()
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [1, *WIDTHS, 41])
def test_masked_width_equals_sliced_width(gated, width):
    ffn, states = AdaPerceiverFFN(CONFIG, gated=gated), torch.randn(3, 5, CONFIG.hidden_size)
    assert_close(ffn(states, (width,) * 3), ffn(states, width), 1e-6)


@torch.no_grad()
def test_images_of_a_batch_may_differ_in_width(images):
    model = official_classifier()
    together = model(images, width=[32, 48]).logits
    alone = torch.cat([model(images[:1], width=32).logits, model(images[1:], width=48).logits])
    assert_close(together, alone)


@torch.no_grad()
@pytest.mark.parametrize("point", [{}, {"tokens": 8, "width": 32, "depth": 3}])
def test_an_image_does_not_depend_on_the_rest_of_the_batch(images, point):
    model = official_classifier()
    batch = torch.cat([images, 10 * torch.randn(5, 3, 32, 32)])
    together = model(batch, **point).logits
    for index in range(len(batch)):
        assert_close(together[index], model(batch[index : index + 1], **point).logits[0])


@torch.no_grad()
@pytest.mark.parametrize("model_class", [AdaPerceiverForImageClassification, AdaPerceiverForSemanticSegmentation])
def test_a_call_does_not_depend_on_earlier_calls(images, model_class):
    """The official model changes its mask for good: a call at 4 tokens, then one at 16, and the logits move by 0.15."""
    model = official_model(model_class)
    fresh = model(images).logits
    for point in (
        {"tokens": 4},
        {"tokens": 6, "width": 32},
        {"tokens": 24, "depth": 1},
        {"attention": "bidirectional"},
    ):
        model(images, **point)
        assert torch.equal(model(images).logits, fresh)


def test_flops_fall_with_tokens_width_and_depth_as_arithmetic_says(images):
    """2 per multiply-add. Nothing is computed for latents, hidden units or blocks beyond those asked for."""
    model = official_model(AdaPerceiverForImageClassification).adaperceiver
    model.set_attn_implementation("eager")  # torch does not count its fused attention on CPU
    d, patches, batch = CONFIG.hidden_size, 64, 2

    def block(tokens: int, width: int) -> int:
        linear = 4 * d * d + 2 * d * CONFIG.ffn_hidden_size(width)
        seen = sum((stop - start) * stop for start, stop in CONFIG.token_groups(tokens, "block"))
        return 2 * batch * (tokens * linear + 2 * seen * d)  # scores and weighted values

    for tokens, width in product([*TOKENS, 6, 24], WIDTHS):
        one, two = (counted_flops(model, images, tokens=tokens, width=width, depth=depth) for depth in (1, 2))
        assert two - one == block(tokens, width)

    # Outside the blocks, a latent costs its share of the read, and its keys and values in the write.
    edges = {tokens: counted_flops(model, images, tokens=tokens, depth=1) - block(tokens, d) for tokens in TOKENS}
    read = 2 * batch * (d * d + 2 * patches * d)  # output projection, scores, weighted values
    assert (edges[16] - edges[4]) / 12 >= read
    assert edges[4] < edges[8] < edges[16]


def test_a_run_at_few_tokens_never_touches_a_tensor_with_more(images):
    model, seen = official_classifier().adaperceiver, []
    handles = [
        module.register_forward_hook(lambda _, __, output: seen.append(output))
        for module in [model.read, *model.layers]
    ]
    model(images, tokens=6)
    for handle in handles:
        handle.remove()
    assert {output.shape[1] for output in seen} == {6}
