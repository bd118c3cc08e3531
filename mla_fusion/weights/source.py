"""What shows that a tensor has changed since a weight was packed of it.

A change leaves one of these traces, or none:

* other memory (``weight.data = other``, a swap, a move): another address or layout
* an operation that torch counts (``weight.copy_(..)`` under no_grad): the version counter
* none: ``weight.data.add_(..)``, a fused optimizer, any change of a tensor made under
  ``inference_mode``, and of memory that is reached by another tensor, such as a flat buffer. Only
  the content tells.

Nothing here refers to the tensor itself: ``torch.utils.swap_tensors`` refuses tensors that somebody
refers to weakly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import pad

from mla_fusion.compat import is_wrapper, parts_of, storage_id, version_of
from mla_fusion.modes import kept_outside_modes

SHARES = {"cpu": 1 << 21}
"""Bytes read at a time, by device."""
SHARE_OF_OTHERS = 1 << 25
_LANE = 8  # bytes of an int64
_COLUMNS = 4093  # a prime: rows of a weight that change places do not stay in their columns


class Shares:
    """A tensor cut into runs of at most so many bytes, a row of its first axis at the least."""

    def __init__(self, tensor: Tensor) -> None:
        self.rows = _rows(tensor.detach())
        length = self.rows.shape[0]
        row = self.rows.nbytes // length if length else 0
        self.size = max(1, SHARES.get(tensor.device.type, SHARE_OF_OTHERS) // max(row, 1))
        self.count = -(-length // self.size) if row else 0

    def fingerprint(self, number: int) -> Tensor:
        """Of share ``number``: int64 without axes, on the tensor's device. Nothing waits for it."""
        first = number * self.size
        return _hash(self.rows[first : first + self.size])


def fingerprint(tensor: Tensor) -> Tensor:
    """All shares of a tensor: int64 [shares], on its device."""
    with torch.no_grad():
        shares = Shares(tensor)
        found = [shares.fingerprint(number) for number in range(shares.count)]
        return (
            torch.stack(found) if found else torch.empty(0, dtype=torch.int64, device=tensor.device)
        )


def _rows(tensor: Tensor) -> Tensor:
    """The same elements with a first axis to be cut: flat where they lie densely, in whatever
    order.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    ordered = tensor.permute(order)
    return ordered.reshape(-1) if ordered.is_contiguous() else ordered


def _hash(piece: Tensor) -> Tensor:
    """Multilinear: columns are added up, multiplied by random 64-bit keys and added modulo 2^64.

    The upper half of each lane is added up by itself too, because in sums modulo 2^64 two changes
    of a highest bit cancel.
    """
    lanes = _lanes(piece)
    keys = _keys(lanes.device)
    return (_columns(lanes) * keys[0] + _columns(lanes >> 32) * keys[1]).sum()


def _lanes(piece: Tensor) -> Tensor:
    """The bits as int64 [..], with zeros behind them."""
    flat = piece.reshape(-1).contiguous()
    begin = flat.storage_offset() * flat.element_size()
    if begin % _LANE == flat.nbytes % _LANE == 0:
        return flat.view(torch.int64)
    return pad(flat.view(torch.uint8), [0, -flat.nbytes % _LANE]).view(torch.int64)


def _columns(lanes: Tensor) -> Tensor:
    whole = len(lanes) // _COLUMNS * _COLUMNS
    total = lanes[:whole].view(-1, _COLUMNS).sum(0)
    total[: len(lanes) - whole] += lanes[whole:]
    return total


@kept_outside_modes(64)
def _keys(device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    keys = torch.randint(
        -(2**63), 2**63 - 1, (2, _COLUMNS), generator=generator, dtype=torch.int64, device="cpu"
    )
    return keys.to(device)


def counting(compiled: Callable[..., Any], examples: Sequence[Any]) -> Callable[..., Any]:
    """``compiled``, which is given wrappers where the examples are some."""
    places = [place for place, value in enumerate(examples) if is_wrapper(value)]
    seen: dict[int, int] = {}

    def count(whole: Any) -> None:
        if not isinstance(whole, Tensor) or whole.is_inference():
            return
        if seen.get(id(whole)) != version_of(whole):
            seen[id(whole)] = version_of(whole)
            for part in parts_of(whole):
                if not part.is_inference():
                    increment_version(part)

    @wraps(compiled)
    def call(*args: Any) -> Any:
        for place in places:
            count(args[place])
        return compiled(*args)

    return call if places else compiled


def plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors, in place of each wrapper those inside."""
    for tensor in tensors:
        yield from parts_of(tensor)


def place(value: object) -> object:
    """Where a tensor lies and how; a number is itself."""
    if not isinstance(value, Tensor):
        return value
    return (
        storage_id(value),
        value.storage_offset(),
        tuple(value.shape),
        value.stride(),
        value.dtype,
    )


class Source:
    """A tensor as it was when a weight was packed of it.

    storage, pointer   its memory; while the weak reference stands, no other storage has this
                       identity
    version            its version counter; None for memory that the packed weight shares, and
                       without a counter
    content            fingerprints of its shares, int64 [shares], none where they are not compared
    """

    def __init__(self, tensor: Tensor, packed: Tensor, updates: str) -> None:
        self.weak = StorageWeakRef(tensor.untyped_storage())
        self.storage, self.pointer = storage_id(tensor), tensor.data_ptr()
        shares = self.storage == storage_id(packed)  # one memory: every change is seen by both
        self.version = None if shares or tensor.is_inference() else version_of(tensor)
        reads = not shares and updates != "counted"
        self.content = (
            fingerprint(tensor) if reads else torch.empty(0, dtype=torch.int64, device="cpu")
        )

    def is_still(self, tensor: Tensor, updates: str) -> bool:
        """Whether a tensor at the same place holds the same. (A storage that is freed and allocated
        again may move.)

        ``updates`` as in Config: content is compared for "every call" alone.
        """
        counted = self.version is None or (
            not tensor.is_inference() and self.version == version_of(tensor)
        )
        return (tensor.data_ptr() == self.pointer and counted) and (
            updates != "every call"
            or not len(self.content)
            or torch.equal(self.content, fingerprint(tensor))
        )
