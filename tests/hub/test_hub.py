"""Saved folders work by themselves: remote code in real processes without the package, model cards, pushes."""

import inspect
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import accelerate
import peft
import pytest
import torch
from conftest import MODEL_CLASSES, ROOT, TINY, aligned, assert_equal, images
from hub_server import served
from huggingface_hub import HfApi, ModelCard
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    BitImageProcessor,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_relative_import_files

import adaperceiver
from adaperceiver import (
    AdaPerceiverBackbone,
    AdaPerceiverConfig,
    AdaPerceiverForDepthEstimation,
    AdaPerceiverForDistillation,
    AdaPerceiverForImageClassification,
    AdaPerceiverForSemanticSegmentation,
    AdaPerceiverModel,
    AdaptiveConfig,
    image_processor_for,
)
from adaperceiver.hub_adaperceiver import custom_pipelines, link_sources
from adaperceiver.tasks_adaperceiver import AUTO_MAP


SOURCES = {path.name for path in (ROOT / "modeling").glob("*_adaperceiver.py")}
WITHOUT_SOURCES = {"README.md", "adaptive_config.json", "config.json", "model.safetensors", "preprocessor_config.json"}
TASKS = {
    AdaPerceiverModel: "image-feature-extraction",
    AdaPerceiverForImageClassification: "image-classification",
    AdaPerceiverForSemanticSegmentation: "image-segmentation",
    AdaPerceiverForDepthEstimation: "depth-estimation",
    AdaPerceiverForDistillation: "image-classification",
    AdaPerceiverBackbone: "image-feature-extraction",
}


def files_of(folder):
    return {path.name for path in Path(folder).iterdir()}


def config_of(folder):
    return json.loads(Path(folder, "config.json").read_text())


# --------------------------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_a_folder_holds_weights_configs_processor_card_and_the_source_files(model_class, tiny_model, tmp_path):
    tiny_model(model_class).save_pretrained(tmp_path)
    assert files_of(tmp_path) == WITHOUT_SOURCES | SOURCES
    for name in SOURCES - {"configuration_adaperceiver.py"}:
        assert (tmp_path / name).read_text() == (ROOT / "modeling" / name).read_text()
    configuration = (ROOT / "configuration" / "configuration_adaperceiver.py").read_text()
    assert (tmp_path / "configuration_adaperceiver.py").read_text().startswith(configuration)

    config, task = config_of(tmp_path), TASKS[model_class]
    assert set(config["auto_map"]) == {
        "AutoConfig",
        "AutoModel",
        "AutoModelForImageClassification",
        "AutoModelForSemanticSegmentation",
        "AutoModelForDepthEstimation",
        "AutoBackbone",
    }
    assert list(config["custom_pipelines"]) == [task]  # several would stop transformers from inferring the task
    metadata = ModelCard.load(tmp_path / "README.md").data
    assert (metadata.library_name, metadata.pipeline_tag, metadata.tags) == ("transformers", task, ["adaperceiver"])


@pytest.mark.parametrize("entry", ["modeling_adaperceiver.py", "pipeline_adaperceiver.py"])
def test_the_remote_loader_finds_every_source_file_from_the_entry(entry, tiny_model, tmp_path):
    """It follows `from .file import`, and brings nothing else; saving again needs all files."""
    tiny_model(AdaPerceiverModel).save_pretrained(tmp_path)
    reached = {Path(path).name for path in get_relative_import_files(tmp_path / entry)}
    assert reached | {entry} == SOURCES


def test_a_folder_without_code_names_no_code_and_loads_with_the_package(tiny_model, tmp_path):
    model = tiny_model(AdaPerceiverForImageClassification)
    model.save_pretrained(tmp_path / "with")
    loaded = AdaPerceiverForImageClassification.from_pretrained(tmp_path / "with")
    loaded.save_pretrained(tmp_path / "without", save_code=False)  # though its config came with code
    assert files_of(tmp_path / "without") == WITHOUT_SOURCES
    assert not {"auto_map", "custom_pipelines"} & set(config_of(tmp_path / "without"))
    assert "trust_remote_code" not in (tmp_path / "without" / "README.md").read_text()

    found = AutoModelForImageClassification.from_pretrained(tmp_path / "without")
    assert type(found) is AdaPerceiverForImageClassification
    assert_equal(found.state_dict(), model.state_dict())
    found.save_pretrained(tmp_path / "with-again")
    assert config_of(tmp_path / "with-again") == config_of(tmp_path / "with")


def test_saving_leaves_the_config_in_memory_as_it_was(tiny_model, tmp_path):
    model = tiny_model(AdaPerceiverForSemanticSegmentation)
    config, before = model.config, model.config.to_dict()
    model.save_pretrained(tmp_path)
    assert model.config is config
    assert model.config.to_dict() == before
    assert config_of(tmp_path)["output_tokens"] == "dense"
    assert config_of(tmp_path)["architectures"] == ["AdaPerceiverForSemanticSegmentation"]


def test_saves_in_threads_never_change_the_config_in_memory(tiny_model, tmp_path, monkeypatch):
    model = tiny_model(AdaPerceiverForImageClassification)
    config, both, save, seen = model.config, Barrier(2), PreTrainedModel.save_pretrained, []

    def together(self, *args, **kwargs):
        both.wait(timeout=60)
        seen.append(model.config)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", together)
    with ThreadPoolExecutor(2) as executor:
        list(executor.map(lambda index: model.save_pretrained(tmp_path / str(index), save_code=index > 0), range(2)))
    assert all(one is config for one in (*seen, model.config))
    assert ["auto_map" in config_of(tmp_path / str(index)) for index in range(2)] == [False, True]


def test_a_failed_save_leaves_the_config_in_memory_as_it_was(tiny_model, tmp_path):
    model = tiny_model(AdaPerceiverModel)
    config, before = model.config, model.config.to_dict()
    with pytest.raises(ValueError, match="nonsense"):
        model.save_pretrained(tmp_path, max_shard_size="nonsense")
    assert model.config is config
    assert model.config.to_dict() == before


def test_a_model_card_and_an_image_processor_that_are_there_stay(tiny_model, tmp_path, caplog):
    (tmp_path / "README.md").write_text("mine")
    BitImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    processor = (tmp_path / "preprocessor_config.json").read_text()
    tiny_model(AdaPerceiverForImageClassification).save_pretrained(tmp_path, model_card="another")
    assert (tmp_path / "README.md").read_text() == "mine"
    assert f"`model_card` is not written, since {tmp_path / 'README.md'} exists" in caplog.text
    assert (tmp_path / "preprocessor_config.json").read_text() == processor


@pytest.mark.parametrize(
    "given", ["# Mine\n", "---\nlicense: mit\ntags: [a, b]\n---\n# Mine\n"], ids=["text", "metadata"]
)
def test_a_model_card_of_ones_own_keeps_its_text_and_gains_metadata(given, tiny_model, tmp_path):
    tiny_model(AdaPerceiverForDepthEstimation).save_pretrained(tmp_path, model_card=given)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.text.strip() == "# Mine"
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "depth-estimation")
    assert (card.data.license, card.data.tags) == (("mit", ["a", "b"]) if "mit" in given else (None, ["adaperceiver"]))


def test_a_process_that_is_not_the_main_one_writes_nothing(tiny_model, tmp_path):
    tiny_model(AdaPerceiverModel).save_pretrained(tmp_path, is_main_process=False)
    assert files_of(tmp_path) == set()


def test_accelerate_saves_the_state_dict_that_it_is_given(tiny_model, tmp_path):
    model = tiny_model(AdaPerceiverForImageClassification)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    doubled = {name: 2 * tensor for name, tensor in accelerator.get_state_dict(prepared).items()}
    accelerator.unwrap_model(prepared).save_pretrained(
        tmp_path,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=doubled,
        max_shard_size="50KB",
    )
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert_equal(loaded.state_dict(), {name: 2 * tensor for name, tensor in model.state_dict().items()})


def test_an_adapter_is_saved_alone_and_finds_its_base_model(tiny_model, tmp_path):
    tiny_model(AdaPerceiverForImageClassification).save_pretrained(tmp_path / "base")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "base")
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj", "fc1"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    assert files_of(tmp_path / "adapter") == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "adaptive_config.json",
    }
    loaded = aligned(AutoModelForImageClassification.from_pretrained(tmp_path / "adapter"))
    pixel_values = images()
    assert_equal(loaded(pixel_values, width=16).logits, aligned(model)(pixel_values, width=16).logits)


def test_a_peft_model_is_saved_and_merged(tiny_model, tmp_path):
    tiny_model(AdaPerceiverForImageClassification).save_pretrained(tmp_path / "base")
    base = AdaPerceiverForImageClassification.from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["fc2"], init_lora_weights=False)).eval()
    model.save_pretrained(tmp_path / "adapter")
    assert SOURCES.isdisjoint(files_of(tmp_path / "adapter"))
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    loaded = aligned(AutoModelForImageClassification.from_pretrained(tmp_path / "merged"))
    actual, expected = loaded(pixel_values := images()).logits, aligned(merged)(pixel_values).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_a_registered_class_of_ones_own_is_saved_with_its_file(tiny_model, tmp_path, monkeypatch):
    module = tmp_path / "my_classifier.py"
    module.write_text(
        "from adaperceiver import AdaPerceiverForImageClassification\n\n\n"
        "class MyClassifier(AdaPerceiverForImageClassification):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from my_classifier import MyClassifier

    MyClassifier.register_for_auto_class("AutoModelForImageClassification")
    MyClassifier(AdaPerceiverConfig(**TINY)).save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "my_classifier.py").read_text() == module.read_text()
    auto_map = config_of(tmp_path / "model")["auto_map"]
    assert auto_map["AutoModelForImageClassification"] == "my_classifier.MyClassifier"
    assert auto_map["AutoModel"] == "modeling_adaperceiver.AdaPerceiverModel"


# --------------------------------------------------------------------------------------------------- linked folders


CHECKPOINTS = sorted(path.parent for path in (ROOT / "checkpoints").glob("*/config.json"))


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda folder: folder.name)
def test_a_shipped_folder_links_to_every_source_file_and_names_them(folder):
    links = {path.name: path for path in folder.iterdir() if path.is_symlink()}
    assert set(links) == SOURCES
    for name, path in links.items():
        assert not path.readlink().is_absolute()
        source = "configuration" if name == "configuration_adaperceiver.py" else "modeling"
        assert path.resolve() == ROOT / source / name
    config = config_of(folder)
    model_class = getattr(adaperceiver, config["architectures"][0])
    assert config["auto_map"] == AUTO_MAP
    assert config["custom_pipelines"] == custom_pipelines(model_class.task)
    assert list(config) == sorted(config)


@pytest.fixture
def linked(tiny_model, tmp_path):
    """A copy of the repository's sources, and a checkpoint with links to them."""
    for folder in ("modeling", "configuration"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "checkpoints" / "linked"
    tiny_model(AdaPerceiverForDistillation).save_pretrained(folder, save_code=False)
    link_sources(folder)
    for name in SOURCES:  # to the copy
        (folder / name).unlink()
        source = "configuration" if name == "configuration_adaperceiver.py" else "modeling"
        (folder / name).symlink_to(Path("..", "..", source, name))
    return folder


@pytest.mark.parametrize("save_code", [True, False])
def test_saving_onto_links_replaces_them_and_leaves_their_targets_alone(save_code, linked):
    for path in (linked.parents[1] / "modeling").glob("*.py"):
        path.write_text(path.read_text() + "# mine\n")
    before = {path: path.read_text() for path in linked.parents[1].rglob("*.py") if not path.is_symlink()}
    model = AutoModelForImageClassification.from_pretrained(linked)
    model.save_pretrained(linked, save_code=save_code)
    assert not any(path.is_symlink() for path in linked.iterdir())
    assert {path: path.read_text() for path in before} == before
    assert AutoModelForImageClassification.from_pretrained(linked).config.num_labels == 10


def save_parts_onto_links():
    import shutil
    from pathlib import Path

    from transformers import AutoConfig, AutoImageProcessor

    parts = [
        each.from_pretrained("checkpoints/linked", trust_remote_code=True) for each in (AutoImageProcessor, AutoConfig)
    ]
    sources = {path: f"{path.read_text()}# mine\n" for path in Path().glob("[cm]o*/*_*.py")}
    assert len(sources) > 10
    for path, text in sources.items():
        path.write_text(text)
    for index, part in enumerate(parts):
        folder = Path(f"checkpoints/{index}")
        shutil.copytree("checkpoints/linked", folder, symlinks=True)
        part.save_pretrained(folder)  # transformers copies the remote code, as it was
        assert not any(path.is_symlink() for path in folder.iterdir())
    assert {path: path.read_text() for path in sources} == sources


@pytest.mark.slow
def test_saving_a_processor_or_a_config_of_remote_code_onto_links_replaces_them(linked, run):
    assert run(save_parts_onto_links) == "held"


# ------------------------------------------------------------------------------------------------------ pushing


REPOSITORY = "someone/tiny"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in of the hub, for this process."""
    with served() as repositories:
        api = HfApi(endpoint=repositories.url, token="hf_stand_in")
        monkeypatch.setattr("transformers.utils.hub._hf_api", api)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        template = f"{repositories.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", repositories.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        yield repositories


def folder_of(hub, folder, revision="main"):
    """The files of the repository, in a folder."""
    folder.mkdir()
    for name, content in hub.files(REPOSITORY, revision).items():
        (folder / name).write_bytes(content)
    return folder


def test_a_push_uploads_the_folder_with_our_card(tiny_model, hub, tmp_path):
    model = tiny_model(AdaPerceiverForImageClassification)
    pushed = model.push_to_hub("tiny", commit_message="First", tags=["tested"])
    folder = folder_of(hub, tmp_path / "pushed")
    assert files_of(folder) == WITHOUT_SOURCES | SOURCES
    card = ModelCard.load(folder / "README.md")
    assert f'name = "{REPOSITORY}"' in card.text
    assert card.data.tags == ["adaperceiver", "tested"]
    assert_equal(AutoModelForImageClassification.from_pretrained(folder).state_dict(), model.state_dict())

    first, second = hub.commits[REPOSITORY]
    assert (first["message"], first["changed"]) == ("First", sorted(WITHOUT_SOURCES | SOURCES))
    assert pushed.oid == first["oid"]
    assert second["changed"] == ["README.md"]
    assert f'revision = "{first["oid"]}"' in card.text  # the commit whose code the snippet runs
    assert "revision=revision, trust_remote_code=True" in card.text


def test_a_push_as_a_pull_request_leaves_the_main_branch_alone(tiny_model, hub):
    AdaptiveConfig().push_to_hub(REPOSITORY)
    pushed = tiny_model(AdaPerceiverForImageClassification).push_to_hub(REPOSITORY, create_pr=True)
    assert set(hub.files(REPOSITORY)) == {"adaptive_config.json"}
    assert f'revision = "{pushed.oid}"'.encode() in hub.files(REPOSITORY, "refs/pr/1")["README.md"]


def test_a_push_without_code_uploads_none(tiny_model, hub):
    tiny_model(AdaPerceiverForImageClassification).push_to_hub("tiny", save_code=False, model_card="# Mine")
    files = hub.files(REPOSITORY)
    assert set(files) == WITHOUT_SOURCES
    assert "auto_map" not in json.loads(files["config.json"])
    assert ModelCard(files["README.md"].decode()).text.strip() == "# Mine"
    assert len(hub.commits[REPOSITORY]) == 1  # no snippet that would name a commit


@pytest.mark.parametrize("by", ["push_to_hub", "save_pretrained"])
def test_a_push_leaves_the_card_and_processor_of_the_repository_alone(by, tiny_model, hub, tmp_path):
    api = HfApi(endpoint=hub.url, token="hf_stand_in")
    api.create_repo(REPOSITORY)
    processor = BitImageProcessor().to_json_string().encode()
    for name, content in {"README.md": b"mine", "preprocessor_config.json": processor}.items():
        api.upload_file(path_or_fileobj=content, path_in_repo=name, repo_id=REPOSITORY)
    model = tiny_model(AdaPerceiverForImageClassification)
    if by == "push_to_hub":
        model.push_to_hub("tiny")
    else:
        model.save_pretrained(tmp_path / "tiny", push_to_hub=True, commit_message="Second")
        assert (tmp_path / "tiny" / "README.md").read_text() == "mine"
        assert hub.commits[REPOSITORY][-1]["message"] == "Second"
    commit = hub.commits[REPOSITORY][-1]
    assert set(commit["changed"]) == {"adaptive_config.json", "config.json", "model.safetensors"} | SOURCES
    assert commit["files"]["README.md"] == b"mine"
    assert commit["files"]["preprocessor_config.json"] == processor


def test_a_push_of_a_saved_folder_uploads_the_card_and_processor_that_it_has(tiny_model, hub, tmp_path):
    model = tiny_model(AdaPerceiverForImageClassification)
    model.save_pretrained(tmp_path / "tiny", model_card="# Mine")
    model.save_pretrained(tmp_path / "tiny", push_to_hub=True)
    assert set(hub.files(REPOSITORY)) == WITHOUT_SOURCES | SOURCES
    assert b"# Mine" in hub.files(REPOSITORY)["README.md"]


def test_an_adaptive_config_an_image_processor_and_a_config_are_pushed_and_load_again(tiny_model, hub, tmp_path):
    model = tiny_model(AdaPerceiverForImageClassification)
    model.push_to_hub(REPOSITORY)
    AdaptiveConfig(tokens=4).push_to_hub(REPOSITORY, commit_message="Four tokens")
    assert hub.commits[REPOSITORY][-1]["message"] == "Four tokens"
    assert AdaptiveConfig.from_pretrained(REPOSITORY) == AdaptiveConfig(tokens=4)
    AdaptiveConfig(tokens=8).save_pretrained(tmp_path / "tiny", push_to_hub=True, repo_id=REPOSITORY, revision="dev")
    assert AdaptiveConfig.from_pretrained(REPOSITORY, revision="dev") == AdaptiveConfig(tokens=8)
    assert AdaPerceiverForImageClassification.from_pretrained(REPOSITORY).adaptive_config.tokens == 4

    processor = image_processor_for(model.config, "image-classification")
    processor.image_mean = [0.1, 0.2, 0.3]
    processor.push_to_hub(REPOSITORY)
    assert list(AutoImageProcessor.from_pretrained(REPOSITORY).image_mean) == [0.1, 0.2, 0.3]
    processor.image_mean = [0.4, 0.2, 0.3]
    processor.save_pretrained(tmp_path / "tiny", push_to_hub=True, repo_id=REPOSITORY)
    assert list(AutoImageProcessor.from_pretrained(REPOSITORY).image_mean) == [0.4, 0.2, 0.3]
    model.config.id2label = {index: f"class {index}" for index in range(10)}
    model.config.push_to_hub(REPOSITORY)
    assert AdaPerceiverConfig.from_pretrained(REPOSITORY).id2label[3] == "class 3"


def test_a_push_of_parts_of_the_weights_is_refused(tiny_model, hub, tmp_path):
    with pytest.raises(ValueError, match="`distributed_checkpoint=False`"):
        tiny_model(AdaPerceiverModel).save_pretrained(tmp_path, push_to_hub=True, distributed_checkpoint=True)
    assert hub.commits == {}


def test_an_unknown_argument_of_a_push_is_refused(tiny_model, hub):
    with pytest.raises(TypeError, match="save_cod"):
        tiny_model(AdaPerceiverModel).push_to_hub("tiny", save_cod=False)


# -------------------------------------------------------------------------------------------------- remote code


@pytest.fixture(scope="module")
def site_without_the_package(tmp_path_factory):
    """Links to everything that is installed, except this package, however it is installed."""
    site = tmp_path_factory.mktemp("site")
    for folder in (Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")):
        for path in folder.iterdir():
            if "adaperceiver" not in path.name and not (site / path.name).exists():
                (site / path.name).symlink_to(path)
    return site


@pytest.fixture
def run(site_without_the_package, tmp_path):
    """Run a function of this file in a Python of its own, in `tmp_path`, with the package or without."""

    def run(function, with_package=False, **variables):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
        environment |= {"HF_HOME": str(tmp_path / "home"), "HF_MODULES_CACHE": str(tmp_path / "home" / "modules")}
        command = [sys.executable]
        if not with_package:
            environment["PYTHONPATH"] = str(site_without_the_package)
            command.append("-S")  # no site-packages, no editable installs
        command += ["-c", f"{inspect.getsource(function)}\n\n{function.__name__}()\nprint('held')"]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout.split()[-1]

    return run


@pytest.fixture
def saved(tiny_model, tmp_path):
    """A folder per class in `tmp_path`, and what the models say about one batch of images in `expected.pt`."""
    pixel_values, expected = images(), {}
    for model_class in MODEL_CLASSES:
        model = tiny_model(model_class)
        model.adaptive_config = AdaptiveConfig(tokens=8)
        model.save_pretrained(tmp_path / model_class.__name__)
        expected[model_class.__name__] = model(pixel_values, width=16).to_tuple()
        expected[f"trunk of {model_class.__name__}"] = model.base_model(pixel_values, width=16).to_tuple()
    torch.save((pixel_values, expected), tmp_path / "expected.pt")


def load_with_transformers_alone():
    import importlib.util
    import json
    import re
    import shutil
    from pathlib import Path
    from types import SimpleNamespace

    import PIL.Image
    import torch
    import transformers
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification, pipeline
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    assert importlib.util.find_spec("adaperceiver") is None
    pixel_values, expected = torch.load("expected.pt")
    PIL.Image.new("RGB", (60, 40), "red").save("image.jpg")
    remote = {"trust_remote_code": True}

    def close(actual, name):
        torch.testing.assert_close(actual(pixel_values, width=16).to_tuple(), expected[name], rtol=1e-5, atol=1e-5)
        assert actual.adaptive_config.tokens == 8, name

    def sources(folder):
        return {path.name: path.read_bytes() for path in Path(folder).glob("*.py")}

    # `AutoBackbone` asks the hub first, even about a folder; the answer is yes.
    transformers.models.auto.auto_factory.hf_api = lambda: SimpleNamespace(repo_exists=lambda name: True)
    for auto_class, name in (
        ("AutoModel", "AdaPerceiverModel"),
        ("AutoModelForImageClassification", "AdaPerceiverForImageClassification"),
        ("AutoModelForSemanticSegmentation", "AdaPerceiverForSemanticSegmentation"),
        ("AutoModelForDepthEstimation", "AdaPerceiverForDepthEstimation"),
        ("AutoBackbone", "AdaPerceiverBackbone"),
    ):
        model = getattr(transformers, auto_class).from_pretrained(name, **remote)
        assert type(model).__name__ == name
        close(model, name)
    folder = "AdaPerceiverForDistillation"  # has no auto class
    close(get_class_from_dynamic_module(f"modeling_adaperceiver.{folder}", folder).from_pretrained(folder), folder)

    for folder in (path.name for path in Path().glob("AdaPerceiver*")):
        assert type(AutoConfig.from_pretrained(folder, **remote)).__name__ == "AdaPerceiverConfig"
        close(AutoModel.from_pretrained(folder, **remote), f"trunk of {folder}")
        processor = AutoImageProcessor.from_pretrained(folder, **remote)
        assert processor(PIL.Image.open("image.jpg"), return_tensors="pt")["pixel_values"].shape[:2] == (1, 3)
        snippet = re.search(r"```python\n(.*?)```", Path(folder, "README.md").read_text(), re.DOTALL)[1]
        exec(snippet, {})

        pipe = pipeline(model=folder, **remote)
        assert type(pipe).__name__.startswith("AdaPerceiver")
        assert pipe("image.jpg", tokens=4, report=True)["report"]["tokens"] == 4
        assert "AdaPerceiver" in str(pipe.model.config)  # transformers leaves classes in configs, which have no JSON
        pipe.save_pretrained(f"{folder}-pipe")
        assert sources(f"{folder}-pipe") == sources(folder)
        assert pipeline(model=f"{folder}-pipe", **remote).task == pipe.task

    folder = "AdaPerceiverForImageClassification"
    model = AutoModelForImageClassification.from_pretrained(folder, **remote)
    model.save_pretrained("again")
    model.save_pretrained("bare", save_code=False)
    assert sources("again") == sources(folder)
    assert json.loads(Path("again/config.json").read_text()) == json.loads(Path(folder, "config.json").read_text())
    close(AutoModelForImageClassification.from_pretrained("again", **remote), folder)
    assert sources("bare") == {}
    assert "auto_map" not in json.loads(Path("bare/config.json").read_text())
    config = AutoConfig.from_pretrained(folder, **remote)
    assert AutoModelForImageClassification.from_config(config, **remote)(pixel_values).logits.shape == (2, 10)

    # The hub, as far as its cache goes.
    repository = Path("home/hub/models--someone--tiny.model")
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    model = AutoModelForImageClassification.from_pretrained("someone/tiny.model", **remote)
    close(model, folder)
    model.save_pretrained("from-the-hub")
    assert sources("from-the-hub") == sources(folder)
    assert pipeline(model="someone/tiny.model", **remote)("image.jpg", width=16, top_k=1)


def load_the_shipped_folders():
    import json
    from pathlib import Path

    import PIL.Image
    import transformers
    from transformers import AutoImageProcessor, AutoModel, pipeline

    remote, image = {"trust_remote_code": True}, PIL.Image.new("RGB", (60, 40), "red")
    for path in Path("checkpoints").glob("*/config.json"):
        folder, config = str(path.parent), json.loads(path.read_text())
        pixel_values = AutoImageProcessor.from_pretrained(folder, **remote)(image, return_tensors="pt").pixel_values
        ((task, entry),) = config["custom_pipelines"].items()
        for auto_class in (AutoModel, getattr(transformers, entry["pt"][0])):
            model = auto_class.from_pretrained(folder, **remote).eval()
            assert model(pixel_values, tokens=4).operating_points[0].tokens == 4
        pipe = pipeline(task, folder, **remote)
        assert pipe(image, tokens=4, report=True)["report"]["tokens"] == 4


def fine_tune_what_the_hub_has():
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    remote = {"trust_remote_code": True}
    model = AutoModelForImageClassification.from_pretrained("someone/tiny", **remote)
    processor = AutoImageProcessor.from_pretrained("someone/tiny", **remote)
    assert type(model).__module__.startswith("transformers_modules.")
    with torch.no_grad():
        model.classifier.bias += 1
    model.save_pretrained("tuned")
    processor.save_pretrained("tuned")
    pixel_values = torch.ones(1, 3, 32, 32)
    torch.save((pixel_values, model(pixel_values, width=16).logits), "expected.pt")
    model.push_to_hub("someone/tuned")
    processor.push_to_hub("someone/tuned")
    model.adaptive_config.push_to_hub("someone/tuned")


def load_what_was_fine_tuned():
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

    pixel_values, expected = torch.load("expected.pt")
    for folder in ("tuned", "pushed"):
        model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
        torch.testing.assert_close(model(pixel_values, width=16).logits, expected, rtol=1e-5, atol=1e-5)
        AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)
        assert pipeline(model=folder, trust_remote_code=True).task == "image-classification"


@pytest.mark.slow
def test_a_checkpoint_of_the_hub_is_fine_tuned_by_its_remote_code_and_loads_again_offline(
    tiny_model, hub, run, tmp_path
):
    tiny_model(AdaPerceiverForImageClassification).push_to_hub("tiny")
    of_the_hub = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_stand_in", "HF_HUB_OFFLINE": "0"}
    assert run(fine_tune_what_the_hub_has, **of_the_hub) == "held"
    (tmp_path / "pushed").mkdir()
    for name, content in hub.files("someone/tuned").items():
        (tmp_path / "pushed" / name).write_bytes(content)
    assert files_of(tmp_path / "pushed") == files_of(tmp_path / "tuned") == WITHOUT_SOURCES | SOURCES
    assert ModelCard.load(tmp_path / "pushed" / "README.md").data.base_model == "someone/tiny"
    assert run(load_what_was_fine_tuned, HF_HUB_OFFLINE="1") == "held"


@pytest.mark.slow
@pytest.mark.parametrize("with_package", [True, False], ids=["with the package", "without"])
def test_the_shipped_folders_load_and_run(with_package, run, tmp_path):
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    assert run(load_the_shipped_folders, with_package) == "held"


@pytest.mark.slow
def test_every_folder_loads_runs_and_saves_again_with_transformers_alone(saved, run):
    assert run(load_with_transformers_alone) == "held"


def load_before_and_after_importing_the_package():
    import sys

    import PIL.Image
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

    pixel_values, expected = torch.load("expected.pt")
    folder = "AdaPerceiverForImageClassification"

    def load(**kwargs):
        model = AutoModelForImageClassification.from_pretrained(folder, **kwargs)
        logits = model(pixel_values, width=16).logits
        torch.testing.assert_close(logits, expected[folder][0], rtol=1e-5, atol=1e-5)
        return model

    remote = load(trust_remote_code=True)
    assert "adaperceiver" not in sys.modules
    assert type(remote).__module__.startswith("transformers_modules.")

    import adaperceiver

    for kwargs in ({}, {"trust_remote_code": True}):
        assert type(load(**kwargs)) is adaperceiver.AdaPerceiverForImageClassification
        processor = AutoImageProcessor.from_pretrained(folder, **kwargs)
        assert type(processor).__module__ == "adaperceiver.image_processing_adaperceiver"
    pipe = pipeline(model=folder, trust_remote_code=True)  # remote, around a model of the package
    assert type(pipe.model) is adaperceiver.AdaPerceiverForImageClassification
    assert pipe(PIL.Image.new("RGB", (50, 50)), tokens=4, report=True)["report"]["tokens"] == 4

    remote.save_pretrained("saved-by-remote-code")
    again = AutoModelForImageClassification.from_pretrained("saved-by-remote-code")
    assert type(again) is adaperceiver.AdaPerceiverForImageClassification
    assert again.adaptive_config == adaperceiver.AdaptiveConfig(tokens=8)


@pytest.mark.slow
def test_remote_code_and_the_installed_package_do_not_clash(saved, run):
    assert run(load_before_and_after_importing_the_package, with_package=True) == "held"


def load_with_an_older_transformers():
    import sys
    from pathlib import Path

    import pytest
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, pipeline
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    folder, remote = "AdaPerceiverForImageClassification", {"trust_remote_code": True}
    for path in Path(folder).glob("*_adaperceiver.py"):  # nothing else gets that far
        if path.name != "configuration_adaperceiver.py":
            docstring, _, rest = path.read_text().partition("\n# isort: split\n")
            early = 'raise RuntimeError("too early")'
            path.write_text(f"{docstring}\n{early}\n{rest}" if rest else f"{docstring}\n{early}\n")
    ways = [AutoConfig.from_pretrained, AutoModel.from_pretrained, AutoImageProcessor.from_pretrained]
    ways.append(lambda folder, **kwargs: pipeline(model=folder, **kwargs))
    for name in ("modeling", "image_processing", "pipeline"):
        ways.append(
            lambda folder, name=name, **kwargs: get_class_from_dynamic_module(f"{name}_adaperceiver.X", folder)
        )
    for load in ways:
        sys.modules["transformers"].__version__ = "4.57.1"  # an import of a part of it makes a new module
        with pytest.raises(ImportError, match=r"AdaPerceiver needs transformers >= 5\.22, got 4\.57\.1: pip install"):
            load(folder, **remote)
    sys.modules["transformers"].__version__ = "5.22.0.dev0"  # is enough
    AutoConfig.from_pretrained(folder, **remote)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["by hub id or folder", "the package"])
def test_an_older_transformers_is_refused_before_anything_else_is_imported(entry, tiny_model, run, tmp_path):
    if entry == "the package":
        assert run(import_with_an_older_transformers, with_package=True) == "held"
    else:
        model = tiny_model(AdaPerceiverForImageClassification)
        model.save_pretrained(tmp_path / "AdaPerceiverForImageClassification")
        assert run(load_with_an_older_transformers) == "held"


def import_with_an_older_transformers():
    import pytest
    import transformers

    transformers.__version__ = "5.21.0"
    with pytest.raises(ImportError, match=r"AdaPerceiver needs transformers >= 5\.22, got 5\.21\.0"):
        import adaperceiver  # noqa: F401


def load_two_versions_at_once():
    import shutil
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

    import torch
    from transformers import AutoModelForImageClassification

    pixel_values, expected = torch.load("expected.pt")
    original = "AdaPerceiverForImageClassification"
    shutil.copytree(original, "edited")
    source = Path("edited/modeling_adaperceiver.py")
    text = source.read_text()
    doubled = text.replace('"logits"] = self.classifier(', '"logits"] = 2 * self.classifier(')
    assert doubled != text
    source.write_text(doubled)

    def load(folder):
        try:
            return AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
        except SystemError:  # transformers parses each file, and the parser of Python 3.11 knows no threads
            return load(folder)

    # Saved by two versions of the code to folders of the same name, with the same configuration file at first sight.
    load(original).save_pretrained("first/model")
    load("edited").save_pretrained("second/model")
    folders = ["first/model", "second/model"] * 4
    with ThreadPoolExecutor(4) as executor:
        models = list(executor.map(load, folders))
    for folder, model in zip(folders, models):
        factor = 1 if folder.startswith("first") else 2
        logits = model(pixel_values, width=16).logits
        torch.testing.assert_close(logits, factor * expected[original][0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_two_versions_of_the_code_loaded_at_once_do_not_mix(saved, run):
    assert run(load_two_versions_at_once) == "held"


def test_the_auto_classes_of_a_folder_load_the_image_processor_of_the_task(tiny_model, tmp_path):
    tiny_model(AdaPerceiverForSemanticSegmentation).save_pretrained(tmp_path)
    assert AutoImageProcessor.from_pretrained(tmp_path).do_reduce_labels
    assert type(AutoModel.from_pretrained(tmp_path)) is AdaPerceiverModel
