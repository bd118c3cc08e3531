"""Packed weights, made once per parameter and shared by every graph that needs the same packing.

Keyed by what is done (the packing program) and by whom it is done to (the parameters' identity). A parameter that is
updated in place (a reload, a merged LoRA) or given other memory is packed again, and a dropped parameter takes its
packed copy with it. Where the parameter is a view of the packed weight, an update reaches the latter by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef

from mla_fusion.weights.share import Inverse, re_express

_Key = tuple[str, tuple[int, ...]]
_ND = 2  # the storage format of plain memory, as npu_format_cast numbers them


class _Source:
    """A parameter as it was when it was packed, or as packing left it."""

    def __init__(self, tensor: torch.Tensor, packed: torch.Tensor, when_dropped: Callable[[Any], Any]) -> None:
        self.tensor = weakref.ref(tensor, when_dropped)
        self.storage = StorageWeakRef(tensor.untyped_storage())  # while it stands, no other storage has this address
        self.place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self.holds_packed = self.storage.cdata == packed.untyped_storage()._cdata
        self.version = version(tensor)

    def is_still(self, tensor: torch.Tensor) -> bool:
        return (
            self.tensor() is tensor
            and self.storage.cdata == tensor.untyped_storage()._cdata
            and self.place == (tensor.storage_offset(), tensor.shape, tensor.stride())
            and (self.holds_packed or self.version == version(tensor))
        )


class _Entry:
    """A packed weight. ``inverse`` is set once the parameter it was made of has become a view of it."""

    def __init__(self, key: _Key, sources: Sequence[torch.Tensor], packed: torch.Tensor) -> None:
        self.key = key
        self.packed = _without_base(packed)
        self.inverse: Inverse | None = None
        self.asked_to_share = False
        self._remember(sources)

    def _remember(self, sources: Sequence[torch.Tensor]) -> None:
        self.sources = [_Source(source, self.packed, partial(_drop, self.key)) for source in sources]

    def fits(self, sources: Sequence[torch.Tensor]) -> bool:
        return all(known.is_still(source) for known, source in zip(self.sources, sources, strict=True))

    def share(self, parameter: torch.Tensor, inverse: Inverse) -> None:
        """Make the parameter a view of the packed weight, if it may be; asked once, the answer stands."""
        self.asked_to_share = True
        if re_express(parameter, self.packed, inverse):
            self.inverse = inverse
            self._remember([parameter])

    def release(self) -> None:
        """Give a parameter that lies in the packed weight contiguous memory of its own; the entry is void then."""
        parameter = self.sources[0].tensor() if self.inverse is not None else None
        if self.inverse is not None and parameter is not None and self.fits([parameter]):
            plain = torch.ops.npu.npu_format_cast(self.packed, _ND)
            parameter.data = self.inverse(plain).contiguous()

    @property
    def bytes(self) -> int:
        """Held beside the parameters: none where one of them lies in the packed memory."""
        tensors = [tensor for source in self.sources if (tensor := source.tensor()) is not None]
        own = {tensor.untyped_storage()._cdata for tensor in tensors}
        return 0 if self.packed.untyped_storage()._cdata in own else self.packed.nbytes


_ENTRIES: dict[_Key, _Entry] = {}
_LOCK = Lock()


def _drop(key: _Key, _: object) -> None:
    _ENTRIES.pop(key, None)  # without the lock: the collector may run this while it is held


def packed(
    program: GraphModule, signature: str, sources: Sequence[torch.Tensor], inverse: Inverse | None = None
) -> torch.Tensor:
    """``program(*sources)``, from the cache where the same tensors have been packed so before.

    With ``inverse`` the one source becomes a view of the packed weight, if its memory is its own.
    """
    key = _key(signature, sources)
    with _LOCK:
        entry = _ENTRIES.get(key)
        if entry is None or not entry.fits(sources):
            with _writing():
                entry = _ENTRIES[key] = _Entry(key, sources, program(*sources))
        if inverse is not None and not entry.asked_to_share:
            with _writing():
                entry.share(sources[0], inverse)
    return entry.packed


def _key(signature: str, sources: Sequence[torch.Tensor]) -> _Key:
    return signature, tuple(id(source) for source in sources)


@contextmanager
def _writing() -> Iterator[None]:
    """Without gradients, and out of inference mode: a parameter given memory inside it would be bound to it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def release(parameters: Iterable[torch.Tensor]) -> int:
    """Drop the packed weights made of these parameters; how many. The next call of a compiled graph packs anew.

    Parameters that are views of packed weights (``Config(weights="shared")``) get contiguous memory of their own
    again. To be called before weights are loaded into a model that has run on an NPU, and after updates that leave no
    trace on the parameter, such as ``parameter.data.copy_(..)``.
    """
    wanted = {id(parameter) for parameter in parameters}
    dropped = 0
    with _LOCK, _writing():
        for key, entry in list(_ENTRIES.items()):
            if not wanted.isdisjoint(key[1]):
                entry.release()
                _ENTRIES.pop(key, None)
                dropped += 1
    return dropped


def version(tensor: torch.Tensor) -> int:
    """The in-place version; tensors made under inference_mode have none and count as never changed."""
    return 0 if tensor.is_inference() else tensor._version


def bytes_held() -> int:
    """Bytes of all packed weights alive, those apart in which a parameter lies (or which are views of one)."""
    return sum(entry.bytes for entry in list(_ENTRIES.values()))


def bytes_of(signature: str, sources: Sequence[torch.Tensor]) -> int:
    """Of them, those of one packed weight."""
    entry = _ENTRIES.get(_key(signature, sources))
    return entry.bytes if entry is not None else 0


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
