"""Where a script runs, and in which precision: the same two options everywhere."""

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator
from transformers.hf_argparser import HfArg

from ..adaptive_adaperceiver import machine_name
from .arguments import started_processes


def known_devices() -> list[str]:
    """The CPU, and the accelerators that torch finds."""
    if not torch.accelerator.is_available():
        return ["cpu"]
    kind = torch.accelerator.current_accelerator().type
    return ["cpu", kind, *(f"{kind}:{index}" for index in range(torch.accelerator.device_count()))]


@dataclass
class DeviceArguments:
    device: str | None = HfArg(default=None, help="cpu, cuda, cuda:1, mps, ...; by default the accelerator there is.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = HfArg(
        default=None, help="Of products, by autocast; by default float32 on a CPU and bfloat16 elsewhere."
    )

    def __post_init__(self):
        if self.device is not None and self.device not in known_devices():
            raise ValueError(f"--device must be one of {', '.join(known_devices())}, got {self.device}.")
        if self.device is not None and ":" in self.device and started_processes() > 1:
            kind = self.device.partition(":")[0]
            raise ValueError(f"--device {self.device} is one for {started_processes()} processes: give {kind}.")

    def start(self) -> "Device":
        """For a script of one process: where it runs, which is printed."""
        kind = self.device or known_devices()[-1 if len(known_devices()) == 1 else 1]
        return self.chosen(torch.device(kind), show=True)

    def accelerator(self, **options: Any) -> tuple[Accelerator, "Device"]:
        """For a script of any number of processes: the accelerator, and where it runs, which is printed."""
        if self.device == "cpu":
            options["cpu"] = True
        elif self.device is not None and ":" in self.device:
            os.environ["ACCELERATE_TORCH_DEVICE"] = self.device  # what Accelerate has for this
        accelerator = Accelerator(**options)
        return accelerator, self.chosen(accelerator.device, accelerator.is_main_process)

    def chosen(self, device: torch.device, show: bool) -> "Device":
        dtype = self.dtype or ("float32" if device.type == "cpu" else "bfloat16")
        found = Device(device, getattr(torch, dtype))
        if show:
            print(f"Runs on {found}.", flush=True)
        return found


@dataclass(frozen=True)
class Device:
    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> AbstractContextManager:
        """What calls of a model run in. Weights stay as they are."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def __str__(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else machine_name()
        precision = str(self.dtype).removeprefix("torch.")
        return f"{self.device} ({name}) in {precision}{'' if self.dtype == torch.float32 else ' autocast'}"
