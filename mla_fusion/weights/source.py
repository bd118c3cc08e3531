"""Remembers a tensor as it was when a weight was packed of it, and shows that it has changed.

A change leaves one of these traces, or none:

* other memory (``weight.data = other``, a swap, a move): another address or layout
* an operation that torch counts (``weight.copy_(..)`` under no_grad): the version counter
* none: ``weight.data.add_(..)``, a fused optimizer, any change of a tensor made under
  ``inference_mode``, and of memory that is reached by another tensor, such as a flat buffer. Only
  the content shows it.

Nothing here refers to the tensor itself: ``torch.utils.swap_tensors`` refuses tensors that have
weak references.
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
    """A tensor cut along its first axis into runs of a limited number of bytes, or of one row."""

    def __init__(self, tensor: Tensor) -> None:
        self.rows = _rows(tensor.detach())
        length = self.rows.shape[0]
        row = self.rows.nbytes // length if length else 0
        self.size = max(1, SHARES.get(tensor.device.type, SHARE_OF_OTHERS) // max(row, 1))
        self.count = -(-length // self.size) if row else 0

    def fingerprint(self, number: int) -> Tensor:
        """Returns the fingerprint of share ``number``: int64 without axes, on the tensor's device.
        Nothing waits for it.
        """
        first = number * self.size
        return _hash(self.rows[first : first + self.size])


def fingerprint(tensor: Tensor) -> Tensor:
    """Returns the fingerprints of all shares of a tensor: int64 [shares], on its device."""
    with torch.no_grad():
        shares = Shares(tensor)
        if not shares.count:
            return torch.empty(0, dtype=torch.int64, device=tensor.device)
        return torch.stack([shares.fingerprint(number) for number in range(shares.count)])


def _rows(tensor: Tensor) -> Tensor:
    """Returns the same elements in the order of memory, on one axis if they are dense."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    ordered = tensor.permute(order)
    return ordered.reshape(-1) if ordered.is_contiguous() else ordered


def _hash(piece: Tensor) -> Tensor:
    """Returns a multilinear hash: columns are added up, multiplied by random 64-bit keys and added
    modulo 2^64.

    The upper half of each lane is added up separately too, because in sums modulo 2^64 two changes
    of a highest bit cancel.
    """
    lanes = _lanes(piece)
    keys = _keys(lanes.device)
    return (_columns(lanes) * keys[0] + _columns(lanes >> 32) * keys[1]).sum()


def _lanes(piece: Tensor) -> Tensor:
    """Returns the bits as int64 [lanes], padded with zeros."""
    flat = piece.reshape(-1).contiguous()
    begin = flat.storage_offset() * flat.element_size()
    if begin % _LANE == flat.nbytes % _LANE == 0:
        return flat.view(torch.int64)
    return pad(flat.view(torch.uint8), [0, -flat.nbytes % _LANE]).view(torch.int64)


def _columns(lanes: Tensor) -> Tensor:
    """Returns the sums of columns, int64 [_COLUMNS], of lanes written row by row."""
    full = len(lanes) // _COLUMNS * _COLUMNS
    total = lanes[:full].view(-1, _COLUMNS).sum(0)
    total[: len(lanes) - full] += lanes[full:]
    return total


@kept_outside_modes(64)
def _keys(device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    keys = torch.randint(
        -(2**63), 2**63 - 1, (2, _COLUMNS), generator=generator, dtype=torch.int64, device="cpu"
    )
    return keys.to(device)


def counting(compiled: Callable[..., Any], examples: Sequence[Any]) -> Callable[..., Any]:
    """Returns ``compiled``, before which changes of wrappers count as changes of their parts.

    examples  arguments that are wrappers where those of a call are
    """
    places = [place for place, value in enumerate(examples) if is_wrapper(value)]
    versions: dict[int, int] = {}

    @wraps(compiled)
    def call(*args: Any) -> Any:
        for wrapper in map(args.__getitem__, places):
            if not isinstance(wrapper, Tensor) or wrapper.is_inference():
                continue
            if versions.get(id(wrapper)) != version_of(wrapper):
                versions[id(wrapper)] = version_of(wrapper)
                for part in parts_of(wrapper):
                    if not part.is_inference():
                        increment_version(part)
        return compiled(*args)

    return call if places else compiled


def plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields the tensors, and in place of each wrapper its parts."""
    for tensor in tensors:
        yield from parts_of(tensor)


def place(value: object) -> object:
    """Returns where a tensor lies, and how. A number is returned as it is."""
    if not isinstance(value, Tensor):
        return value
    form = value.shape, value.stride(), value.dtype
    return storage_id(value), value.storage_offset(), *form


class Source:
    """A tensor as it was when a weight was packed of it.

    storage, pointer   its memory; while the weak reference is alive, no other storage has this
                       identity
    version            its version counter; None if it has none, or if the packed weight shares its
                       memory
    content            fingerprints of its shares, int64 [shares]; empty if they are not compared
    """

    def __init__(self, tensor: Tensor, packed: Tensor, updates: str) -> None:
        self.weak = StorageWeakRef(tensor.untyped_storage())
        self.storage, self.pointer = storage_id(tensor), tensor.data_ptr()
        is_shared = self.storage == storage_id(packed)  # a change is one of the packed weight too
        self.version = None if is_shared or tensor.is_inference() else version_of(tensor)
        self.content = torch.empty(0, dtype=torch.int64, device="cpu")
        if not is_shared and updates != "counted":
            self.content = fingerprint(tensor)

    def is_still(self, tensor: Tensor, compares: bool) -> bool:
        """Returns True if a tensor at the same place is unchanged.

        A storage that is freed and allocated again may move, so the address is compared too.

        compares  compares the content as well, if it was remembered
        """
        if tensor.data_ptr() != self.pointer:
            return False
        if self.version is not None and (
            tensor.is_inference() or self.version != version_of(tensor)
        ):
            return False
        has_content = compares and len(self.content)
        return not has_content or torch.equal(self.content, fingerprint(tensor))
