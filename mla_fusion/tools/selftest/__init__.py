"""``mla-fusion selftest``: the acceptance test to run on hardware.

It compares each operator, in each mode that the device has, with the reference, by itself and from
a compiled graph. It compares a fused prologue with float64, and checks the rows of the caches.
Without an NPU the CPU kernels stand in, which tests everything but the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any

from mla_fusion.machine import compiling_for
from mla_fusion.reference import chip
from mla_fusion.report import text_tables
from mla_fusion.tools import installed
from mla_fusion.tools.selftest.check import FUSED, Result, check_call, check_prologue
from mla_fusion.tools.selftest.device import Device
from mla_fusion.tools.selftest.samples import calls


@dataclass
class Outcome:
    """All results on one device. ``versions`` are those of the installed packages."""

    device: Device
    versions: dict[str, Any]
    results: list[Result]

    @property
    def failed(self) -> list[Result]:
        """Returns the results with a failure."""
        return [result for result in self.results if result.failures]

    def to_json(self) -> str:
        """Returns all results as JSON text."""
        failed = len(self.failed)
        data = {
            "device": asdict(self.device),
            "versions": self.versions,
            "failed": failed,
            "passed": len(self.results) - failed,
            "results": [asdict(item) | {"failures": item.failures} for item in self.results],
        }
        return text_tables.as_json(data)

    def __str__(self) -> str:
        """Returns a line for each check, to be mailed and compared."""
        count = len(self.results)
        versions = (f"{name} {version}" for name, version in self.versions.items())
        end = f"{count - len(self.failed)} of {count} checks passed"
        return "\n".join(
            map(str, ["mla_fusion selftest", self.device, *versions, *self.results, end])
        )


def run(device: Device, only: str = "*", progress: Callable[[Result], object] = id) -> Outcome:
    """Runs every check whose name matches ``only``, a pattern as of file names. Failures stop
    nothing; ``progress`` is called with each result.
    """
    results = []
    with chip(device.soc), compiling_for(device.soc):
        for name, check in _checks(device):
            if fnmatch(name, f"*{only}*"):
                results.append(check())
                progress(results[-1])
    return Outcome(device, installed.versions(), results)


def _checks(device: Device) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Yields name and function of each check. Sizes are DeepSeek-V3's on an NPU, small ones on a
    CPU. A graph calls the first of the calls of one kind.
    """
    planned = calls(device.soc, device.cann, small=device.kind == "cpu")
    for call in planned:
        yield call.name, partial(check_call, call, device, "eager")
    first_of_kind = {call.kind: call for call in reversed(planned) if call.kind}
    for call in reversed(first_of_kind.values()):
        yield call.name, partial(check_call, call, device, "graph")
    for name in FUSED:
        yield name, partial(check_prologue, name, device)
