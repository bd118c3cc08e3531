"""An audit of a graph dump: the contract of its prologue operators, and how their inputs are
wired.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from mla_fusion.meta.prolog import PROLOGS
from mla_fusion.tools.by_hand import wiring
from mla_fusion.tools.by_hand.calls import Arguments, Call
from mla_fusion.tools.by_hand.outcome import Audit, Finding
from mla_fusion.tools.dumps import Dump, Value, names, prologues, read
from mla_fusion.tools.dumps.prologues import Prologue

_LARGEST = 1 << 50  # elements; no tensor has more
_DYNAMIC = 8  # what a dynamic dimension is taken for


def audit_dump(path: str | Path, **limits: Any) -> Audit:
    """The prologue operators of a graph that torchair, GE or torch wrote: their contract, by shapes
    and attributes. ``limits``: soc and cann, as `mla_fusion.meta.check` has them.

    No numbers are in a dump, so nothing is compared; a dynamic dimension is taken for 8. Raises
    DumpError for a file that is no dump, OSError for one that cannot be read.
    """
    dump = read(path)
    found = prologues.find(dump)
    seen = [finding for item in found for finding in _findings(dump, item, **limits)]
    return Audit(tuple(_name(item) for item in found), tuple(seen))


def _findings(dump: Dump, item: Prologue, **limits: Any) -> Iterator[Finding]:
    name, where = _name(item), item.source or f"{dump.path}, {item.name}"
    tensors = {given.role: _tensor(given.value) for given in item.inputs}
    call = Call(item.place, f"npu::{name}", {**tensors, **_attributes(name, item)}, where)
    yield from wiring.contract(call, values=False, path="graph", **limits)
    yield from wiring.epsilons(call)


def _attributes(name: str, item: Prologue) -> Arguments:
    """Attributes as torch has them: some dumps hold a bool as a number."""
    defaults = PROLOGS[name].defaults
    return {
        key: bool(value) if isinstance(defaults.get(key), bool) else value
        for key, value in item.attributes.items()
    }


def _name(item: Prologue) -> str:
    """torch's name of the operator."""
    if item.type in prologues.GE:
        return prologues.GE[item.type].name
    return item.type.removeprefix("npu.").partition(".")[0]


def _tensor(value: Value) -> Any:
    """The value without its numbers; None where the dump does not tell shape and dtype."""
    dtype = names.dtype(value.dtype)
    if dtype is None or value.shape is None:
        return None
    sizes = [size if isinstance(size, int) and size >= 0 else _DYNAMIC for size in value.shape]
    if len(sizes) > names.MOST_AXES or prod(sizes) > _LARGEST:
        return None
    return torch.empty(sizes, dtype=dtype, device="meta")
