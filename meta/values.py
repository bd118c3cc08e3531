"""What the device does not check and silently corrupts: the contents of cache_index and
actual_seq_len.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.spec import SCATTER
from torch import Tensor

from mla_fusion.compat import FakeTensor


def check_values(op: str, arguments: Mapping[str, Any], dims: Mapping[str, Any]) -> None:
    """Raise ContractError for an index past the cache, a repeated one, or lengths that are not
    prefix sums.

    cache_index: slots below BlockNum*BlockSize (PA_BSND, PA_NZ) or blocks below BlockNum
    (PA_BLK_*), each at most once; negative entries are skipped by the kernel and legal.
    actual_seq_len: inclusive prefix sums, that is non-decreasing from >= 0 and ending at T;
    cache_index then lists at least sum(ceil(S_i/BlockSize)) blocks. Codes:
    ``values.cache_index.range|duplicate|blocks``, ``values.actual_seq_len``, ``values.meta`` when a
    tensor holds no data.
    """

    def refuse(code: str, argument: str, expected: str, found: object) -> None:
        raise ContractError(f"values.{code}", argument, expected, str(found), dims, SCATTER, op)

    index, ends = arguments.get("cache_index"), arguments.get("actual_seq_len")
    for name, tensor in (("cache_index", index), ("actual_seq_len", ends)):
        if tensor is not None and not holds_data(tensor):
            refuse(
                "meta",
                name,
                "a tensor with data, to check its values",
                f"a {type(tensor).__name__} without",
            )
    if index is None:
        return
    blockwise = "BLK" in arguments["cache_mode"]
    block_num, block_size = arguments["kv_cache"].shape[:2]
    unit = "blocks below BlockNum" if blockwise else "slots below BlockNum*BlockSize"
    end = block_num if blockwise else block_num * block_size
    entries = index.reshape(-1)
    if blockwise and ends is not None:
        lengths = _lengths(ends)
        if len(lengths) == 0 or bool((lengths < 0).any()) or int(ends[-1]) != dims["T"]:
            refuse(
                "actual_seq_len",
                "actual_seq_len",
                f"inclusive prefix sums ending at T = {dims['T']}",
                ends.tolist(),
            )
        needed = int(((lengths + block_size - 1) // block_size).sum())
        if len(entries) < needed:
            refuse("cache_index.blocks", "cache_index", f"at least {needed} blocks", len(entries))
    written = entries[entries >= 0]
    if block_num == 0 or len(written) == 0:
        return
    if int(written.max()) >= end:
        refuse("cache_index.range", "cache_index", f"{unit} = {end}", int(written.max()))
    unique, counts = written.unique(return_counts=True)
    if len(unique) != len(written):
        repeated = unique[counts > 1]
        refuse(
            "cache_index.duplicate",
            "cache_index",
            "every entry at most once",
            f"{int(repeated[0])} repeated",
        )


def _lengths(ends: Tensor) -> Tensor:
    return torch.diff(ends.to(torch.int64), prepend=ends.new_zeros(1, dtype=torch.int64))


def holds_data(tensor: Tensor) -> bool:
    """Whether a tensor's elements can be read: it is neither meta nor fake."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))
