"""Pipelines: adaptive arguments for each task, inputs of all kinds, with the package and through remote code."""

import json

import peft
import PIL.Image
import pytest
import torch
from conftest import assert_equal, run
from datasets import Column, Dataset, Image
from transformers import pipeline
from transformers.pipelines.pt_utils import KeyDataset

from adaperceiver import (
    AdaPerceiverDepthEstimationPipeline,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverImageClassificationPipeline,
    AdaPerceiverImageFeatureExtractionPipeline,
    AdaPerceiverImageSegmentationPipeline,
    AdaPerceiverModel,
    AdaptiveConfig,
    image_processor_for,
)


TASKS = {
    "image-classification": (AdaPerceiverForImageClassification, AdaPerceiverImageClassificationPipeline),
    "image-segmentation": (AdaPerceiverForSemanticSegmentation, AdaPerceiverImageSegmentationPipeline),
    "depth-estimation": (AdaPerceiverForDepthEstimation, AdaPerceiverDepthEstimationPipeline),
    "image-feature-extraction": (AdaPerceiverModel, AdaPerceiverImageFeatureExtractionPipeline),
}
PICTURES = [
    PIL.Image.effect_mandelbrot(size, (-2.0, -1.2, 1.0, 1.2), 20 + size[0]).convert("RGB")
    for size in [(50, 40), (33, 64), (20, 20), (70, 31), (41, 50)]
]
POINT = {"tokens": 4, "width": 16, "depth": 1}
TOKENS = [2, 16, 4, 3, 4]  # of each picture

every_task = pytest.mark.parametrize("task", TASKS)


@pytest.fixture
def make(tiny_model):
    """Build the pipeline of a task around a tiny model."""

    def make(task, **kwargs):
        model_class, pipeline_class = TASKS[task]
        model = tiny_model(model_class)
        processor = image_processor_for(model.config, task)
        return pipeline(task, model, image_processor=processor, pipeline_class=pipeline_class, device="cpu", **kwargs)

    return make


def content(result):
    """The numbers in a result of any task."""
    if isinstance(result, dict):  # depth
        return result["predicted_depth"]
    if "mask" in result[0]:
        return {item["label"]: item["mask"].tobytes() for item in result}
    if "score" in result[0]:
        return {item["label"]: item["score"] for item in result}
    return torch.tensor(result)


def assert_same(result, expected):
    result, expected = content(result), content(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    else:
        in_bytes = isinstance(next(iter(expected.values())), bytes)
        assert result == (expected if in_bytes else pytest.approx(expected, abs=1e-6))


def by_hand(pipe, image, **point):
    """What the model says about one image, as the pipeline of transformers would put it."""
    pixel_values = pipe.image_processor(image, return_tensors="pt").pixel_values
    with torch.no_grad():
        outputs = pipe.model(pixel_values, **point)
    if pipe.task == "image-classification":
        scores = outputs.logits[0].softmax(0)
        best = scores.topk(5).indices.tolist()
        return [{"label": pipe.model.config.id2label[index], "score": scores[index].item()} for index in best]
    size = [(image.height, image.width)]
    if pipe.task == "depth-estimation":
        return pipe.image_processor.post_process_depth_estimation(outputs, size)[0]
    if pipe.task == "image-feature-extraction":
        return outputs.last_hidden_state.tolist()
    classes = pipe.image_processor.post_process_semantic_segmentation(outputs, size)[0]
    masks = {
        index: PIL.Image.fromarray((classes == index).byte().numpy() * 255) for index in classes.unique().tolist()
    }
    return [{"label": pipe.model.config.id2label[index], "mask": mask} for index, mask in masks.items()]


@every_task
def test_a_call_runs_where_it_says(make, task):
    pipe = make(task)
    for point in (
        {},
        POINT,
        {"attention": "bidirectional", "tokens": 7},
        {"adaptive_config": AdaptiveConfig(**POINT)},
    ):
        assert_same(pipe(PICTURES[0], **point), by_hand(pipe, PICTURES[0], **point))


@every_task
def test_arguments_at_construction_are_defaults_that_a_call_overrides(make, task):
    pipe = make(task, **POINT)

    def where(**point):
        report = pipe(PICTURES[0], report=True, **point)["report"]
        return {name: report[name] for name in POINT}

    assert where() == POINT
    assert where(tokens=8) == {**POINT, "tokens": 8}
    assert where(adaptive_config=AdaptiveConfig(tokens=2, depth=2)) == {"tokens": 2, "width": 16, "depth": 2}
    assert where(tokens=8, adaptive_config=AdaptiveConfig(tokens=2)) == {**POINT, "tokens": 8}
    assert where() == POINT  # nothing is remembered


def test_a_budget_at_construction_gives_way_to_a_call_that_spells_out_its_point(make):
    pipe = make("image-classification", max_gflops=0.0007)
    assert pipe(PICTURES[0], report=True)["report"]["gflops"] <= 0.0007
    full = {"tokens": 16, "width": 32, "depth": 2}
    assert full.items() <= pipe(PICTURES[0], report=True, **full)["report"].items()


def in_generator(pictures):
    yield from pictures


def in_dataset(pictures):
    dataset = Dataset.from_dict({"picture": pictures}, features=None).cast_column("picture", Image())
    return KeyDataset(dataset, "picture")


def in_column(pictures):
    return in_dataset(pictures).dataset["picture"]


@every_task
@pytest.mark.parametrize("form", [list, tuple, in_generator, in_dataset, in_column])
def test_many_images_come_back_in_order_whatever_holds_them(make, task, form):
    pipe = make(task, **POINT)
    results = list(pipe(form(PICTURES), batch_size=2))
    assert len(results) == len(PICTURES)
    for picture, result in zip(PICTURES, results):
        assert_same(result, pipe(picture))


def test_a_column_of_a_dataset_is_taken_like_a_list(make):
    pipe, column = make("image-classification"), in_column(PICTURES)
    assert type(column) is Column
    assert isinstance(pipe(column), list)
    assert pipe(column[:0]) == pipe([]) == []


@every_task
@pytest.mark.parametrize("form", [list, in_dataset, in_column])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_values_per_image_reach_their_images_alone(make, task, form, batch_size):
    pipe = make(task)
    depths = torch.tensor([1, 2, 2, 1, 1])
    results = list(pipe(form(PICTURES), tokens=TOKENS, depth=depths, width=16, batch_size=batch_size, report=True))
    reports = [{name: item["report"][name] for name in POINT} for item in results]
    assert reports == [{"tokens": t, "width": 16, "depth": d} for t, d in zip(TOKENS, depths.tolist())]
    for picture, item in zip(PICTURES, results):
        where = {name: item["report"][name] for name in POINT}
        assert_same(item["result"], by_hand(pipe, picture, **where))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (PICTURES, r"`tokens` must be one value, or one per image of the 5, got 2 values"),
        (in_dataset(PICTURES), r"`tokens` must be one value, or one per image of the 5, got 2 values"),
        (in_generator(PICTURES), r"`tokens` with one value per image needs a list or a dataset .*, got generator"),
        (PICTURES[0], r"`tokens` with one value per image needs a list or a dataset .*, got Image"),
    ],
)
def test_values_per_image_that_match_no_images_are_refused(make, inputs, message):
    with pytest.raises(ValueError, match=message):
        make("image-classification")(inputs, tokens=[2, 4])


def test_values_per_image_at_construction_are_refused(make):
    with pytest.raises(ValueError, match=r"`tokens` must be an integer of at least 1, got \[2, 4\]"):
        make("image-classification", tokens=[2, 4])


@every_task
def test_unknown_arguments_are_refused_with_those_allowed(make, task):
    known = TASKS[task][1].stock_arguments[0]
    message = (
        rf"Unknown argument `token_count` of AdaPerceiver.*Pipeline; it takes {known}.* max_gflops.* tokens, width"
    )
    with pytest.raises(TypeError, match=message):
        make(task, token_count=4)
    with pytest.raises(TypeError, match=message):
        make(task)(PICTURES[0], token_count=4)


@every_task
def test_values_that_the_model_cannot_run_at_are_refused(make, task):
    with pytest.raises(ValueError, match="`width` must be an integer from 1 to 32, got 33"):
        make(task, width=33)
    with pytest.raises(ValueError, match="`depth` must be an integer from 1 to 2, got 3"):
        make(task)(PICTURES[0], depth=3)
    if task != "image-classification":
        with pytest.raises(ValueError, match="`exit_threshold` needs a model with a classifier"):
            make(task)(PICTURES[0], exit_threshold=0.5)


def test_the_arguments_of_transformers_still_work(make):
    classify, extract = make("image-classification", top_k=2), make("image-feature-extraction")
    assert len(classify(PICTURES[0], tokens=4)) == 2
    assert len(classify(PICTURES[0], tokens=4, top_k=3)) == 3
    logits = classify(PICTURES[0], tokens=4, top_k=10, function_to_apply="none")
    scores = classify(PICTURES[0], tokens=4, top_k=10)
    assert torch.tensor([item["score"] for item in logits]).softmax(0).tolist() == pytest.approx(
        [item["score"] for item in scores], abs=1e-6
    )
    pixel_values = extract.image_processor(PICTURES[0], return_tensors="pt").pixel_values
    with torch.no_grad():
        expected = extract.model(pixel_values, tokens=4).pooler_output
    assert_equal(extract(PICTURES[0], tokens=4, pool=True, return_tensors=True), expected)
    larger = {"crop_size": {"height": 64, "width": 64}, "size": {"shortest_edge": 64}}
    report = extract(PICTURES[0], image_processor_kwargs=larger, report=True)["report"]
    assert report["gflops"] == extract.model.flops(image_size=(64, 64))["total"] / 1e9
    with pytest.raises(ValueError, match="Subtask panoptic is not supported"):
        make("image-segmentation")(PICTURES[0], subtask="panoptic")


def test_early_exit_is_reported_for_each_image_with_what_it_cost(make):
    pipe = make("image-classification")
    thresholds = [0.0, 1.0, 0.0, 1.0, 1.0]
    results = pipe(PICTURES, exit_threshold=thresholds, batch_size=3, report=True)
    assert [item["report"]["exit_depth"] for item in results] == [1, 2, 1, 2, 2]
    assert {item["report"]["depth"] for item in results} == {2}
    early, late = results[0]["report"]["gflops"], results[1]["report"]["gflops"]
    assert late == pipe.model.flops(exit_threshold=1.0)["total"] / 1e9
    assert early == pipe.model.flops(depth=1)["total"] / 1e9 < late
    assert pipe(PICTURES[0], report=True)["report"]["exit_depth"] is None


@every_task
def test_files_are_seen_as_the_image_processor_sees_them(make, task, tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    deep = PIL.Image.fromarray((torch.arange(40 * 50).view(40, 50) * 32).numpy().astype("uint16"))  # 16 bits
    deep.save(tmp_path / "deep.png", exif=exif)
    upright = deep.transpose(PIL.Image.Transpose.ROTATE_270)
    pipe = make(task)
    result = pipe(str(tmp_path / "deep.png"))
    assert_same(result, by_hand(pipe, upright))
    if task == "depth-estimation":
        assert result["predicted_depth"].shape == (50, 40)
        assert result["depth"].size == (40, 50)


@every_task
def test_half_precision_runs(make, task):
    pipe = make(task)
    pipe.model.to(torch.bfloat16)
    results = pipe(PICTURES, batch_size=2, tokens=TOKENS, report=True)
    assert [item["report"]["tokens"] for item in results] == TOKENS


@every_task
def test_the_head_of_another_task_is_refused(tiny_model, task):
    model_class, pipeline_class = TASKS[task]
    others = [other for other, _ in TASKS.values() if other is not model_class]
    for other in others:
        with pytest.raises(TypeError, match=f"must be of {model_class.__name__}, got {other.__name__}"):
            pipeline_class(tiny_model(other), device="cpu")


@pytest.mark.parametrize("save_code", [True, False])
def test_the_package_needs_no_remote_code_for_a_folder(make, tmp_path, save_code):
    pipe = make("image-classification")
    pipe.model.save_pretrained(tmp_path, save_code=save_code)
    loaded = pipeline("image-classification", str(tmp_path), pipeline_class=type(pipe), device="cpu", tokens=4)
    assert_same(loaded(PICTURES[0]), pipe(PICTURES[0], tokens=4))


@every_task
def test_a_model_in_memory_gets_our_pipeline(make, task):
    ours = make(task)
    found = pipeline(task, ours.model, image_processor=ours.image_processor, device="cpu")
    assert type(found) is TASKS[task][1]
    assert_same(found(PICTURES[0], tokens=4), ours(PICTURES[0], tokens=4))
    with pytest.raises(TypeError, match="Unknown argument `token_count`"):
        found(PICTURES[0], token_count=4)


def test_a_model_in_memory_under_an_adapter_gets_our_pipeline(make):
    ours = make("image-segmentation")
    model = peft.get_peft_model(ours.model, peft.LoraConfig(target_modules=["fc2"]))
    found = pipeline("image-segmentation", model, image_processor=ours.image_processor, device="cpu")
    assert_same(found(PICTURES[0], tokens=4), ours(PICTURES[0], tokens=4))


def test_a_model_in_memory_is_refused_by_the_task_of_another_head(make):
    ours = make("image-classification")
    for task in TASKS.keys() - {"image-classification"}:
        with pytest.raises(
            TypeError, match=r"`model` of .*Pipeline must be of .*, got AdaPerceiverForImageClassification"
        ):
            pipeline(task, ours.model, image_processor=ours.image_processor)


def test_every_folder_serves_features_beside_its_own_task(make, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    load = {"trust_remote_code": True, "device": "cpu"}
    for task in TASKS:
        make(task).model.save_pretrained(tmp_path / task)
        pipe = pipeline("image-feature-extraction", str(tmp_path / task), **load)
        assert len(pipe(PICTURES[0], tokens=4)[0]) == 4
        assert pipeline(model=str(tmp_path / task), **load).task == task
        assert list(json.loads((tmp_path / task / "config.json").read_text())["custom_pipelines"]) == [task]


REMOTE = """
import sys
sys.modules["adaperceiver"] = None  # there is no such module

import PIL.Image
import torch
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil, pipeline
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.pt_utils import KeyDataset

def stock():
    torch.manual_seed(0)
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=32)
    processor = ViTImageProcessorPil(size={"height": 32, "width": 32})
    pipe = pipeline("image-classification", ViTForImageClassification(config), image_processor=processor, device="cpu")
    try:
        pipe(pictures[0], tokens=4)
    except TypeError:
        return type(pipe), pipe(pictures)
    raise AssertionError("a ViT has no tokens to choose")

pictures = [PIL.Image.open(f"{index}.png") for index in range(5)]
tasks, before, results = dict(PIPELINE_REGISTRY.supported_tasks), stock(), {}
for task in TASKS:
    pipe = pipeline(task, model=task, trust_remote_code=True, device="cpu", width=16)
    assert type(pipe).__module__.startswith("transformers_modules."), type(pipe)
    assert type(pipe.image_processor).__module__.startswith("transformers_modules."), type(pipe.image_processor)
    results[task] = pipe(pictures, tokens=TOKENS, batch_size=2, report=True)
    for call in (lambda: pipe(pictures[0], token_count=4), lambda: pipe(pictures, tokens=[2])):
        try:
            call()
        except (TypeError, ValueError) as error:
            assert "`token" in str(error)
        else:
            raise AssertionError(task)
    streamed = list(pipe((picture for picture in pictures), tokens=4, report=True))
    assert [item["report"]["tokens"] for item in streamed] == [4] * 5
    pipe.save_pretrained(f"{task}-again")
    again = pipeline(model=f"{task}-again", trust_remote_code=True, device="cpu")
    assert (type(again).__name__, again.task) == (type(pipe).__name__, task)
    in_memory = pipeline(task, model=pipe.model, image_processor=pipe.image_processor, device="cpu")
    assert type(in_memory).__name__ == type(pipe).__name__  # of the copy that the model came with
    features = pipeline("image-feature-extraction", model=task, trust_remote_code=True, device="cpu")
    assert len(features(pictures[0], tokens=3)[0]) == 3
assert before == stock()
assert {task for task in tasks if tasks[task] != PIPELINE_REGISTRY.supported_tasks[task]} == set(TASKS)
pipe = pipeline("image-classification", model="image-classification", trust_remote_code=True, device="cpu")
assert len(pipe(pictures[0], tokens=8, exit_threshold=0.9, top_k=3)) == 3
torch.save(results, "results.pt")
"""


@pytest.mark.slow
def test_remote_code_gives_the_same_and_leaves_other_pipelines_alone(make, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    expected = {}
    for index, picture in enumerate(PICTURES):
        picture.save(tmp_path / f"{index}.png")
    for task in TASKS:
        pipe = make(task)
        pipe.model.save_pretrained(tmp_path / task)
        expected[task] = pipe(PICTURES, tokens=TOKENS, width=16, report=True)
    run(f"TASKS, TOKENS = {list(TASKS)}, {TOKENS}\n{REMOTE}", tmp_path)
    results = torch.load(tmp_path / "results.pt", weights_only=False)
    for task in TASKS:
        for result, wanted in zip(results[task], expected[task], strict=True):
            assert result["report"] == wanted["report"]
            assert_same(result["result"], wanted["result"])
