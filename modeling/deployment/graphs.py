"""
ONNX graphs whose weights lie in one file that several graphs share.

A part of the model is exported with its weights as arguments, `weights.<name>`, so that the graph names each of them and no
optimiser folds one into another. `tidy` settles in which layout each weight is stored; `chain` strings blocks together; and
`WeightFile.attach` turns the arguments into references to the file.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, external_data_helper, helper, numpy_helper
from torch import nn
from torch.func import functional_call
from transformers.exporters import OnnxConfig, OnnxExporter

from .quiet import quiet


WEIGHTS = "weights."
ALIGNMENT = 4096  # of large tensors in the file, so that they can be mapped into memory
ROWS_NEST = ("fc1.weight", "gate.weight")  # whose first rows are those of a narrower network


class WithWeights(nn.Module):
    """A module whose weights are arguments of its call."""

    def __init__(self, module: nn.Module):
        super().__init__()
        object.__setattr__(self, "module", module)  # not as a submodule: it would bring weights of its own

    def forward(self, weights: dict[str, torch.Tensor], **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return functional_call(self.module, weights, (), inputs)


def export_part(
    part: nn.Module,
    inputs: dict[str, torch.Tensor],
    dynamic: Mapping[str, Mapping[int, Any]],
    output_names: Sequence[str],
) -> onnx.ModelProto:
    """The graph of `part`, a module that returns a dictionary of tensors. `dynamic` names the axes of unknown length."""
    weights = {name: parameter.detach() for name, parameter in part.named_parameters()}
    shapes = {name: dict(dynamic.get(name, {})) for name in inputs}
    config = OnnxConfig(dynamic_shapes={**shapes, "weights": dict.fromkeys(weights)})
    with quiet():
        program = OnnxExporter().export(WithWeights(part), {**inputs, "weights": weights}, config)
    model = program.model_proto
    graph = model.graph
    for node in graph.node:  # stack traces, with the paths of this machine
        del node.metadata_props[:]
    del graph.metadata_props[:], model.metadata_props[:]
    del graph.value_info[:]  # its shapes are those of the widest network
    for value, name in zip(graph.output, output_names):
        rename(graph, value.name, name)
    return model


def rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    for value in graph.output:
        value.name = new if value.name == old else value.name


def consumers(graph: onnx.GraphProto, name: str) -> list[onnx.NodeProto]:
    return [node for node in graph.node if name in node.input]


def tidy(graph: onnx.GraphProto) -> set[str]:
    """
    Drop slices that keep all of a weight, and the transposition of weights that are better stored transposed: the names of
    those are returned. A narrower FFN needs the first rows of `fc1` and, transposed, the first rows of `fc2`.
    """
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    constants |= {
        node.output[0]: numpy_helper.to_array(node.attribute[0].t)
        for node in graph.node
        if node.op_type == "Constant" and node.attribute[0].name == "value"
    }
    sizes = {
        value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in graph.input
        if value.name.startswith(WEIGHTS)
    }
    for node in list(graph.node):
        if node.op_type == "Slice" and node.input[0] in sizes:
            starts, ends, axes = (constants[name] for name in node.input[1:4])
            if (starts == 0).all() and all(end >= sizes[node.input[0]][axis] for end, axis in zip(ends, axes)):
                graph.node.remove(node)
                rename(graph, node.output[0], node.input[0])
    transposed = set()
    for name in sizes:
        users = consumers(graph, name)
        if users and not name.endswith(ROWS_NEST) and all(node.op_type == "Transpose" for node in users):
            transposed.add(name)
            for node in users:
                graph.node.remove(node)
                rename(graph, node.output[0], name)
    return transposed


def weights_of(graph: onnx.GraphProto) -> list[str]:
    """The weights that a graph uses."""
    used = {name for node in graph.node for name in node.input}
    return sorted(name for name in used if name.startswith(WEIGHTS))


def chain(block: onnx.ModelProto, start: int, stop: int) -> onnx.ModelProto:
    """Blocks `start` to `stop - 1` as one graph: `weights.norm1.weight` of block 3 becomes `weights.3.norm1.weight`."""
    model = onnx.ModelProto()
    model.CopyFrom(block)
    graph, template = model.graph, block.graph
    shared = {value.name for value in template.input if not value.name.startswith(WEIGHTS)} | {""}
    shared |= {tensor.name for tensor in template.initializer}
    del graph.node[:]
    latents = "latents"
    for index in range(start, stop):
        final = "next" if index == stop - 1 else f"{index}/next"

        def name_of(name: str, index: int = index, latents: str = latents, final: str = final) -> str:
            if name.startswith(WEIGHTS):
                return f"{WEIGHTS}{index}.{name.removeprefix(WEIGHTS)}"
            if name in shared:
                return latents if name == "latents" else name
            return final if name == "next" else f"{index}/{name}"

        for number, node in enumerate(template.node):
            copy = graph.node.add()
            copy.CopyFrom(node)
            copy.name = f"{index}/{number}"
            copy.input[:] = map(name_of, node.input)
            copy.output[:] = map(name_of, node.output)
        latents = final
    return model


class WeightFile:
    """Tensors side by side in one file, from which graphs take all, or the first rows, of each."""

    def __init__(self, path: Path):
        self.path = path
        self.places: dict[str, tuple[int, np.ndarray]] = {}
        self.end = 0

    def write(self, tensors: Mapping[str, np.ndarray]) -> None:
        with open(self.path, "wb") as file:
            for name, tensor in tensors.items():
                tensor = np.ascontiguousarray(tensor)
                step = ALIGNMENT if tensor.nbytes >= 16 * ALIGNMENT else 64
                file.write(b"\0" * (-self.end % step))
                self.places[name] = (file.tell(), tensor)
                file.write(tensor.tobytes())
                self.end = file.tell()

    def reference(self, name: str, alias: str, rows: int | None = None) -> TensorProto:
        """The tensor `name`, or its first `rows`, as an initialiser called `alias`."""
        offset, tensor = self.places[name]
        part = tensor if rows is None or tensor.ndim == 0 else tensor[:rows]
        proto = numpy_helper.from_array(part, alias)
        if part.size > 1:
            external_data_helper.set_external_data(proto, self.path.name, offset, part.nbytes)
            proto.ClearField("raw_data")
        return proto

    def attach(
        self,
        model: onnx.ModelProto,
        names: Callable[[str], str],
        rows: Callable[[str], int | None] = lambda name: None,
    ) -> onnx.ModelProto:
        """Turn the arguments of `model` that are weights into references; `names` gives what they are called in the file."""
        graph = model.graph
        inputs = [value for value in graph.input if not value.name.startswith(WEIGHTS)]
        del graph.input[:]
        graph.input.extend(inputs)
        for argument in weights_of(graph):
            name = names(argument.removeprefix(WEIGHTS))
            graph.initializer.append(self.reference(name, argument, rows(name)))
        return model


def quantize(graph: onnx.GraphProto, transposed: set[str], skipped: Sequence[str] = ()) -> list[str]:
    """
    Let products with weights run in int8, and return the names of these weights. Each is then `<name>.int8` and
    `<name>.scale`, one for each output, and its input is rounded by `<name>.input_scale` and `<name>.input_zero`.
    """
    makers = {output: node for node in graph.node for output in node.output}
    quantized, rounded, nodes = [], {}, []
    for node in graph.node:
        weight = node.input[1] if node.op_type == "MatMul" else ""
        turn = makers.get(weight)
        if turn is not None and turn.op_type == "Transpose":
            weight = turn.input[0]
        if not weight.startswith(WEIGHTS) or weight.removeprefix(WEIGHTS).startswith(tuple(skipped)):
            nodes.append(node)
            continue
        quantized.append(weight)
        states = node.input[0]
        if states not in rounded:  # queries, keys and values are made of the same
            scale, zero = f"{weight}.input_scale", f"{weight}.input_zero"
            nodes.append(helper.make_node("QuantizeLinear", [states, scale, zero], [f"rounded/{states}"]))
            nodes.append(helper.make_node("DequantizeLinear", [f"rounded/{states}", scale, zero], [f"float/{states}"]))
            rounded[states] = f"float/{states}"
        source = f"{weight}.int8"
        if weight not in transposed:
            nodes.append(helper.make_node("Transpose", [source], [f"turned/{weight}"], perm=[1, 0]))
            source = f"turned/{weight}"
        nodes.append(helper.make_node("DequantizeLinear", [source, f"{weight}.scale"], [f"float/{weight}"], axis=1))
        copy = nodes_copy(node)
        copy.input[:] = [rounded[states], f"float/{weight}"]
        nodes.append(copy)
    used = {name for node in nodes for name in node.input} | {value.name for value in graph.output}
    nodes = [node for node in nodes if used & set(node.output)]
    kept = [nodes_copy(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    return [name.removeprefix(WEIGHTS) for name in quantized]


def nodes_copy(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy
