"""Where the self-test runs: an NPU, or the CPU kernels in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mla_fusion.machine import cann_version, device_name, release_named, soc_named

_FRACTAL_NZ = 29


class NoDevice(RuntimeError):
    """There is no NPU, or nothing tells which one; the message says what to give."""


@dataclass(frozen=True)
class Device:
    """``kind`` is "npu" or "cpu". ``soc`` and ``cann`` choose the calls."""

    kind: str
    name: str
    soc: str
    cann: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.name}), {self.soc}, CANN {self.cann}"

    def place(self, tensor: Tensor, nz: bool = False) -> Tensor:
        """A copy of a tensor on the device, there in FRACTAL_NZ if asked."""
        placed = tensor.clone() if self.kind == "cpu" else tensor.to(self.kind)
        if self.kind == "npu" and nz:
            return torch.ops.npu.npu_format_cast(placed.contiguous(), _FRACTAL_NZ)
        return placed


def choose(kind: str | None = None, soc: str | None = None, cann: str | None = None) -> Device:
    """The device asked for; an NPU where there is one. Raises NoDevice.

    An NPU is asked for its SoC and CANN release where they are not given. On the CPU they say whose
    calls are run, by default A3 and the latest release.
    """
    if kind == "cpu" or not _npu_present():
        soc = _known(soc_named, soc or "A3", "soc")
        cann = _known(release_named, cann or "latest", "cann")
        if kind == "npu":
            raise NoDevice(
                f"no NPU is available here; `mla-fusion selftest --device cpu` runs the same "
                f"checks, those of {soc} and CANN {cann}, on the CPU kernels"
            )
        return Device("cpu", "CPU reference kernels in place of an NPU", soc, cann)
    name = device_name(torch)
    cann = cann or _known(partial(release_named, found=True), cann_version(), "cann")
    return Device("npu", name, _known(soc_named, soc or name, "soc"), cann)


def _known(named: Callable[[str], str], text: str, option: str) -> str:
    try:
        return named(text)
    except ValueError as error:
        raise NoDevice(f"{error}; give --{option}") from error


def _npu_present() -> bool:
    from mla_fusion._autoload import cann_location, torch_npu_installed
    from mla_fusion.compile import offline

    if offline.is_active() or not torch_npu_installed() or cann_location() is None:
        return False
    import torch_npu  # noqa: F401  # registers torch.npu

    return bool(torch.npu.is_available())  # type: ignore[attr-defined]
