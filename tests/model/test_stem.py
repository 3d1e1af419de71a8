"""A stem of inverted residual blocks computes what the network it comes from computes."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, aligned, assert_equal, counted_flops
from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from adaperceiver import AdaPerceiverConfig, AdaPerceiverForImageClassification


pytest.importorskip("kornia", reason="augmentation needs kornia")
import distill

from adaperceiver.training import finetuning
from adaperceiver.training.teacher import Teacher, stem_of


STEMS = [
    [[6, 1], [8, 2], [10, 4]],
    [[6, 2, 3, 0], [8, 2, 5, 4], [8, 1, 3, 6], [10, 2, 3, 2]],
    [[6, 1, 3, 0], [8, 4, 3, 1], [10, 2]],
]
SHARED = ROOT.parent / "shared" / "teachers" / "efficientnet-lite2-mini100"


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
    for number, (_, weights) in enumerate(layers):
        stem[number].load_state_dict(weights)
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
    with pytest.raises(ValueError, match="--stem_from must name a network of inverted residual blocks"):
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


@pytest.mark.parametrize("axes", [[], ["tokens", "depth", "width"]], ids=["one point", "once for all"])
def test_a_frozen_stem_keeps_no_graph_and_costs_no_backward_pass(axes):
    rows = [[6, 2, 3, 0], [8, 2, 5, 4], [8, 1, 3, 6], [10, 2, 3, 2]]
    model = AdaPerceiverForImageClassification(
        AdaPerceiverConfig(**TINY, stem_layers=rows, adaptive_axes=axes)
    ).train()
    stem, graphs = model.adaperceiver.embeddings.patch_embeddings, []
    stem.freeze()
    for layer in stem:
        layer.register_forward_hook(lambda module, inputs, output: graphs.append(output.requires_grad))
    loss = model(torch.randn(2, 3, 32, 32), labels=torch.tensor([0, 1])).loss
    assert graphs == [False] * len(rows) + [True]
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions if before is not None]
    assert [node.name() for node in seen].count("ConvolutionBackward0") == 1  # the projection's


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
    again = aligned(AdaPerceiverForImageClassification.from_pretrained(tmp_path))
    remote = get_class_from_dynamic_module("modeling_adaperceiver.AdaPerceiverForImageClassification", str(tmp_path))
    assert remote is not AdaPerceiverForImageClassification
    with_remote_code = aligned(remote.from_pretrained(tmp_path))
    for size in ((32, 32), (40, 24), (8, 64)):
        images = torch.randn(2, 3, *size)
        expected = model(images, tokens=4).logits
        assert_equal(again(images, tokens=4).logits, expected)
        assert_equal(with_remote_code(images, tokens=4).logits, expected)


@pytest.mark.parametrize("rows", STEMS)
@pytest.mark.parametrize("size", [(32, 32), (40, 24)])
def test_the_flops_of_a_stem_are_those_that_torch_counts(rows, size, tiny_model):
    model = tiny_model(AdaPerceiverForImageClassification, stem_layers=rows, attn_implementation="eager")
    for point in ({}, {"tokens": 4, "width": 16, "depth": 1}):
        counted = counted_flops(model, torch.randn(2, 3, *size), **point)
        assert counted == model.flops(image_size=size, batch_size=2, **point)["total"] > 0


# ----------------------------------------------------------------------------------------------------- in the scripts


def teacher_with(network, names=("cat", "dog")):
    """What `build_student` asks of a teacher."""
    values = {"mean": torch.full((3, 1, 1), 0.4), "std": torch.full((3, 1, 1), 0.3)}
    return SimpleNamespace(name="stand-in", model=network, id2label=dict(enumerate(names)), **values)


@torch.no_grad()
def test_a_new_student_starts_with_the_stem_and_the_normalisation_of_the_network():
    network = small_network()
    teacher = teacher_with(SimpleNamespace(stem=network["stem"], stages=network["stages"]))
    student = json.dumps({**TINY, "patch_size": 1, "image_size": 8})
    args = distill.DistillationArguments(stem_from="stand-in", stem_stages=2, student=student)
    model = distill.build_student(args, teacher).eval()
    assert model.config.image_mean == pytest.approx([0.4] * 3)
    assert model.config.image_std == pytest.approx([0.3] * 3)
    stem = nn.Sequential(*list(model.adaperceiver.embeddings.patch_embeddings)[:-1])
    images = torch.randn(2, 3, 8, 8)
    expected = network["stages"][1](network["stages"][0](network["stem"](images).clamp(0, 6)))
    torch.testing.assert_close(stem(images), expected, atol=1e-5, rtol=1e-5)


def test_fine_tuning_trains_everything_but_a_frozen_stem(tiny_model, tmp_path):
    tiny_model(AdaPerceiverForImageClassification, stem_layers=STEMS[1]).save_pretrained(tmp_path, save_code=False)
    args = finetuning.FineTuningArguments(model=str(tmp_path), train_all=True, freeze_stem=True)
    model = finetuning.load_model(args, "image-classification", ["a", "b"])
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    stem = "adaperceiver.embeddings.patch_embeddings."
    last = len(model.adaperceiver.embeddings.patch_embeddings) - 1
    names = {name for name, _ in model.named_parameters() if name.startswith(stem)}
    assert frozen == {name for name in names if not name.startswith(f"{stem}{last}.")}
    assert frozen
    tiny_model(AdaPerceiverForImageClassification).save_pretrained(tmp_path / "plain", save_code=False)
    args.model = str(tmp_path / "plain")
    with pytest.raises(ValueError, match="--freeze_stem needs a model with a stem"):
        finetuning.load_model(args, "image-classification", ["a", "b"])
