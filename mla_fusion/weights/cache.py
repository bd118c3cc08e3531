"""Packed weights, made once per parameter and shared by every graph that needs the same packing.

Keyed by what is done (the packing program) and by what it is done to (memory and layout of the parameters). A
parameter that has changed is packed again (:mod:`mla_fusion.weights.source` says what shows that). A packed weight
lives as long as a compiled graph holds it and its parameters live. Where the parameter is a view of the packed weight,
or the other way round, an update reaches the latter by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.fx import GraphModule
from torch.fx.node import map_arg

from mla_fusion.compat import holders, is_view, storage_id
from mla_fusion.fx.held import Exact
from mla_fusion.weights.share import Inverse, re_express
from mla_fusion.weights.source import Source, place

_Key = tuple[str, bool, tuple[object, ...]]
_ND = 2  # the storage format of plain memory, as npu_format_cast numbers them


class WeightError(ValueError):
    """A parameter has changed to what the compiled graph was not made for."""


class Entry:
    """A packed weight, None once it is void. ``inverse`` is set where the parameter has become a view of it.

    Its content never changes hands: a parameter that has changed gets another entry.
    """

    def __init__(self, sources: Sequence[Any], packed: torch.Tensor, trusted: bool) -> None:
        self.packed: torch.Tensor | None = _without_base(packed)
        self.trusted = trusted
        self.inverse: Inverse | None = None
        self.asked_to_share = False
        self._remember(sources)

    def _remember(self, sources: Sequence[Any]) -> None:
        assert self.packed is not None
        tensors = [source for source in sources if isinstance(source, torch.Tensor)]
        self.sources = [Source(tensor, self.packed, self.trusted) for tensor in tensors]

    def fits(self, sources: Sequence[Any]) -> bool:
        """Whether sources at the same places hold what they held."""
        tensors = (source for source in sources if isinstance(source, torch.Tensor))
        return self.packed is not None and all(
            known.is_still(source) for known, source in zip(self.sources, tensors, strict=True)
        )

    def share(self, parameter: torch.Tensor, inverse: Inverse) -> bool:
        """Make the parameter a view of the packed weight, if it may be; asked once, the answer stands."""
        self.asked_to_share = True
        assert self.packed is not None
        if not re_express(parameter, self.packed, inverse):
            return False
        self.inverse = inverse
        self._remember([parameter])
        return True

    def release(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give a parameter that lies in the packed weight contiguous memory of its own; the entry is void then."""
        if self.inverse is not None and self.packed is not None:
            for parameter in parameters:
                if storage_id(parameter) == storage_id(self.packed):
                    dense = torch.ops.npu.npu_format_cast(self.packed, _ND)
                    parameter.data = self.inverse(dense).contiguous()
        self.packed = None

    @property
    def bytes(self) -> int:
        """Held beside the parameters: none where one of them lies in the packed memory."""
        if self.packed is None or any(source.storage == storage_id(self.packed) for source in self.sources):
            return 0
        return self.packed.nbytes


_ENTRIES: WeakValueDictionary[_Key, Entry] = WeakValueDictionary()
_LOCK = RLock()


class Packing:
    """One packing program; holds what it has packed.

    program     takes the sources: tensors, and numbers where sizes are symbolic
    inverse     how the one source may become a view of the packed weight, if it is to
    trusted     whether version counters are taken at their word (``Config(updates="trusted")``)
    exact       which numbers of its one source what is packed must hold
    """

    def __init__(
        self,
        program: GraphModule,
        signature: str,
        inverse: Inverse | None = None,
        trusted: bool = False,
        exact: Exact | None = None,
    ) -> None:
        self.program, self.signature, self.inverse, self.trusted = program, signature, inverse, trusted
        self.exact = exact
        self._held: dict[_Key, Entry] = {}

    def of(self, sources: Sequence[Any]) -> Entry:
        """The weight packed of these sources, made anew where there is none or they have changed.

        Raises WeightError where what is packed would not hold the numbers that it must.
        """
        with _LOCK, _writing():
            key = self._key(sources)
            entry = _ENTRIES.get(key)
            if entry is None or not entry.fits(sources):
                if entry is not None:
                    entry.packed = None  # whoever holds it asks again
                entry = Entry(sources, self._made(sources), self.trusted)
            if self.inverse is not None and not entry.asked_to_share and entry.share(sources[0], self.inverse):
                _ENTRIES.pop(key, None)
                self._held.pop(key, None)
                key = self._key(sources)  # the parameter has moved
            _ENTRIES[key] = self._held[key] = entry
            return entry

    def _made(self, sources: Sequence[Any]) -> torch.Tensor:
        packed: torch.Tensor = self.program(*sources)
        if self.exact is not None and not self.exact.holds(packed, sources[0]):
            raise WeightError(
                f"[{self.exact.code}] {self.exact.what}, as they were when this graph was compiled: it has changed, or "
                "is another model's; call torch.compiler.reset(). One compiled function for layers that differ in this "
                "is to be named in Config.skip"
            )
        return packed

    def bytes(self, sources: Sequence[Any]) -> int:
        """What the weight packed of these sources takes beside them, once it has been made."""
        entry = _ENTRIES.get(self._key(sources))
        return entry.bytes if entry is not None else 0

    def sweep(self) -> None:
        """Let go of void entries."""
        with _LOCK:
            self._held = {key: entry for key, entry in self._held.items() if entry.packed is not None}

    def _key(self, sources: Sequence[Any]) -> _Key:
        return self.signature, self.trusted, tuple(map(place, sources))


@contextmanager
def _writing() -> Iterator[None]:
    """Without gradients, and out of inference mode: a parameter given memory inside it would be bound to it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def release(parameters: Iterable[torch.Tensor] | torch.nn.Module) -> int:
    """Drop packed weights, and say how many. The next call packs anew.

    parameters  those that the weights were made of, or a module that has them

    Parameters that are views of packed weights (``Config(weights="shared")``) get contiguous memory of their own
    again. To be called before weights are loaded into a model that has run on an NPU, and, under
    ``Config(updates="trusted")``, after updates that leave no trace, such as ``parameter.data.copy_(..)``.
    """
    given = list(parameters.parameters() if isinstance(parameters, torch.nn.Module) else parameters)
    wanted = {storage_id(parameter) for parameter in given}
    dropped = 0
    with _LOCK, _writing():
        for key, entry in list(_ENTRIES.items()):
            if entry.packed is not None and any(source.storage in wanted for source in entry.sources):
                entry.release(given)
                _ENTRIES.pop(key, None)
                dropped += 1
    return dropped


def sweep() -> None:
    """Void the packed weights whose parameters are gone."""
    with _LOCK:
        entries = list(_ENTRIES.items())
        ours = Counter(storage_id(entry.packed) for _, entry in entries if entry.packed is not None)
        for key, entry in entries:
            gone = entry.packed is None or any(source.weak.expired() for source in entry.sources)
            if gone or _is_alone(entry, ours):
                entry.packed = None
                _ENTRIES.pop(key, None)


def _is_alone(entry: Entry, ours: Counter[int]) -> bool:
    """Whether the memory of a packed weight in which its parameter lies has no holder but packed weights."""
    assert entry.packed is not None
    storage = storage_id(entry.packed)
    if not any(source.storage == storage for source in entry.sources):
        return False
    return holders(entry.packed) < holders(entry.packed.new_empty(0)) + ours[storage]


def bytes_held() -> int:
    """Bytes of all packed weights alive, those apart in which a parameter lies (or which are views of one)."""
    sweep()
    return sum(entry.bytes for entry in list(_ENTRIES.values()))


def _without_base(packed: torch.Tensor) -> torch.Tensor:
    """The same memory, without the reference that a view keeps to its parameter: that would never die."""
    memory = (packed.untyped_storage(), packed.storage_offset(), packed.shape, packed.stride())
    return packed.new_empty(0).set_(*memory) if is_view(packed) else packed


def describe(program: GraphModule) -> str:
    """Text that is equal for equal packing programs, whatever their nodes are called."""
    number = {node: f"%{position}" for position, node in enumerate(program.graph.nodes)}
    lines = []
    for node in program.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), lambda used: Named(number[used]))
        held = _described(attrgetter(str(node.target))(program)) if node.op == "get_attr" else ""
        target = "" if node.op in ("placeholder", "get_attr") else node.target
        lines.append(f"{number[node]} = {node.op} {target} {args} {kwargs} {held}")
    return "\n".join(lines)


def _described(held: Any) -> str:
    """Of a tensor its numbers, of a branch (``torch.cond``) its graph."""
    return describe(held) if isinstance(held, GraphModule) else str(held.tolist())


class Named(str):
    """Prints as the bare name inside a tuple."""

    __repr__ = str.__str__
