"""
Write docs/api.md from the docstrings of the package:

    python docs/write_api.py
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

import adaperceiver
from adaperceiver import AdaPerceiverImageClassificationPipeline


PAGE = Path(__file__).with_name("api.md")
HEAD = """# What are the classes, their methods and arguments?

Everything that `import adaperceiver` offers, by the docstrings (`python docs/write_api.py` writes this page). What is inherited
from transformers is described [there](https://huggingface.co/docs/transformers). Import names are `adaperceiver.NAME`.
"""
GROUPS = {
    "Configuration": ["AdaPerceiverConfig"],
    "Operating points": ["AdaptiveConfig", "OperatingPoint", "AccuracyTable", "LatencyProfile"],
    "What every model does": ["AdaPerceiverPreTrainedModel"],
    "Models": [
        "AdaPerceiverModel",
        "AdaPerceiverForImageClassification",
        "AdaPerceiverForSemanticSegmentation",
        "AdaPerceiverForDepthEstimation",
        "AdaPerceiverForDistillation",
        "AdaPerceiverBackbone",
    ],
    "Training": ["OnceForAll"],
    "Image processing": ["image_processor_for"],
    "Pipelines": [
        "AdaPerceiverImageClassificationPipeline",
        "AdaPerceiverImageSegmentationPipeline",
        "AdaPerceiverDepthEstimationPipeline",
        "AdaPerceiverImageFeatureExtractionPipeline",
    ],
}
# Public for the files of the package and for those who add a head; docs/architecture.md says how they go together.
FOR_HEADS = (
    *("captured", "confidence", "drop_scores", "embed", "encode", "encode_every_depth", "encode_until_confident"),
    *("encoder_flops", "flops_at", "get_input_embeddings", "head_flops", "logit_loss", "map_loss", "maps"),
    *("once_for_all_loss", "once_for_all_step", "postprocess", "predict_dense", "prediction", "prefix_predictions"),
    *("preprocess", "read_latents", "resolve", "resolve_for_all", "resolve_grid", "run_blocks", "run_head"),
    *("run_in_groups", "stages", "write"),
)
INTRODUCTIONS = {
    "What every model does": "Beside what any model of transformers does. The arguments of a call that choose where it runs, `tokens=64` or "
    "`max_gflops=20`, are the fields of `AdaptiveConfig`; `adaptive_config=` and `operating_point=` give them together.",
    "Image processing": "`AdaPerceiverImageProcessor` runs on torchvision where that is installed, and is `AdaPerceiverImageProcessorPil` "
    "elsewhere. Both take the arguments of transformers' image processors.",
    "Pipelines": inspect.cleandoc(AdaPerceiverImageClassificationPipeline.__mro__[1].__doc__ or ""),
}
NAMES = [name for names in GROUPS.values() for name in names]
ARGUMENT = re.compile(r"^\w+(, \w+)*( \(.*\))?:$", re.MULTILINE)  # `tokens (`int`, *optional*):`, and its text below


def signature(function: Callable, name: str) -> str:
    """Names and defaults: types stand in the docstrings."""
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in "".join(parameters):
            parameters.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parameters.append(f"{star}{parameter.name}{default}")
    return f"{name}({', '.join(parameters)})"


def docstring(member: Any) -> str:
    """As Markdown: prose, and lists of arguments as preformatted text. Adaptive ones and examples are left out."""
    text = inspect.cleandoc(member.__doc__ or "").split("```python")[0]
    prose, _, arguments = text.partition("Args:\n")
    if inspect.isfunction(member) and (first := ARGUMENT.search(prose)):
        prose, arguments = prose[: first.start()], prose[first.start() :]
    if inspect.isfunction(member) and (adaptive := re.search(r"^tokens \(`int`", arguments, re.MULTILINE)):
        arguments = arguments[: adaptive.start()]
    arguments, _, closing = arguments.strip().partition("\n\n")
    margin = min((len(line) - len(line.lstrip()) for line in arguments.splitlines()[1:]), default=0)
    arguments = textwrap.dedent(" " * margin + arguments)
    fenced = f"```text\n{arguments}\n```" if arguments else ""
    return "\n\n".join(part.strip() for part in (prose, fenced, closing) if part.strip())


def function_of(member: Any) -> Any:
    """What a method or a property is defined by."""
    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    return inspect.unwrap(member) if inspect.isfunction(member) else None


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties of ours with a docstring, that no class above them on this page has told."""
    above = [base for base in owner.__mro__[1:] if base.__name__ in NAMES]
    for name in sorted(dir(owner)):
        member, function = getattr(owner, name), function_of(getattr(owner, name))
        if name.startswith("_") or name in FOR_HEADS or not member.__doc__ or function is None:
            continue
        if not function.__module__.startswith("adaperceiver"):
            continue
        if not any(function_of(getattr(base, name, None)) is function for base in above):
            yield name, member


def describe(name: str) -> str:
    member = getattr(adaperceiver, name)
    if not inspect.isclass(member):
        return f"### {name}\n\n`{signature(member, name)}`\n\n{docstring(member)}\n"
    parts = [f"### {name}"]
    if hasattr(member, "stock_arguments"):
        parts.append(f"Arguments of transformers: {', '.join(f'`{one}`' for one in member.stock_arguments)}.")
    else:
        if issubclass(member, tuple) or (is_dataclass(member) and not issubclass(member, PreTrainedConfig)):
            parts.append(f"`{signature(member, name)}`")
        parts.append(docstring(member))
        for one, function in members(member):
            shown = one if isinstance(function, property) else signature(function, one)
            parts += [f"**`{shown}`**", docstring(getattr(function, "__func__", function))]
    return "\n\n".join(part for part in parts if part) + "\n"


def page() -> str:
    sections = []
    for title, names in GROUPS.items():
        introduction = f"{INTRODUCTIONS[title]}\n\n" if title in INTRODUCTIONS else ""
        sections.append(f"## {title}\n\n{introduction}" + "\n".join(map(describe, names)))
    return "\n".join([HEAD, *sections])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
