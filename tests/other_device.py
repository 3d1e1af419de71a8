"""
A device beside the CPU, for machines without a GPU: its tensors hold real numbers, computed on the CPU, but may not meet
tensors of the CPU. Importing this registers it for the whole process, so that a test starts a process of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


NAME = "other"
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)  # what may take tensors of two devices


class Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def synchronize(self, device: Any = None) -> None:
        pass


_setup_privateuseone_for_python_backend(NAME, backend_module=Module())
torch.accelerator.synchronize = lambda *_: None  # a backend in Python has no streams to wait for
DEVICE = torch.device(NAME, 0)


class OtherTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, real: torch.Tensor) -> "OtherTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=DEVICE,
        )

    def __init__(self, real: torch.Tensor):
        self.numbers = real

    def tolist(self) -> list:
        return self.numbers.tolist()

    def __repr__(self) -> str:
        return f"OtherTensor({self.numbers})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return dispatch(function, args, kwargs or {})


def dispatch(function: Any, args: tuple, kwargs: dict) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    others = [leaf for leaf in tensors if isinstance(leaf, OtherTensor)]
    if others and function not in COPIES:
        for tensor in tensors:
            if not isinstance(tensor, OtherTensor) and tensor.ndim > 0:
                raise RuntimeError(f"{function} meets a tensor of the CPU of shape {tuple(tensor.shape)}.")
    asked = kwargs.get("device")
    target = torch.device(asked) if asked is not None else DEVICE if others else torch.device("cpu")
    if function is aten.copy_.default:
        target = args[0].device
    real_args, real_kwargs = pytree.tree_map_only(OtherTensor, lambda tensor: tensor.numbers, (args, kwargs))
    if asked is not None:
        real_kwargs = {**real_kwargs, "device": torch.device("cpu")}
    result = function(*real_args, **real_kwargs)
    if target.type == "cpu":
        return result
    # Without the bits of lazy conjugation and negation, which the outer tensor does not have.
    result = pytree.tree_map_only(torch.Tensor, lambda t: OtherTensor(t.resolve_conj().resolve_neg()), result)
    return return_and_correct_aliasing(function, args, kwargs, result) if others else result


class Watch(TorchDispatchMode):
    """Makes tensors where they are asked for, and notes what is computed on the CPU and in which precision."""

    def __init__(self):
        super().__init__()
        self.on_cpu: list[str] = []
        self.products: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = dispatch(function, args, kwargs or {})
        for tensor in pytree.tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.device.type == "cpu":
                self.on_cpu.append(f"{function} {tuple(tensor.shape)} {tensor.dtype}")
            elif function in (aten.mm.default, aten.addmm.default, aten.bmm.default):
                self.products.add(tensor.dtype)
        return result


@contextmanager
def watched() -> Iterator[Watch]:
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=)` makes a list a tensor on the CPU first
    try:
        with Watch() as watch:
            yield watch
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def moved(values: Any) -> Any:
    """Tensors in any structure, and models, to the other device."""
    if isinstance(values, torch.nn.Module):
        for module in values.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    own = torch.nn.Parameter(OtherTensor(parameter.detach()), parameter.requires_grad)
                    module._parameters[name] = own
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else OtherTensor(buffer)
        return values
    return pytree.tree_map_only(torch.Tensor, OtherTensor, values)


def fetched(values: Any) -> Any:
    """The numbers on the other device."""
    return pytree.tree_map_only(OtherTensor, lambda tensor: tensor.detach().numbers, values)


def _register_autocast() -> list:
    """The products that autocast computes in half precision, as on a GPU, and the sums that it computes in float32."""
    library = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(operator, dtype):
        def run(*args, **kwargs):
            with torch._C._ExcludeDispatchKeyGuard(key):
                args, kwargs = pytree.tree_map_only(
                    torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs)
                )
                return operator(*args, **kwargs)

        return run

    half = ("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "conv2d", "scaled_dot_product_attention")
    full = ("layer_norm", "softmax.int", "log_softmax.int", "pow.Tensor_Scalar", "pow.Scalar", "kl_div")
    for names, dtype in ((half, torch.bfloat16), (full, torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            library.impl(name, cast(getattr(getattr(aten, packet), overload or "default"), dtype))
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return [library, others]


LIBRARIES = _register_autocast()  # gone with the object
