"""Found against wanted, output by output, with a tolerance for each dtype.

The kernel sums its products in another order than a CPU does. A sum that lies on the edge between
two bfloat16 or int8 values may then round the other way, and what is computed from it moves a
little: a step in a few elements is expected, two steps or many elements are not. The tolerances
follow op_semantics (section 7).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_fusion.paging.tiles import unpack_rows
from mla_fusion.reference import hifloat8


@dataclass(frozen=True)
class Tolerance:
    """``steps``: how far a code may be off (8-bit dtypes); ``relative``: of the value, and a
    quarter of that of the largest value in its row (wider floats). ``share``: of the elements that
    may be off at all (8-bit), or off by more than ``relative`` (floats).
    """

    share: float
    steps: int = 0
    relative: float = 0.0


TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.bfloat16: Tolerance(share=0.005, relative=2**-7),
    torch.float16: Tolerance(share=0.005, relative=2**-9),
    torch.float32: Tolerance(share=0.0, relative=1e-3),
    torch.float8_e8m0fnu: Tolerance(share=0.03, steps=1),
    torch.float8_e4m3fn: Tolerance(share=0.03, steps=1),
    torch.uint8: Tolerance(share=0.03, steps=1),  # hifloat8
    torch.int8: Tolerance(share=0.03, steps=1),
}
EXACT = Tolerance(share=0.0)


@dataclass(frozen=True)
class Comparison:
    """One output: the largest difference (in steps of its dtype, or relative to the row's largest
    value), and the share of elements outside the tolerance. ``problem`` is empty where it passed.
    """

    output: str
    dtype: str
    shape: tuple[int, ...]
    largest: float
    differing: float
    problem: str = ""


def compare(output: str, found: Tensor, wanted: Tensor, *, exact: bool = False) -> Comparison:
    """``found`` against ``wanted``, both on the CPU; ``exact`` asks for the same bits."""
    dtype = str(wanted.dtype).removeprefix("torch.")

    def result(largest: float, differing: float, problem: str = "") -> Comparison:
        return Comparison(output, dtype, tuple(wanted.shape), largest, differing, problem)

    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        kind = str(found.dtype).removeprefix("torch.")
        return result(
            float("nan"),
            1.0,
            f"is {kind} {list(found.shape)}, expected {dtype} {list(wanted.shape)}",
        )
    if wanted.numel() == 0:
        return result(0.0, 0.0)
    tolerance = EXACT if exact else TOLERANCES[wanted.dtype]
    narrow = wanted.element_size() == 1
    distance = _steps(found, wanted) if narrow else _relative(found, wanted)
    limit = 0.0 if narrow or exact else tolerance.relative
    differing = float((~(distance <= limit)).double().mean())  # a NaN differs
    largest = float(distance.max())
    if differing > tolerance.share:
        return result(
            largest,
            differing,
            f"{differing:.2%} of the elements differ, allowed {tolerance.share:.2%}",
        )
    if narrow and largest > tolerance.steps:
        return result(largest, differing, f"off by {largest:.0f} codes, allowed {tolerance.steps}")
    return result(largest, differing)


def parts(
    output: str, rows: Tensor, *, per_tile: bool, dims: Mapping[str, int], tile: int
) -> dict[str, Tensor]:
    """A cache as what it holds: itself, or latent, rope part and scales of its packed rows."""
    if not per_tile:
        return {output: rows}
    ckv, kr, scale = unpack_rows(rows, hckv=dims["Hckv"], dr=dims["Dr"], tile=tile)
    return {f"{output}.ckv": ckv, f"{output}.kr": kr, f"{output}.scale": scale}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits; NaNs with the same bits are the same."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return (
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if a.numel()
        else True
    )


def _steps(found: Tensor, wanted: Tensor) -> Tensor:
    """How many representable values lie between two tensors of an 8-bit dtype."""
    if wanted.dtype == torch.int8:
        return (found.int() - wanted.int()).abs()
    codes = torch.arange(256, dtype=torch.uint8)
    values = (
        hifloat8.decode(codes) if wanted.dtype == torch.uint8 else codes.view(wanted.dtype).float()
    )
    values = values.nan_to_num(float("inf"), float("inf"), float("-inf"))
    rank = torch.unique(values, return_inverse=True)[1]  # -0 and 0 are one value
    first, second = (
        rank[tensor.contiguous().view(torch.uint8).long()] for tensor in (found, wanted)
    )
    return (first - second).abs()


def _relative(found: Tensor, wanted: Tensor) -> Tensor:
    """|found - wanted| over the larger of |wanted| and a quarter of its row's largest value."""
    row = (
        wanted.double().abs().amax(-1, keepdim=True) / 4 if wanted.dim() else wanted.double().abs()
    )
    scale = torch.maximum(wanted.double().abs(), row)
    difference = (found.double() - wanted.double()).abs()
    return torch.where(difference == 0, difference, difference / scale)
