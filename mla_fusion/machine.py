"""Chips and CANN releases by the names that people and machines give them, and which of them are
here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
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
    """Inside, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def compiling_for(soc: str) -> AbstractContextManager[None]:
    """Inside, torch_npu answers questions about the chip as on this one, where there is none
    (`mla_fusion.offline`).
    """
    return set_inside(_target, soc)


compiled_for = _target.get


_ge: ContextVar[bool] = ContextVar("mla_fusion.ge", default=False)


def for_ge(is_ge: bool) -> AbstractContextManager[None]:
    """Inside, the pass knows that GE is to run the graph, which takes contiguous inputs alone."""
    return set_inside(_ge, is_ge)


is_for_ge = _ge.get


@dataclass(frozen=True)
class Machine:
    """A generation and a release of the tables; ``how`` they were found."""

    soc: str
    cann: str
    how: str

    def __str__(self) -> str:
        return f"{self.soc}, CANN {self.cann}" + (f" ({self.how})" if self.how else "")


def soc_named(name: str) -> str:
    """``910B``, ``Ascend910B2`` -> A2; ``910C``, ``Ascend910_9392`` -> A3; ``Ascend950PR`` -> A5.
    Raises ValueError.
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
    """``9.0.1`` is 9.0, ``8.3.RC1`` is 8.3. Raises ValueError for what the tables do not reach; a
    newer one that was ``found`` on a machine is "latest".
    """
    if version == "latest":
        return version
    numbers = re.match(r"(\d+)\.(\d+)(?:\.|$)", str(version))
    if numbers is None:
        raise ValueError(f"{version!r} is no CANN release; there are {', '.join(RELEASES)}")
    wanted = int(numbers[1]), int(numbers[2])
    known = {tuple(map(int, text.split("."))): text for text in RELEASES if text != "latest"}
    if wanted > max(known):
        if not found:
            raise ValueError(
                f"CANN {version} is newer than the tables; there are {', '.join(RELEASES)}"
            )
        return "latest"
    fitting = [release for release in known if release <= wanted]
    if not fitting:
        raise ValueError(
            f"CANN {version} is older than {known[min(known)]}, the first with the operator"
        )
    return known[max(fitting)]


def settled(soc: str, cann: str) -> Machine:
    """With "auto" found out: what an NPU of this process says, or else A3 and the latest
    release.
    """
    if AUTO not in (soc, cann):
        return Machine(soc, cann, "")
    here = _here(sys.modules.get("torch_npu"))
    return Machine(here.soc if soc == AUTO else soc, here.cann if cann == AUTO else cann, here.how)


@cache
def _here(torch_npu: Any) -> Machine:
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
    """What the current device calls itself, as ``Ascend910_9392``."""
    return str(torch_npu.npu.get_device_name())


def cann_version() -> str:
    """Of the CANN that torch_npu runs on."""
    from torch_npu.npu.utils import get_cann_version

    return str(get_cann_version())
