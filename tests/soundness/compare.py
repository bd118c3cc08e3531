"""Are two runs the same? By output and row; bfloat16 may err as measured against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Two bfloat16 runs of one prologue differ by 3e-3 to 8e-3. Beyond these limits a float64 run
# decides.
WHOLE, ROW = 2e-2, 3e-2
SLACK, ROUNDING = 2.0, 8e-3
FLOOR = 1e-3  # of a tensor's typical row: what a row of next to nothing is measured by


@dataclass(frozen=True)
class Witness:
    """Asked only where two runs differ: the same values in float64, and unfused on inputs one
    rounding away.

    A step that rounds, sorts or compares may go either way at a border, in the unfused run as in
    the fused one.
    """

    exact: Callable[[], Sequence[Tensor]]
    nudged: Callable[[], Sequence[Sequence[Tensor]]]


def differs(got: Sequence[Tensor], want: Sequence[Tensor], witness: Witness | None = None) -> str:
    """What is different, or ""."""
    if len(got) != len(want):
        return f"{len(got)} values instead of {len(want)}"
    for index, (new, old) in enumerate(zip(got, want, strict=True)):
        wrong = _different(new, old)
        if wrong and not _excused(index, new, old, witness):
            return f"value {index}: {wrong}"
    return ""


def _different(got: Tensor, want: Tensor) -> str:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}"
    if not want.numel() or torch.equal(got, want):
        return ""
    if not (want.is_floating_point() or want.is_complex()):
        return "integers differ"
    error, whole = errors(got, want)
    if not whole <= WHOLE:
        return f"relative error {whole:.2e}"
    worst = int(error.argmax())
    largest = float(error[worst])
    return "" if largest <= ROW else f"row {worst} of {len(error)}: relative error {largest:.2e}"


def errors(got: Tensor, want: Tensor) -> tuple[Tensor, float]:
    """Relative L2 error of each row (next to nothing: by the typical row), and of the whole."""
    new, old = _rows(got), _rows(want)
    touched = (new != old).any(-1).nonzero().squeeze(-1)
    norms = _finite(old, old).float().norm(dim=-1).double()
    floor = max(FLOOR * float(norms.square().mean().sqrt()), 1e-30)
    difference = torch.zeros(len(old), dtype=torch.double)
    if len(touched):
        some = (
            _finite(new[touched], old[touched]).double()
            - _finite(old[touched], old[touched]).double()
        )
        difference[touched] = some.norm(dim=-1)
    error = (difference / norms.clamp(min=floor)).nan_to_num(nan=torch.inf)
    whole = float(difference.norm()) / max(float(norms.norm()), 1e-30)
    return error, whole


def _finite(rows: Tensor, like: Tensor) -> Tensor:
    """Where ``like`` is not finite: 0 for the same, NaN for another number."""
    if bool(torch.isfinite(like.sum())):
        return rows
    odd = ~torch.isfinite(like)
    same = (rows == like) | (rows.isnan() & like.isnan())
    return torch.where(odd, torch.where(same, 0.0, torch.nan).to(rows.dtype), rows)


def _rows(tensor: Tensor) -> Tensor:
    wide = torch.view_as_real(tensor).flatten(-2) if tensor.is_complex() else tensor
    return wide.reshape(-1, wide.shape[-1]) if wide.dim() else wide.reshape(1, 1)


def _excused(index: int, got: Tensor, want: Tensor, witness: Witness | None) -> bool:
    """Is each row as near to float64 as the unfused one, or one a rounding of x changes as much?"""
    if witness is None or got.shape != want.shape or got.dtype != want.dtype:
        return False
    if _is_as_exact(index, got, want, witness):
        return True
    error, usual = errors(got, want)[0], torch.zeros(())
    odd, flips = _odd(want), False
    for run in witness.nudged():
        usual = torch.maximum(usual, errors(run[index], want)[0])
        flips = flips or bool((_odd(run[index]) != odd).any())
    if flips:  # which rows overflow, or have no logarithm, a rounding decides
        error = error.masked_fill((_odd(got) | odd).any(-1), 0.0)
    return bool((error <= SLACK * usual + ROUNDING).all())


def _odd(tensor: Tensor) -> Tensor:
    return ~torch.isfinite(_rows(tensor))


def _is_as_exact(index: int, got: Tensor, want: Tensor, witness: Witness) -> bool:
    try:
        exact = witness.exact()[index]
    except Exception:  # not everything runs in float64
        return False
    if exact.shape != got.shape or not bool(
        torch.isfinite(exact).all() and torch.isfinite(got).all()
    ):
        return False
    error, usual = errors(got, exact)[0], errors(want, exact)[0]
    return bool((error <= SLACK * usual + ROUNDING).all())
