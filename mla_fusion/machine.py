"""Names of chips and of CANN releases, and which of them this process has."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
SOCS = ("A2", "A3", "A5")
RELEASES = ("8.2", "8.3", "8.5", "9.0", "9.1", "latest")
AUTO = "auto"
_ASSUMED = "A3", "latest"
# How the names of a generation start, without "Ascend" and "Atlas", in capitals and without "_".
_NAMES = {"A2": ("A2", "910B"), "A3": ("A3", "910C", "91093"), "A5": ("A5", "950", "91095")}


_target: ContextVar[str] = ContextVar("mla_fusion.machine", default=_ASSUMED[0])


@contextmanager
def set_inside(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Sets a variable inside the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def compiling_for(soc: str) -> AbstractContextManager[None]:
    """Sets the chip that the offline runtime (`mla_fusion.offline`) stands in for."""
    return set_inside(_target, soc)


compiled_for = _target.get


_ge: ContextVar[bool] = ContextVar("mla_fusion.ge", default=False)


def for_ge(is_ge: bool) -> AbstractContextManager[None]:
    """Tells the pass whether GE runs the graph: GE takes only contiguous inputs."""
    return set_inside(_ge, is_ge)


is_for_ge = _ge.get


@dataclass(frozen=True)
class Machine:
    """A chip generation and a CANN release of the tables.

    how  why these were chosen; "" if the user named both
    """

    soc: str
    cann: str
    how: str

    def __str__(self) -> str:
        return f"{self.soc}, CANN {self.cann}" + (f" ({self.how})" if self.how else "")


def soc_named(name: str) -> str:
    """Returns the generation of a chip: A2 for ``910B`` and ``Ascend910B2``, A3 for ``910C`` and
    ``Ascend910_9392``, A5 for ``Ascend950PR``. Raises ValueError for an unknown chip.
    """
    plain = re.sub(r"^(ASCEND|ATLAS)", "", re.sub(r"[\s_-]", "", str(name)).upper())
    for soc, starts in _NAMES.items():
        if plain.startswith(starts):
            return soc
    raise ValueError(
        f"{name!r} is no chip that the operator's tables know; they have A2 (910B), "
        "A3 (910C), A5 (950)"
    )


def release_named(version: str, *, found: bool = False) -> str:
    """Returns the release of the tables for a version: 9.0 for ``9.0.1``, 8.3 for ``8.3.RC1``.

    found  True: the version is that of a machine, so a newer one than the tables' is "latest"

    Raises ValueError for a version outside the tables.
    """
    if version == "latest":
        return version
    numbers = re.match(r"(\d+)\.(\d+)(?:\.|$)", str(version))
    if numbers is None:
        raise ValueError(f"{version!r} is no CANN release; there are {', '.join(RELEASES)}")
    wanted = int(numbers[1]), int(numbers[2])
    known = {tuple(map(int, text.split("."))): text for text in RELEASES if text != "latest"}
    if wanted > max(known):
        if found:
            return "latest"
        raise ValueError(
            f"CANN {version} is newer than the tables; there are {', '.join(RELEASES)}"
        )
    if wanted < min(known):
        raise ValueError(f"CANN {version} is older than {RELEASES[0]}, the first with the operator")
    return known[max(release for release in known if release <= wanted)]


def settled(soc: str, cann: str) -> Machine:
    """Returns chip and release, with "auto" resolved: this process's NPU, or A3 and the latest
    release.
    """
    if AUTO not in (soc, cann):
        return Machine(soc, cann, "")
    machine = _machine_of(sys.modules.get("torch_npu"))
    chosen = {name: value for name, value in (("soc", soc), ("cann", cann)) if value != AUTO}
    return replace(machine, **chosen)


def has_npu() -> bool:
    """Returns True if torch_npu is loaded and finds an NPU. The offline runtime's stand-ins are
    none.
    """
    torch_npu = sys.modules.get("torch_npu")
    return torch_npu is not None and bool(torch_npu.npu.is_available())


@cache
def _machine_of(torch_npu: Any) -> Machine:
    """Returns the machine that torch_npu runs on, or the assumed one."""
    if torch_npu is None or not torch_npu.npu.is_available():
        return Machine(*_ASSUMED, "assumed, no NPU here")
    soc, cann = _ASSUMED
    name, unknown = "an unnamed NPU", []
    try:
        name = device_name(torch_npu)
        soc = soc_named(name)
    except (ValueError, RuntimeError) as error:
        unknown.append(str(error))
    try:
        cann = release_named(cann_version(), found=True)
    except (ValueError, RuntimeError, ImportError) as error:
        unknown.append(str(error))
    return Machine(soc, cann, f"{name}; assumed, since {'; '.join(unknown)}" if unknown else name)


def device_name(torch_npu: Any) -> str:
    """Returns the name of the current device, such as ``Ascend910_9392``."""
    return str(torch_npu.npu.get_device_name())


def cann_version() -> str:
    """Returns the version of the CANN that torch_npu uses."""
    from torch_npu.npu.utils import get_cann_version

    return str(get_cann_version())
