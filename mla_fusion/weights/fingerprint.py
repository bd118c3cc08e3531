"""What a tensor holds, as a few numbers: equal for equal bits, and for others with a chance below 2^-32 alone.

Multilinear hashing: each row is read as 32-bit characters, multiplied by random 64-bit keys and summed modulo 2^64.
Integer sums do not depend on the order of their terms, so every processor and every number of threads agree.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_LANE = 8  # bytes of an int64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """Two int64 for each row of ``tensor`` [2 * rows], on its device; rows are those of its last axis.

    Any dtype of 1 to 8 bytes and any strides. Contiguous rows of whole 64-bit lanes are read where they lie; others are
    widened first, at several times the cost.
    """
    with torch.no_grad():
        lanes = _lanes(tensor.detach())
        keys = _keys(lanes.shape[1], lanes.device)
        high = lanes >> 32  # of a lane's two characters; the product of the lane itself then tells of the low one
        return torch.cat([_product(lanes, keys[0]), _product(high, keys[1])])


def _lanes(tensor: Tensor) -> Tensor:
    """The bits as int64 [rows, ..]."""
    width = tensor.shape[-1] if tensor.dim() else 1
    size = tensor.element_size()
    rows = tensor.reshape(-1, width) if width else tensor.new_empty(0, _LANE)
    whole = width * size % _LANE == 0 and rows.storage_offset() * size % _LANE == 0
    if whole and rows.is_contiguous():
        return rows.view(torch.int64)
    return rows.view(_INTEGERS[size]).to(torch.int64)


def _product(lanes: Tensor, keys: Tensor) -> Tensor:
    """``lanes @ keys`` modulo 2^64; a product of integer matrices is something that only a CPU has."""
    return lanes @ keys if lanes.device.type == "cpu" else (lanes * keys).sum(-1)


@lru_cache(maxsize=64)
def _keys(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(count)
    keys = torch.randint(-(2**63), 2**63 - 1, (2, count), generator=generator, device="cpu")
    return keys.to(device)
