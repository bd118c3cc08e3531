"""What a tensor holds, as one number for each share of its bytes.

Equal bits give equal numbers; other bits do but for a chance below 2^-31. Integer sums do not
depend on the order of their terms, so every processor and every number of threads agree.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

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
        return _hash(self.rows.narrow(0, number * self.size, self._length(number)))

    def _length(self, number: int) -> int:
        return min(self.size, self.rows.shape[0] - number * self.size)


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
    size = flat.element_size()
    aligned = flat.storage_offset() * size % _LANE == 0
    if aligned and flat.numel() * size % _LANE == 0:
        return flat.view(torch.int64)
    count = flat.numel() * size
    return pad(flat.view(torch.uint8), [0, -count % _LANE]).view(torch.int64)


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
