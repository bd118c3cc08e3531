"""``mla-fusion selftest``: the acceptance test to run on hardware.

Each operator in each mode that the device has, against the reference, by itself and from a compiled
graph; a plain prologue fused, against float64; and what happens to the caches. Without an NPU the
CPU kernels stand in, which tests everything but the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any

from mla_fusion.reference import chip
from mla_fusion.report import text_tables
from mla_fusion.tools import installed
from mla_fusion.tools.selftest.check import FUSED, Result, check_call, check_prologue
from mla_fusion.tools.selftest.device import Device, NoDevice, choose
from mla_fusion.tools.selftest.samples import calls

__all__ = ["HEADING", "Device", "NoDevice", "Outcome", "Result", "choose", "run"]

HEADING = "mla_fusion selftest"  # the first line, by which `mla-fusion diff` knows the text


@dataclass
class Outcome:
    """All results on one device. ``versions`` names the software that took part."""

    device: Device
    versions: dict[str, Any]
    results: list[Result]

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.failures]

    def to_json(self) -> str:
        count = {"failed": len(self.failed), "passed": len(self.results) - len(self.failed)}
        results = [asdict(one) | {"failures": one.failures} for one in self.results]
        head = {"device": asdict(self.device), "versions": self.versions}
        return text_tables.as_json({**head, **count, "results": results})

    def __str__(self) -> str:
        """A line for each check, to be mailed, and compared by `mla-fusion diff`."""
        count = len(self.results)
        lines = [
            HEADING,
            self.device,
            *(f"{name} {version}" for name, version in self.versions.items()),
            *self.results,
            f"{count - len(self.failed)} of {count} checks passed",
        ]
        return "\n".join(map(str, lines))


def run(device: Device, only: str = "*", progress: Callable[[Result], object] = id) -> Outcome:
    """Every check whose name matches ``only``, a pattern as of file names. Nothing stops at a
    failure; ``progress`` sees each result.
    """
    results = []
    with chip(device.soc):
        for name, check in _checks(device):
            if fnmatch(name, f"*{only}*"):
                results.append(check())
                progress(results[-1])
    return Outcome(device, installed.versions(), results)


def _checks(device: Device) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Sizes are DeepSeek-V3's on an NPU, small ones on a CPU."""
    planned = calls(device.soc, device.cann, small=device.kind == "cpu")
    first = {call.kind: call for call in reversed(planned) if call.kind}
    for through, some in (("eager", planned), ("graph", reversed(first.values()))):
        for call in some:
            yield call.name, partial(check_call, call, device, through)
    for name in FUSED:
        yield name, partial(check_prologue, name, device)
