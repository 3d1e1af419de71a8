"""A stem of inverted residual blocks computes what the network it comes from computes."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, assert_equal
from torch import nn

from adaperceiver import AdaPerceiverConfig, AdaPerceiverForImageClassification


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from teacher import Teacher, stem_of


SHARED = Path(__file__).parents[2] / "shared" / "teachers" / "efficientnet-lite2-mini100"


class Conv(nn.Module):
    """A convolution and its batch norm, as the networks have them that stems are copied from."""

    def __init__(self, channels, out_channels, kernel=1, stride=1, groups=1):
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(out_channels, eps=1e-3)
        for parameter in [*self.norm.parameters(), self.norm.running_mean, self.norm.running_var]:
            nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, maps):
        return self.norm(self.conv(maps))


class Block(nn.Module):
    def __init__(self, channels, out_channels, expansion, stride):
        super().__init__()
        hidden = channels * expansion
        self.expand = Conv(channels, hidden) if expansion > 1 else nn.Identity()
        self.depthwise = Conv(hidden, hidden, 3, stride, hidden)
        self.project = Conv(hidden, out_channels)
        self.residual = stride == 1 and channels == out_channels

    def forward(self, maps):
        update = self.expand(maps)
        update = update if isinstance(self.expand, nn.Identity) else update.clamp(0, 6)
        update = self.project(self.depthwise(update).clamp(0, 6))
        return maps + update if self.residual else update


def small_network():
    stages = [nn.Sequential(Block(6, 4, 1, 1)), nn.Sequential(Block(4, 8, 3, 1), Block(8, 8, 3, 1))]
    return nn.ModuleDict({"stem": Conv(3, 6, 3, 1), "stages": nn.ModuleList(stages)}).eval()


def student_with(layers, **changes):
    rows = [row for row, _ in layers]
    model = AdaPerceiverForImageClassification(AdaPerceiverConfig(**{**TINY, **changes}, stem_layers=rows)).eval()
    stem = model.adaperceiver.embeddings.patch_embeddings
    for layer, (_, weights) in zip(stem, layers):
        layer.load_state_dict(weights)
    return model, nn.Sequential(*list(stem)[:-1])


@torch.no_grad()
@pytest.mark.parametrize("size", [(16, 16), (24, 8)])
def test_a_copied_stem_equals_the_stages_it_comes_from(size):
    network = small_network()
    network = SimpleNamespace(stem=network["stem"], stages=network["stages"])
    layers = stem_of(network, 2)
    assert [row for row, _ in layers] == [[6, 1, 3, 0], [4, 1, 3, 1], [8, 1, 3, 3], [8, 1, 3, 3]]
    _, stem = student_with(layers, patch_size=1, image_size=8)
    images = torch.randn(2, 3, *size)
    expected = network.stages[1](network.stages[0](network.stem(images).clamp(0, 6)))
    torch.testing.assert_close(stem(images), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"there is no teacher in {SHARED}")
@pytest.mark.parametrize("size", [(88, 88), (96, 80), (40, 200)])
def test_the_first_stages_of_a_real_teacher(size):
    from accelerate import Accelerator

    network = Teacher(str(SHARED), Accelerator(), trust_remote_code=True).model
    _, stem = student_with(stem_of(network, 3), patch_size=8, image_size=32)
    images = torch.randn(2, 3, *size)
    expected = network(pixel_values=images, output_hidden_states=True).hidden_states[3]
    torch.testing.assert_close(stem(images), expected, atol=1e-4, rtol=1e-5)  # of values up to 50


def test_other_networks_are_refused():
    with pytest.raises(SystemExit, match="--stem_from must name a network of inverted residual blocks"):
        stem_of(nn.Linear(2, 2), 3)


def test_a_frozen_stem_gets_no_gradients_and_stays_as_it_is():
    rows = [[6, 2, 3, 0], [8, 2, 5, 4], [8, 1, 3, 6], [10, 2, 3, 2]]
    model = AdaPerceiverForImageClassification(AdaPerceiverConfig(**TINY, stem_layers=rows)).train()
    stem = model.adaperceiver.embeddings.patch_embeddings
    stem.freeze()
    model(torch.randn(2, 3, 32, 32), labels=torch.tensor([0, 1])).loss.backward()
    for number, layer in enumerate(stem):
        frozen = number < len(rows)
        for parameter in layer.parameters():
            assert parameter.requires_grad != frozen
            assert (parameter.grad is None) == frozen


def test_a_new_stem_starts_at_a_scale_that_layers_keep():
    torch.manual_seed(0)
    rows = [[32, 2, 3, 0], [32, 2, 5, 4], [32, 1, 3, 6], [32, 2, 3, 6]]
    model = AdaPerceiverForImageClassification(AdaPerceiverConfig(**TINY, stem_layers=rows))
    stem = nn.Sequential(*list(model.adaperceiver.embeddings.patch_embeddings)[:-1])
    with torch.no_grad():
        scale = stem(torch.randn(4, 3, 32, 32)).std()
    assert 0.1 < scale < 10


def test_a_stem_is_saved_and_loaded_with_the_model(tmp_path):
    rows = [[6, 2, 3, 0], [8, 2, 5, 4], [8, 1, 3, 6], [10, 2, 3, 2]]
    model = AdaPerceiverForImageClassification(AdaPerceiverConfig(**TINY, stem_layers=rows)).eval()
    model.save_pretrained(tmp_path)
    again = AdaPerceiverForImageClassification.from_pretrained(tmp_path)
    images = torch.randn(2, 3, 40, 24)
    assert_equal(again(images, tokens=4).logits, model(images, tokens=4).logits)
