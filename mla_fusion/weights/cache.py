"""Packed weights, made once per parameter and shared by every graph that needs the same packing.

Keyed by what is done (the packing program) and by whom it is done to (the parameters' identity and version), so a
parameter that is updated in place (a reload, a merged LoRA) is packed again, and a dropped parameter takes its
packed copy with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from threading import Lock

import torch
from torch.fx import GraphModule
from torch.fx.node import map_arg

_Stamp = tuple[int, ...]


class _Entry:
    def __init__(self, stamp: _Stamp, sources: Sequence[torch.Tensor], packed: torch.Tensor) -> None:
        self.stamp = stamp
        self.packed = _without_base(packed)
        own = {source.untyped_storage().data_ptr() for source in sources}
        self.bytes = 0 if packed.untyped_storage().data_ptr() in own else packed.nbytes
        self.sources = [weakref.ref(source) for source in sources]

    def fits(self, stamp: _Stamp, sources: Sequence[torch.Tensor]) -> bool:
        alive = all(ref() is source for ref, source in zip(self.sources, sources, strict=True))
        return alive and self.stamp == stamp


_ENTRIES: dict[tuple[str, _Stamp], _Entry] = {}
_LOCK = Lock()


def packed(program: GraphModule, signature: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """``program(*sources)``, from the cache where the same tensors have been packed so before."""
    identity = tuple(id(source) for source in sources)
    stamp = tuple(version(source) for source in sources)
    key = (signature, identity)
    with _LOCK:
        entry = _ENTRIES.get(key)
        if entry is None or not entry.fits(stamp, sources):
            with torch.no_grad():
                entry = _Entry(stamp, sources, program(*sources))
            _ENTRIES[key] = entry
            for source in sources:
                weakref.finalize(source, _ENTRIES.pop, key, None)
    return entry.packed


def version(tensor: torch.Tensor) -> int:
    """The in-place version; tensors made under inference_mode have none and count as never changed."""
    return 0 if tensor.is_inference() else tensor._version


def bytes_held() -> int:
    """Bytes of all packed weights alive, those apart that are views of their parameters."""
    with _LOCK:
        return sum(entry.bytes for entry in _ENTRIES.values())


def _without_base(packed: torch.Tensor) -> torch.Tensor:
    """The same memory, without the reference that a view keeps to its parameter: that would never die."""
    place = (packed.untyped_storage(), packed.storage_offset(), packed.shape, packed.stride())
    return packed.new_empty(0).set_(*place) if packed._is_view() else packed


def describe(program: GraphModule) -> str:
    """Text that is equal for equal packing programs, whatever their nodes are called."""
    number = {node: f"%{place}" for place, node in enumerate(program.graph.nodes)}
    lines = []
    for node in program.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), lambda used: Named(number[used]))
        held = getattr(program, node.target).tolist() if node.op == "get_attr" else ""
        target = "" if node.op in ("placeholder", "get_attr") else node.target
        lines.append(f"{number[node]} = {node.op} {target} {args} {kwargs} {held}")
    return "\n".join(lines)


class Named(str):
    """Prints as the bare name inside a tuple."""

    __repr__ = str.__str__
