"""Where the self-test runs: an NPU, or the CPU kernels in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from mla_fusion.machine import cann_version, device_name, release_named, soc_named

FRACTAL_NZ = 29
NZ_WEIGHTS = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")


class NoDevice(RuntimeError):
    """There is no NPU, or it cannot be told which one; the message says what to give."""


@dataclass(frozen=True)
class Device:
    """``kind`` is "npu" or "cpu". ``soc`` and ``cann`` choose the scenarios."""

    kind: str
    name: str
    soc: str
    cann: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.name}), {self.soc}, CANN {self.cann}"

    def place(self, tensor: Tensor, *, nz: bool = False) -> Tensor:
        """A copy of a tensor on the device, there in FRACTAL_NZ if asked."""
        placed = tensor.clone() if self.kind == "cpu" else tensor.to(self.kind)
        if self.kind == "npu" and nz:
            return torch.ops.npu.npu_format_cast(placed.contiguous(), FRACTAL_NZ)
        return placed

    def milliseconds(self, run: Callable[[], Any], repeats: int) -> float:
        """Median time of a call with everything it started on the device finished."""
        times = []
        for _ in range(repeats):
            self.synchronize()
            started = perf_counter()
            run()
            self.synchronize()
            times.append(perf_counter() - started)
        return 1e3 * median(times)

    def synchronize(self) -> None:
        if self.kind == "npu":
            torch.npu.synchronize()  # type: ignore[attr-defined]


def choose(kind: str | None = None, soc: str | None = None, cann: str | None = None) -> Device:
    """The device asked for; an NPU where there is one. Raises NoDevice.

    On an NPU, SoC and CANN release are found out where they are not given; on the CPU they say
    whose scenarios are run, by default A3 and the latest release.
    """
    present = _npu_present()
    kind = kind or ("npu" if present else "cpu")
    if kind == "cpu":
        soc = _known(soc_named, soc or "A3", "soc")
        release = _known(release_named, cann or "latest", "cann")
        return Device("cpu", "CPU reference kernels", soc, release)
    if not present:
        raise NoDevice("no NPU is available here; --device cpu runs the CPU kernels in its place")
    name = device_name(torch)
    release = cann or _known(partial(release_named, found=True), cann_version(), "cann")
    return Device("npu", name, _known(soc_named, soc or name, "soc"), release)


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
