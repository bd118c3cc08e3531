"""Packs weights once per parameter. Graphs that need the same packing share the packed weight.

The key of a packed weight is the packing program, with the memory and the layout of the parameters.
A parameter that has changed is packed again (:mod:`mla_fusion.weights.source` says what shows a
change). A packed weight lives as long as a compiled graph uses it and its parameters live. If the
parameter is a view of the packed weight, or the packed weight one of the parameter, an update of
the parameter needs no packing.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary, proxy, ref

import torch
from torch.fx import GraphModule
from torch.fx.node import map_arg

from mla_fusion.compat import FakeTensor, holders, is_view, storage_id
from mla_fusion.fx.kinds import attribute
from mla_fusion.fx.vector_numbers import Exact
from mla_fusion.modes import is_capturing, is_plain, outside_modes
from mla_fusion.weights.source import Source, place

_Key = tuple[str, str, tuple[object, ...]]


class WeightError(ValueError):
    """A parameter has changed to what the compiled graph was not made for."""


class User(Protocol):
    """Keeps packed weights from one step to the next."""

    def forget(self) -> None:
        """Drops them: a weight is not current, or its memory is to be freed."""


class Entry:
    """A packed weight.

    packed  None if the parameters have changed or are gone
    memory  where the weight lies. After a change the parameters are packed into it again. None if
            the parameters are gone.
    recipe  makes the weight of its sources
    """

    def __init__(self, sources: Sequence[Any], packed: torch.Tensor, recipe: Packed) -> None:
        self.recipe = recipe
        self.users = WeakSet[User]()
        self.memory: torch.Tensor | None = _without_base(packed)
        self._remember(sources, self.memory)

    def _remember(self, sources: Sequence[Any], packed: torch.Tensor) -> None:
        """Remembers the sources as they are, and watches their memory.

        The entry is void as soon as the memory of a source is freed. If the packed weight shares
        that memory, `_collected` looks for it.
        """
        self.packed: torch.Tensor | None = packed
        tensors = [source for source in sources if isinstance(source, torch.Tensor)]
        self.sources = [Source(tensor, packed, self.recipe.updates) for tensor in tensors]
        entry = proxy(self)
        self._watched = [
            ref(tensor.untyped_storage(), lambda _: entry.void())
            for tensor in tensors
            if storage_id(tensor) != storage_id(packed)
        ]
        if self.is_view and _collected not in gc.callbacks:
            gc.callbacks.append(_collected)

    def void(self) -> None:
        """Drops the memory."""
        self.expire()
        self.memory = None

    def expire(self) -> None:
        """Makes every user ask again: the packed weight is not current."""
        self.packed = None
        for user in list(self.users):
            user.forget()

    def renew(self, sources: Sequence[Any], packed: torch.Tensor) -> bool:
        """Copies a newly packed weight into this memory. Returns False if it does not fit."""
        memory = self.memory
        form = packed.shape, packed.dtype
        if memory is None or self.is_view or (memory.shape, memory.dtype) != form:
            return False
        self.expire()
        self._remember(sources, memory.copy_(packed))
        return True

    @property
    def is_view(self) -> bool:
        """True if the packed weight and a parameter share memory."""
        return self.memory is not None and any(
            source.storage == storage_id(self.memory) for source in self.sources
        )

    def fits(self, sources: Sequence[Any], compares: bool) -> bool:
        """Returns True if sources at the same places are unchanged.

        compares  compares their content whatever ``updates`` says, except while a device captures
                  a graph
        """
        tensors = (source for source in sources if isinstance(source, torch.Tensor))
        return self.packed is not None and all(
            source.is_still(
                tensor,
                self.recipe.updates == "every call"
                or (compares and not is_capturing(tensor.device)),
            )
            for source, tensor in zip(self.sources, tensors, strict=True)
        )

    @property
    def bytes(self) -> int:
        """Size beside the parameters: 0 if a parameter lies in the packed memory."""
        return 0 if self.packed is None or self.is_view else self.packed.nbytes


_ENTRIES: WeakValueDictionary[_Key, Entry] = WeakValueDictionary()
_LOCK = Lock()


def _renew_lock() -> None:
    """Makes a lock for a forked child, in which the thread that holds the old lock does not run."""
    global _LOCK
    _LOCK = Lock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass(eq=False)
class Packed:
    """A weight made of some of the caller's arguments: tensors, and numbers that its sizes depend
    on.

    program     takes the arguments at ``positions``
    updates     as in Config
    exact       which numbers of its only source the packed weight must hold
    names       of the arguments in the user's model
    signature   of the program; equal programs have equal signatures
    """

    program: GraphModule
    updates: str = "rounds"
    exact: Exact | None = None
    positions: tuple[int, ...] = (0,)
    names: tuple[str, ...] = ("",)
    signature: str = field(init=False)

    def __post_init__(self) -> None:
        self.signature = describe(self.program)

    def __call__(self, args: Sequence[Any]) -> torch.Tensor:
        """Returns the packed weight. Of fake tensors, and of a transform's, it is not kept."""
        sources = self.sources(args)
        if not are_plain(sources):
            return self.pack(*sources)
        packed = self.of(sources).packed
        assert packed is not None
        return packed

    def sources(self, args: Sequence[Any]) -> list[Any]:
        return [args[position] for position in self.positions]

    def of(self, sources: Sequence[Any], in_use: Container[Entry] = ()) -> Entry:
        """Returns the weight packed of these sources. Packs them if they are new or have changed.

        in_use  entries that were checked at every call; of other entries the content is compared

        Raises WeightError if the packed weight would not hold the numbers that it must.
        """
        with _LOCK, outside_modes():
            key = self.signature, self.updates, tuple(map(place, sources))
            entry = _ENTRIES.get(key)
            if entry is None or not entry.fits(sources, entry not in in_use):
                packed = self.pack(*sources)
                if entry is None or not entry.renew(sources, packed):
                    if entry is not None:
                        entry.void()
                    entry = Entry(sources, packed, self)
                    _ENTRIES[key] = entry
            return entry

    def pack(self, *sources: Any) -> torch.Tensor:
        """Returns a newly packed weight.

        Raises WeightError if it would not hold the numbers that it must.
        """
        packed = self.program(*sources)
        exact = self.exact
        # a fake tensor holds no numbers
        if exact is None or isinstance(packed, FakeTensor) or exact.holds(packed, sources[0]):
            return packed
        raise WeightError(
            f"[{exact.code}] {exact.what}, as they were when this graph was compiled: it has "
            "changed, or is another model's; call torch.compiler.reset(). One compiled function "
            "for layers that differ in this is to be named in Config.skip"
        )


def are_plain(sources: Sequence[Any]) -> bool:
    """Returns True if a weight packed of these may be kept for other calls."""
    return all(is_plain(source) for source in sources if isinstance(source, torch.Tensor))


def drop(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Drops the weights packed of these tensors. Returns the identities of their memory."""
    storages = {storage_id(tensor) for tensor in tensors}
    dropped = set()
    with _LOCK, outside_modes():
        for key, entry in list(_ENTRIES.items()):
            if entry.packed is not None and _reads(entry, storages):
                dropped.add(storage_id(entry.packed))
                entry.void()
                _ENTRIES.pop(key, None)
    return dropped


def _reads(entry: Entry, storages: Container[int]) -> bool:
    """Returns True if a source of the entry lies in these storages."""
    return any(source.storage in storages for source in entry.sources)


def renew(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor] = ()) -> int:
    """Packs again, in place, the copies that were made of these tensors. Returns their number.

    A copy with an unknown source is packed at the next call. So is a copy that cannot hold the new
    numbers: the first WeightError is raised after all others are packed.

    others  an iterator over tensors that may be further sources of such a copy
    """
    by_place = {place(tensor): tensor for tensor in tensors}
    by_storage = {storage_id(tensor): tensor for tensor in by_place.values()}
    count, errors = 0, list[WeightError]()
    with _LOCK, outside_modes():
        for (*_, places), entry in list(_ENTRIES.items()):
            if entry.memory is None or entry.is_view or not _reads(entry, by_storage):
                continue
            if len(entry.sources) > 1:
                for tensor in others:  # none are left after the first time
                    by_place.setdefault(place(tensor), tensor)
            sources = [_source_at(each, by_place, by_storage) for each in places]
            is_renewed = False
            try:
                if all(source is not None for source in sources):
                    is_renewed = entry.renew(sources, entry.recipe.pack(*sources))
            except WeightError as error:
                errors.append(error)
            if is_renewed:
                count += 1
            else:
                entry.expire()
    if errors:
        raise errors[0]
    return count


def _source_at(
    at: Any, by_place: dict[object, torch.Tensor], by_storage: dict[int, torch.Tensor]
) -> Any:
    """Returns the tensor at a place, None if no tensor is known. A number is its own place."""
    if not isinstance(at, tuple):
        return at
    storage, offset, shape, stride, dtype = at
    tensor, neighbour = by_place.get(at), by_storage.get(storage)
    if tensor is not None or neighbour is None or neighbour.dtype != dtype:
        return tensor
    return neighbour.as_strided(shape, stride, offset)


def sweep() -> None:
    """Voids the packed weights whose parameters are gone."""
    with _LOCK, outside_modes():
        _sweep()


def count_by_storage() -> Counter[int]:
    """Returns how many packed weights lie in each storage."""
    return Counter(
        storage_id(entry.memory) for entry in list(_ENTRIES.values()) if entry.memory is not None
    )


def _sweep() -> None:
    ours = count_by_storage()
    for key, entry in list(_ENTRIES.items()):
        memory = entry.memory
        if (
            memory is None
            or any(source.weak.expired() for source in entry.sources)
            # a memory in which its parameter lies, and that only packed weights use
            or (
                entry.is_view
                and holders(memory) < holders(memory.new_empty(0)) + ours[storage_id(memory)]
            )
        ):
            entry.void()
            _ENTRIES.pop(key, None)


def _collected(phase: str, info: dict[str, int]) -> None:
    """Sweeps after each full collection of Python's, while there are copies that share memory.

    Nothing reports that memory has lost its last other user. An interrupt that comes while Python
    calls this function is lost, so it is not called without need.
    """
    if phase == "stop" and info["generation"] == 2 and _LOCK.acquire(blocking=False):
        try:
            with outside_modes():  # of the caller that happened to allocate
                _sweep()
                if not any(entry.is_view for entry in list(_ENTRIES.values())):
                    gc.callbacks.remove(_collected)
        finally:
            _LOCK.release()


def _without_base(packed: torch.Tensor) -> torch.Tensor:
    """Returns the same memory without the reference of a view, which keeps its parameter alive."""
    memory = (packed.untyped_storage(), packed.storage_offset(), packed.shape, packed.stride())
    return packed.new_empty(0).set_(*memory) if is_view(packed) else packed


def describe(program: GraphModule) -> str:
    """Returns a text that is equal for equal packing programs, whatever names their nodes have."""
    names = {node: _Name(f"%{number}") for number, node in enumerate(program.graph.nodes)}
    lines = []
    for node in program.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), names.__getitem__)
        target = "" if node.op == "placeholder" else node.target
        if node.op == "get_attr":  # a tensor, or the graph of a branch (``torch.cond``)
            value = attribute(node)
            is_graph = isinstance(value, GraphModule)
            target = describe(value) if is_graph else f"{value.dtype} {value.tolist()}"
        lines.append(f"{names[node]} = {node.op} {target} {args} {kwargs}")
    return "\n".join(lines)


class _Name(str):
    """Prints without quotes inside a tuple."""

    __repr__ = str.__str__
