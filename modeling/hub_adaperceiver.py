# Copyright 2026 The AdaPerceiver for Hugging Face authors.
# Licensed under the Apache License, Version 2.0.

"""
Saving, sharing and loading: a saved folder works by itself, with nothing but transformers installed.

Beside the weights it holds the config with the classes to load it with (`auto_map`), the operating point, the image
processor, a model card and the source files, which transformers runs with `trust_remote_code=True`.
"""

import copy
import hashlib
import inspect
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard
from safetensors import SafetensorError, safe_open
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import CONFIG_NAME, IMAGE_PROCESSOR_NAME
from transformers.utils.hub import hf_api

from .adaptive_adaperceiver import AccuracyTable, AdaptiveConfig, optional_file, write_json
from .card_adaperceiver import PINNED, build_model_card
from .configuration_adaperceiver import AdaPerceiverConfig
from .image_processing_adaperceiver import image_processor_for
from .official_adaperceiver import is_official, load_official
from .tasks_adaperceiver import AUTO_MAP, TASKS


logger = logging.getLogger(__name__)

MODEL_CARD_NAME = "README.md"
HUB_KWARGS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
PUSH_KWARGS = (
    "repo_id",
    "private",
    "token",
    "revision",
    "tags",
    "commit_message",
    "commit_description",
    "create_pr",
)

FINGERPRINT = "\n# Fingerprint of all source files in this folder: "

if TYPE_CHECKING:
    from transformers import PreTrainedModel as Base
else:
    Base = object  # the classes that mix this in bring it


class HubMixin(Base):
    """`save_pretrained`, `push_to_hub` and `from_pretrained` of every model."""

    task = "image-feature-extraction"  # of the pipeline; heads have their own
    adaptive_config: AdaptiveConfig
    accuracy_table: AccuracyTable | None

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        *,
        save_code: bool = True,
        model_card: str | None = None,
        **kwargs,
    ) -> Any:
        """
        As in transformers, and the folder works by itself. Its model card and image processor, if it has them already,
        stay as they are.

        save_code (`bool`, defaults to `True`):
            Whether to add the source files, and to say so in the config. Without them, loading needs this package.
        model_card (`str`, *optional*):
            Text of the model card, with or without metadata; missing metadata is added.
        """
        push_kwargs = {name: kwargs.pop(name) for name in PUSH_KWARGS if name in kwargs}
        writes = self.should_save_on_this_rank(is_main_process)

        def save(name: str) -> None:
            if writes:
                self._save_beside_weights(save_directory, name, save_code, model_card)
            model = self._copy_to_save(save_code)
            super(HubMixin, model).save_pretrained(save_directory, is_main_process, state_dict, **kwargs)

        name = os.path.basename(os.path.abspath(save_directory))
        if not (push_to_hub and writes):
            return save(name)
        if kwargs.get("distributed_checkpoint"):
            raise ValueError("`push_to_hub` needs `distributed_checkpoint=False`: the hub takes whole weights.")
        return push(self, save_directory, save, **{"repo_id": name, **push_kwargs})

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        tags: list[str] | str | None = None,
        save_code: bool = True,
        model_card: str | None = None,
    ) -> Any:
        """As in transformers; `save_code` and `model_card` are those of `save_pretrained`."""
        arguments = {name: value for name, value in locals().items() if name != "self"}
        with tempfile.TemporaryDirectory() as folder:
            return self.save_pretrained(folder, push_to_hub=True, **arguments)

    def _save_beside_weights(self, folder: str | os.PathLike, name: str, save_code: bool, text: str | None) -> None:
        self.adaptive_config.validate(self.config)
        self.adaptive_config.save_pretrained(folder)
        if self.accuracy_table is not None:
            self.accuracy_table.save_pretrained(folder)
        else:  # one that an earlier save left is of other weights
            Path(folder, AccuracyTable.file_name).unlink(missing_ok=True)
        if getattr(self, "_hf_peft_config_loaded", False):  # transformers saves the adapter alone then
            text = text or f"\n# {name}\n\nAn adapter for an AdaPerceiver.\n"
        else:
            if save_code:
                write_sources(folder)
            if not os.path.exists(os.path.join(folder, IMAGE_PROCESSOR_NAME)):
                image_processor_for(self.config, self.task).save_pretrained(folder)
        path = os.path.join(folder, MODEL_CARD_NAME)
        if not os.path.exists(path):
            build_model_card(self, name, save_code, text).save(path)
        elif text is not None:
            logger.warning(f"`model_card` is not written, since {path} exists.")

    def _copy_to_save(self, save_code: bool) -> Any:
        """
        This model with a config that says how the folder is to be loaded. Its weights are those of this model, whose config
        never changes.

        transformers would add the code of classes that came from remote code, whatever `save_code` says: not for ours.
        """
        model, ours = copy.copy(self), package_of(type(self).__module__) == package_of(__name__)
        model.config = copy.deepcopy(self.config)
        model.config.output_tokens = self.base_model.readouts  # so that `AutoModel` finds what the head used
        model.config._auto_class = None
        for name in ("auto_map", "custom_pipelines"):
            model.config.__dict__.pop(name, None)
        if save_code:
            model.config.auto_map = dict(AUTO_MAP)
            model.config.custom_pipelines = custom_pipelines(self.task)
        if ours or not save_code:
            model.is_remote_code = lambda: False
        return model

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args,
        adaptive_config: AdaptiveConfig | None = None,
        output_loading_info: bool = False,
        **kwargs,
    ) -> Any:
        """
        As in transformers; `adaptive_config` replaces the one that is saved beside the weights.

        Where weights are new (a head for other labels, say), what was found out with the old ones is left behind:
        see `drop_scores`.
        """
        # Not at the top, since that file imports the models; it tells `pipeline` which pipelines ours need. The remote loader
        # brings files along that an import of any kind names.
        from .pipeline_adaperceiver import AdaPerceiverPipelineMixin  # noqa: F401

        source = pretrained_model_name_or_path
        hub_kwargs = {name: kwargs[name] for name in HUB_KWARGS if name in kwargs}
        official = None if source is None else check_model_type(source, kwargs.get("config"), hub_kwargs)
        try:
            if source is not None and official is not None:
                config = kwargs.pop("config", None)
                if isinstance(config, (str, os.PathLike)):
                    config = AdaPerceiverConfig.from_pretrained(config)
                names = (*AdaPerceiverConfig.__annotations__, "num_labels", "id2label", "label2id", "problem_type")
                fields = {} if config is not None else {name: kwargs.pop(name) for name in names if name in kwargs}
                config, weights = load_official(cls, source, official, hub_kwargs, config, **fields)
                kwargs = {name: value for name, value in kwargs.items() if name not in HUB_KWARGS}
                source, kwargs = None, {**kwargs, "config": config, "state_dict": weights}
            model, info = super().from_pretrained(source, *model_args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            source = pretrained_model_name_or_path
            problem = unreadable_weights(source or "", hub_kwargs) or error
            raise OSError(f"Weights of {source} cannot be read: {problem}. Are they complete?") from error
        if source is None and pretrained_model_name_or_path is not None:  # transformers noted that there was none
            model.name_or_path = model.config.name_or_path = str(pretrained_model_name_or_path)
        # `pipeline` leaves classes in it, which no JSON file can hold; saving writes it anew.
        vars(model.config).pop("custom_pipelines", None)
        if source is not None:
            model.adaptive_config = AdaptiveConfig.from_pretrained(source, **hub_kwargs)
            model.accuracy_table = AccuracyTable.from_pretrained(source, **hub_kwargs)
            new = [*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])]
            new = sorted(key for key in new if ".router." not in key)  # which has no part in a fixed operating point
            if new:
                model.drop_scores(f"{new[0]} is new, {source} has none of its size")
        if adaptive_config is not None:
            model.adaptive_config = AdaptiveConfig().update(adaptive_config)
        return (model, info) if output_loading_info else model

    def drop_scores(self, reason: str) -> None:
        """
        Forget what was measured on another task or with other weights, by which calls would choose and leave: the accuracy
        table, the exit threshold and temperatures, and a router as the policy. A warning names what is dropped.
        """
        stale = ["exit_threshold", "exit_temperatures"] + ["policy"] * (self.adaptive_config.policy == "router")
        dropped = [name for name in stale if getattr(self.adaptive_config, name) is not None]
        self.adaptive_config = replace(self.adaptive_config, **dict.fromkeys(dropped))
        if self.accuracy_table is not None:
            self.accuracy_table, dropped = None, ["accuracy_table", *dropped]
        if dropped:
            logger.warning(f"Dropped {', '.join(dropped)} of the checkpoint: {reason}.")


def package_of(module: str) -> str:
    return module.rpartition(".")[0]


def check_model_type(source: str | os.PathLike, config: Any, hub_kwargs: dict) -> dict[str, Any] | None:
    """
    Refuse other models, whose weights transformers would leave out with a warning. The config comes back if it is one of the
    official release.
    """
    configs = {}
    if config is None or optional_file(source, CONFIG_NAME, **hub_kwargs):
        configs[f"the {CONFIG_NAME} of {source}"] = stored = PreTrainedConfig.get_config_dict(source, **hub_kwargs)[0]
        if is_official(stored):
            return stored
    if isinstance(config, (str, os.PathLike)):
        configs[f"the {CONFIG_NAME} of {config}"] = PreTrainedConfig.get_config_dict(config, **hub_kwargs)[0]
    elif config is not None:
        configs["`config`"] = {"model_type": config.model_type}
    for where, found in configs.items():
        model_type = found.get("model_type")
        if model_type != AdaPerceiverConfig.model_type:
            raise ValueError(f"`model_type` in {where} must be {AdaPerceiverConfig.model_type!r}, got {model_type!r}.")
    return None


def unreadable_weights(source: str | os.PathLike, hub_kwargs: dict) -> str:
    """The files that safetensors cannot read, and why; its own errors do not name them."""
    problems = []
    config_path = optional_file(source, CONFIG_NAME, **hub_kwargs) or os.path.join(source, CONFIG_NAME)
    for path in sorted(Path(config_path).parent.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            problems.append(f"{path} ({error})")
    return ", ".join(problems)


def sources() -> dict[str, Path]:
    """The source files of this package by name, as they stand side by side in a saved folder."""
    files = {path.name: path for path in Path(__file__).parent.glob("*_adaperceiver.py")}
    configuration = Path(inspect.getfile(AdaPerceiverConfig))  # in the package, its sibling here is only an alias
    return {**files, configuration.name: configuration}


def write_sources(folder: str | os.PathLike) -> None:
    """
    Copy the source files to `folder`, side by side.

    transformers keeps one model class per config class, and knows the config class of a folder by the folder's last name
    and a hash of the configuration file alone. That file gets a fingerprint of all others, so that two folders of the
    same name never share a model class unless all their code is the same.
    """
    texts = {name: path.read_text(encoding="utf-8") for name, path in sources().items()}
    name = Path(inspect.getfile(AdaPerceiverConfig)).name
    texts[name] = texts[name].split(FINGERPRINT)[0]
    digest = hashlib.sha256("".join(text for _, text in sorted(texts.items())).encode()).hexdigest()
    texts[name] += f"{FINGERPRINT}{digest}\n"
    for name, text in texts.items():
        path = Path(folder, name)
        path.unlink(missing_ok=True)  # writing to a link of `link_sources` would change the package
        path.write_text(text, encoding="utf-8")


def link_sources(folder: str | os.PathLike) -> None:
    """
    Make a saved folder work by itself without a copy of the source files: relative links to those of this package, and
    the entries of its config that name them. For checkpoints that are kept in one repository with the code.
    """
    path = Path(folder, CONFIG_NAME)
    config = json.loads(path.read_text(encoding="utf-8"))
    modeling = import_module(f"{package_of(__name__)}.modeling_adaperceiver")
    task = getattr(modeling, config["architectures"][0]).task
    config |= {"auto_map": AUTO_MAP, "custom_pipelines": custom_pipelines(task)}
    write_json(dict(sorted(config.items())), path)
    for name, source in sources().items():
        link = Path(folder, name)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(source, Path(folder).resolve()))


def custom_pipelines(task: str) -> dict[str, dict]:
    """The entry of the config by which `pipeline(task, folder)` finds the pipeline that takes adaptive arguments."""
    return {task: {"impl": f"pipeline_adaperceiver.{TASKS[task].pipeline_class}", "pt": [TASKS[task].auto_class]}}


def push(
    model: Any,
    folder: str | os.PathLike,
    save: Callable[[str], None],
    repo_id: str,
    *,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    tags: list[str] | str | None = None,
    **commit_kwargs,
) -> Any:
    """
    Run `save` with the name of the repository, and upload what changed in `folder`. A model card and an image processor
    that the repository has are fetched first, so that they stay. (transformers' own push puts its card over ours.) A new card
    that shows how to load the code names this commit of it, in a second commit.
    """
    api, where = hf_api(), {"revision": revision, "token": token}
    repo_id = api.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    os.makedirs(folder, exist_ok=True)
    stays = {}
    for name in (MODEL_CARD_NAME, IMAGE_PROCESSOR_NAME):
        path, stays[name] = os.path.join(folder, name), api.file_exists(repo_id, name, **where)
        if stays[name] and not os.path.exists(path):
            shutil.copyfile(api.hf_hub_download(repo_id, name, **where), path)
    before = {name: time for name, time in model._get_files_timestamps(folder).items() if stays.get(name, True)}
    save(repo_id)
    card_path = Path(folder, MODEL_CARD_NAME)
    if tags:
        card = ModelCard.load(card_path)
        given, present = [tags] if isinstance(tags, str) else tags, card.data.tags or []
        card.data.tags = [*present, *(tag for tag in given if tag not in present)]
        card.save(card_path)
    commit = model._upload_modified_files(folder, repo_id, before, token=token, revision=revision, **commit_kwargs)
    text = card_path.read_text(encoding="utf-8")
    if not stays[MODEL_CARD_NAME] and PINNED.format("main") in text:  # a commit cannot name itself
        card_path.write_text(text.replace(PINNED.format("main"), PINNED.format(commit.oid)), encoding="utf-8")
        api.upload_file(
            path_or_fileobj=card_path,
            path_in_repo=MODEL_CARD_NAME,
            repo_id=repo_id,
            token=token,
            revision=commit.pr_revision or revision,
            commit_message="Name the commit in the model card",
        )
    return commit


__all__ = ["HubMixin", "link_sources"]
