"""Where the self-test runs: an NPU, or the CPU kernels in its place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta import RELEASES

FRACTAL_NZ = 29
NZ_WEIGHTS = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
_NAMES = (("Ascend910_93", "A3"), ("Ascend910B", "A2"), ("Ascend910_95", "A5"), ("Ascend950", "A5"))


class NoDevice(RuntimeError):
    """There is no NPU, or it cannot be told which one; the message says what to give."""


@dataclass(frozen=True)
class Device:
    """``kind`` is "npu" or "cpu". ``soc`` and ``cann`` choose the scenarios."""

    kind: str
    name: str
    soc: str
    cann: str

    def place(self, tensor: Tensor, *, nz: bool = False) -> Tensor:
        """A copy of a tensor on the device, there in FRACTAL_NZ if asked."""
        placed = tensor.clone() if self.kind == "cpu" else tensor.to(self.kind)
        if self.kind == "npu" and nz:
            return torch.ops.npu.npu_format_cast(placed.contiguous(), FRACTAL_NZ)
        return placed

    def place_all(self, call: Mapping[str, Any], nz: Collection[str] = NZ_WEIGHTS) -> dict[str, Any]:
        """Every tensor of a call, the ones named in ``nz`` in FRACTAL_NZ."""
        return {name: self.place(v, nz=name in nz) if isinstance(v, Tensor) else v for name, v in call.items()}

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

    On an NPU, SoC and CANN release are found out where they are not given; on the CPU they say whose scenarios
    are run, by default A3 and the latest release.
    """
    present = _npu_present()
    kind = kind or ("npu" if present else "cpu")
    if kind == "cpu":
        return Device("cpu", "CPU reference kernels", soc or "A3", cann or "latest")
    if not present:
        raise NoDevice("no NPU is available here; --device cpu runs the CPU kernels in its place")
    name = str(torch.npu.get_device_name())  # type: ignore[attr-defined]
    return Device("npu", name, soc or _soc(name), cann or _cann())


def _npu_present() -> bool:
    from mla_fusion._autoload import cann_location, torch_npu_installed
    from mla_fusion.compile import offline

    if offline.is_active() or not torch_npu_installed() or cann_location() is None:
        return False
    import torch_npu  # noqa: F401  # registers torch.npu

    return bool(torch.npu.is_available())  # type: ignore[attr-defined]


def _soc(name: str) -> str:
    for start, soc in _NAMES:
        if name.startswith(start):
            return soc
    raise NoDevice(f"{name} is not known to this self-test; give --soc A2, A3 or A5")


def _cann() -> str:
    """The release of the installed CANN, as the newest one in our tables that is not newer."""
    from torch_npu.npu.utils import get_cann_version

    found = str(get_cann_version())
    return release(found)


def release(version: str) -> str:
    """``9.0.1`` is 9.0, ``8.3.RC1`` is 8.3; newer than the tables is "latest"; older raises NoDevice."""
    numbers = version.split(".")[:2]
    if len(numbers) < 2 or not all(number.isdigit() for number in numbers):
        raise NoDevice(f"CANN release {version!r} is not understood; give --cann, one of {', '.join(RELEASES)}")
    wanted = tuple(map(int, numbers))
    known = {text: tuple(map(int, text.split("."))) for text in RELEASES if text != "latest"}
    if wanted > max(known.values()):
        return "latest"
    fitting = [text for text, release_numbers in known.items() if release_numbers <= wanted]
    if not fitting:
        raise NoDevice(f"CANN {version} is older than {min(known, key=known.__getitem__)}, the first with the operator")
    return max(fitting, key=known.__getitem__)
