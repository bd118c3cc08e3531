"""Where the self-test runs: an NPU, or the CPU kernels in its place."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from mla_fusion import machine
from mla_fusion._autoload import cann_location, torch_npu_installed
from mla_fusion.meta.layout import FRACTAL_NZ
from mla_fusion.tools.target import UserError


@dataclass(frozen=True)
class Device:
    """A device. ``kind`` is "npu" or "cpu"; ``soc`` and ``cann`` choose the calls."""

    kind: str
    name: str
    soc: str
    cann: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.name}), {self.soc}, CANN {self.cann}"

    def place(self, tensor: Tensor, nz: bool = False) -> Tensor:
        """Returns a copy of a tensor on the device. On an NPU, ``nz`` puts it into FRACTAL_NZ."""
        if self.kind == "cpu":
            return tensor.clone()
        tensor = tensor.to(self.kind)
        return torch.ops.npu.npu_format_cast(tensor.contiguous(), FRACTAL_NZ) if nz else tensor


def choose(kind: str | None, soc: str, cann: str) -> Device:
    """Returns the device of a kind; without a kind, an NPU if there is one. Raises UserError.

    If ``soc`` or ``cann`` is "auto", an NPU names its own. On the CPU, "auto" is A3 and the latest
    release.
    """
    if kind == "cpu" or not _is_npu_present():
        soc = "A3" if soc == machine.AUTO else soc
        cann = "latest" if cann == machine.AUTO else cann
        if kind == "npu":
            raise UserError(
                f"no NPU is available here; `mla-fusion selftest --device cpu` runs the same "
                f"checks, those of {soc} and CANN {cann}, on the CPU kernels"
            )
        return Device("cpu", "CPU reference kernels in place of an NPU", soc, cann)
    name, option = machine.device_name(torch), "soc"
    try:
        soc = machine.soc_named(name) if soc == machine.AUTO else soc
        option = "cann"
        if cann == machine.AUTO:
            cann = machine.release_named(machine.cann_version(), found=True)
    except ValueError as error:
        raise UserError(f"{error}; give --{option}") from error
    return Device("npu", name, soc, cann)


def _is_npu_present() -> bool:
    """Returns True if torch_npu is installed beside CANN and finds an NPU. Loads it then."""
    if torch_npu_installed() and cann_location() is not None:
        import_module("torch_npu")
    return machine.has_npu()
