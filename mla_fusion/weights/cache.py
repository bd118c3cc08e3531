"""Packed weights, made once per parameter and shared by every graph that needs the same packing.

Keyed by what is done (the packing program) and by what it is done to (memory and layout of the
parameters). A parameter that has changed is packed again (:mod:`mla_fusion.weights.source` says
what shows that). A packed weight lives as long as a compiled graph holds it and its parameters
live. Where the parameter is a view of the packed weight, or the other way round, an update reaches
the latter by itself.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from threading import Lock
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch.fx import GraphModule
from torch.fx.node import map_arg

from mla_fusion.compat import FakeTensor, holders, is_view, storage_id
from mla_fusion.fx.vector_numbers import Exact
from mla_fusion.modes import is_capturing, is_plain, outside_modes
from mla_fusion.weights.source import Source, place

_Key = tuple[str, str, tuple[object, ...]]


class WeightError(ValueError):
    """A parameter has changed to what the compiled graph was not made for."""


class User(Protocol):
    """Whoever keeps packed weights from one step to the next."""

    def forget(self) -> None:
        """Keep them no more: one of them is not current, or its memory is to be freed."""


class Entry:
    """A packed weight, None once its parameters are gone, or have changed.

    memory  where the weight lies: once parameters have changed they are packed again into it
    pack    makes it of its sources
    """

    def __init__(
        self,
        sources: Sequence[Any],
        packed: torch.Tensor,
        updates: str,
        pack: Callable[..., torch.Tensor],
    ) -> None:
        self.pack = pack
        self.packed: torch.Tensor | None = _without_base(packed)
        self.memory: torch.Tensor | None = self.packed
        self.updates = updates
        self.users: WeakSet[User] = WeakSet()
        self._remember(sources)

    def _remember(self, sources: Sequence[Any]) -> None:
        assert self.packed is not None
        tensors = [source for source in sources if isinstance(source, torch.Tensor)]
        self.sources = [Source(tensor, self.packed, self.updates) for tensor in tensors]
        self._watch(tensors)

    def void(self) -> None:
        """Let go of the memory."""
        self.expire()
        self.memory = None

    def expire(self) -> None:
        """What is packed is not current any more: whoever uses it asks again."""
        self.packed = None
        for user in list(self.users):
            user.forget()

    def renew(self, sources: Sequence[Any], packed: torch.Tensor) -> bool:
        """Take the content of a weight that was packed anew, in place; False where it has no such
        memory.
        """
        mine = self.memory
        if mine is None or self.is_view or (mine.shape, mine.dtype) != (packed.shape, packed.dtype):
            return False
        self.expire()
        mine.copy_(packed)
        self.packed = mine
        self._remember(sources)
        return True

    @property
    def is_view(self) -> bool:
        """Of its parameter, or this of it."""
        return self.memory is not None and any(
            source.storage == storage_id(self.memory) for source in self.sources
        )

    def _watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Be void as soon as the memory of a source is freed; for memory that it shares there is
        `_collected`.
        """
        this = ref(self)

        def void(_: object) -> None:
            entry = this()
            if entry is not None:
                entry.void()

        assert self.packed is not None
        own = storage_id(self.packed)
        memories = [tensor.untyped_storage() for tensor in tensors if storage_id(tensor) != own]
        self._watched = [ref(memory, void) for memory in memories]
        if self.is_view and _collected not in gc.callbacks:
            gc.callbacks.append(_collected)

    def fits(self, sources: Sequence[Any], compare: bool = False) -> bool:
        """Whether sources at the same places hold what they held; ``compare``: their content is
        compared too, but while a device captures a graph.
        """
        tensors = (source for source in sources if isinstance(source, torch.Tensor))
        return self.packed is not None and all(
            known.is_still(
                source,
                "every call" if compare and not is_capturing(source.device) else self.updates,
            )
            for known, source in zip(self.sources, tensors, strict=True)
        )

    @property
    def bytes(self) -> int:
        """Held beside the parameters: none where one of them lies in the packed memory."""
        return 0 if self.packed is None or self.is_view else self.packed.nbytes


_ENTRIES: WeakValueDictionary[_Key, Entry] = WeakValueDictionary()
_LOCK = Lock()


def _renew_lock() -> None:
    """In a forked child: the thread that held the lock is not there to let it go."""
    global _LOCK
    _LOCK = Lock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass(eq=False)
class Packed:
    """A weight made of some of the caller's arguments: tensors, and numbers that its sizes depend
    on. Holds what it has packed.

    program     takes the arguments at ``positions``
    updates     as in Config
    exact       which numbers of its one source what is packed must hold
    names       of the arguments in the user's model
    signature   of the program; equal for equal ones
    """

    program: GraphModule
    updates: str = "rounds"
    exact: Exact | None = None
    positions: tuple[int, ...] = (0,)
    names: tuple[str, ...] = ("",)
    signature: str = field(init=False)
    _held: dict[_Key, Entry] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.signature = describe(self.program)

    def __call__(self, args: Sequence[Any]) -> torch.Tensor:
        """The packed weight; of tensors that are not plain (fake, wrapped by a transform) one that
        is not kept.
        """
        sources = self.sources(args)
        if not are_plain(sources):
            return self._pack(*sources)
        packed = self.of(sources).packed
        assert packed is not None
        return packed

    def sources(self, args: Sequence[Any]) -> list[Any]:
        return [args[position] for position in self.positions]

    def of(self, sources: Sequence[Any], in_use: Container[Entry] | None = None) -> Entry:
        """The weight packed of these sources, made anew where there is none or they have changed.

        in_use  what has been watched at every call; the content of any other source is compared

        Raises WeightError where what is packed would not hold the numbers that it must.
        """
        with _LOCK, outside_modes():
            key = self.signature, self.updates, tuple(map(place, sources))
            entry = _ENTRIES.get(key)
            compare = in_use is not None and entry not in in_use
            if entry is None or not entry.fits(sources, compare):
                packed = self._pack(*sources)
                if entry is None or not entry.renew(sources, packed):
                    if entry is not None:
                        entry.void()  # whoever holds it asks again
                    entry = Entry(sources, packed, self.updates, self._pack)
            _ENTRIES[key] = self._held[key] = entry
            return entry

    @property
    def _pack(self) -> Callable[..., torch.Tensor]:
        return partial(_pack, self.program, self.exact)

    def sweep(self) -> None:
        """Let go of void entries."""
        with _LOCK:
            self._held = {
                key: entry for key, entry in self._held.items() if entry.memory is not None
            }


def _pack(program: GraphModule, exact: Exact | None, *sources: Any) -> torch.Tensor:
    """Raises WeightError where what is packed would not hold the numbers that it must."""
    packed: torch.Tensor = program(*sources)
    if isinstance(packed, FakeTensor):
        return packed  # it holds no numbers
    if exact is not None and not exact.holds(packed, sources[0]):
        raise WeightError(
            f"[{exact.code}] {exact.what}, as they were when this graph was compiled: it has "
            "changed, or "
            "is another model's; call torch.compiler.reset(). One compiled function for layers "
            "that differ in this "
            "is to be named in Config.skip"
        )
    return packed


def are_plain(sources: Sequence[Any]) -> bool:
    """Whether what is packed of these may be kept for other calls."""
    return all(is_plain(source) for source in sources if isinstance(source, torch.Tensor))


def drop(given: Sequence[torch.Tensor]) -> set[int]:
    """Let go of the packed weights that were made of these tensors; their memory by identity."""
    wanted = {storage_id(tensor) for tensor in given}
    dropped = set()
    with _LOCK, outside_modes():
        for key, entry in list(_ENTRIES.items()):
            if entry.packed is not None and any(
                source.storage in wanted for source in entry.sources
            ):
                dropped.add(storage_id(entry.packed))
                entry.void()
                _ENTRIES.pop(key, None)
    return dropped


def renew(
    tensors: Iterable[torch.Tensor], others: Callable[[], Iterable[torch.Tensor]] = tuple
) -> int:
    """Pack the copies anew that were made of these tensors, whether they have changed or not; how
    many.

    Each is packed into the memory that it has. ``others`` gives tensors that may have a part in
    them besides; a copy of which that is not all is left to the next call. So is one that cannot
    hold the new numbers: the first WeightError is raised once all others are packed.
    """
    by_place = {place(tensor): tensor for tensor in tensors}
    by_storage = {storage_id(tensor): tensor for tensor in by_place.values()}
    count, has_others, failed = 0, False, list[WeightError]()
    with _LOCK, outside_modes():
        for (*_, places), entry in list(_ENTRIES.items()):
            concerned = any(source.storage in by_storage for source in entry.sources)
            if entry.memory is None or entry.is_view or not concerned:
                continue
            if len(entry.sources) > 1 and not has_others:
                has_others = True
                by_place = {**{place(tensor): tensor for tensor in others()}, **by_place}
            sources = [_placed(each, by_place, by_storage) for each in places]
            packed = None
            try:
                if all(source is not None for source in sources):
                    packed = entry.pack(*sources)
            except WeightError as error:
                failed.append(error)
            if packed is not None and entry.renew(sources, packed):
                count += 1
            else:
                entry.expire()
    if failed:
        raise failed[0]
    return count


def _placed(
    at: Any, by_place: dict[object, torch.Tensor], by_storage: dict[int, torch.Tensor]
) -> Any:
    """The tensor at a place, or the number; None where no such tensor is known."""
    if not isinstance(at, tuple):
        return at
    storage, offset, shape, stride, dtype = at
    known, other = by_place.get(at), by_storage.get(storage)
    if known is not None or other is None or other.dtype != dtype:
        return known
    return other.as_strided(shape, stride, offset)


def sweep() -> None:
    """Void the packed weights whose parameters are gone."""
    with _LOCK, outside_modes():
        _sweep()


def held() -> Counter[int]:
    """How many packed weights lie in each storage."""
    return Counter(
        storage_id(entry.memory) for entry in list(_ENTRIES.values()) if entry.memory is not None
    )


def _sweep() -> None:
    entries, ours = list(_ENTRIES.items()), held()
    for key, entry in entries:
        memory = entry.memory
        if (
            memory is None
            or any(source.weak.expired() for source in entry.sources)
            # a memory in which its parameter lies, and that has no holder but packed weights
            or (
                entry.is_view
                and holders(memory) < holders(memory.new_empty(0)) + ours[storage_id(memory)]
            )
        ):
            entry.void()
            _ENTRIES.pop(key, None)


def _collected(phase: str, info: dict[str, int]) -> None:
    """Sweep after each full collection of Python's, while there are copies that share memory:
    nobody says when memory has lost its last other holder.

    An interrupt that comes while Python calls this is lost, so it is not called without need.
    """
    if phase == "stop" and info["generation"] == 2 and _LOCK.acquire(blocking=False):
        try:
            with outside_modes():  # of whoever happened to allocate
                _sweep()
                if not any(entry.is_view for entry in list(_ENTRIES.values())):
                    gc.callbacks.remove(_collected)
        finally:
            _LOCK.release()


def _without_base(packed: torch.Tensor) -> torch.Tensor:
    """The same memory, without the reference that a view keeps to its parameter: that would never
    die.
    """
    memory = (packed.untyped_storage(), packed.storage_offset(), packed.shape, packed.stride())
    return packed.new_empty(0).set_(*memory) if is_view(packed) else packed


def describe(program: GraphModule) -> str:
    """Text that is equal for equal packing programs, whatever their nodes are called."""
    number = {node: f"%{position}" for position, node in enumerate(program.graph.nodes)}
    lines = []
    for node in program.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), lambda used: Named(number[used]))
        target = node.target
        if node.op == "placeholder":
            target = ""
        elif (
            node.op == "get_attr"
        ):  # of a tensor its numbers, of a branch (``torch.cond``) its graph
            held = attrgetter(str(target))(program)
            target = describe(held) if isinstance(held, GraphModule) else held.tolist()
        lines.append(f"{number[node]} = {node.op} {target} {args} {kwargs}")
    return "\n".join(lines)


class Named(str):
    """Prints as the bare name inside a tuple."""

    __repr__ = str.__str__
