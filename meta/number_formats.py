"""Lists the one-byte formats of quantised products, and their names in npu operators beside the
prologue.

The prologue names a format by the weight_quant_mode of `mla_fusion.meta.spec`. The operators
``npu_dynamic_quant``, ``npu_dynamic_mx_quant`` and ``npu_quant_matmul`` name it by the dtypes and
arguments of these tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from mla_fusion.meta.spec import HIFLOAT8 as HIFLOAT8_NUMBER
from mla_fusion.meta.spec import WEIGHT_MODES

E8M0_NUMBER = 293  # torch_npu.float8_e8m0fnu; such tensors are uint8
BLOCK = 32  # elements along k that share an e8m0 scale


class NumberFormat(NamedTuple):
    """A format.

    full     the weight_quant_mode in which all three projections have the format
    partial  the weight_quant_mode in which only W_uq_qr has it
    """

    name: str
    full: int
    partial: int | None = None

    @property
    def element(self) -> torch.dtype:
        dtype = WEIGHT_MODES[self.full].element
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def scale_dtype(self) -> torch.dtype:
        return WEIGHT_MODES[self.full].scale_dtype

    @property
    def in_blocks(self) -> bool:
        """Returns True if every block along k has a scale, and not each row or column."""
        return self.scale_dtype == torch.float8_e8m0fnu

    @property
    def number(self) -> int | None:
        """Returns the number for the *_dtype arguments, or None if the torch dtype suffices."""
        return HIFLOAT8_NUMBER if self.element == torch.uint8 else None

    @property
    def block_rounding(self) -> str:
        """Returns the only round_mode of npu_dynamic_block_quant for the format."""
        return "round" if self.number else "rint"


INT8 = NumberFormat("int8", 2, 1)
MXFP8 = NumberFormat("mxfp8", 3)
FP8 = NumberFormat("fp8", 4)
HIFLOAT8 = NumberFormat("hifloat8", 5)
FORMATS = (INT8, MXFP8, FP8, HIFLOAT8)

# dst_type: torch's own number of a dtype, or torch_npu's
_BY_DST_TYPE = {None: INT8, 1: INT8, 24: FP8, 292: FP8, HIFLOAT8_NUMBER: HIFLOAT8}
IN_BLOCKS = ((1, 1, BLOCK), (0, 0, BLOCK))  # group_sizes


def of_dst_type(dst_type: int | None, in_blocks: bool = False) -> NumberFormat | None:
    """Returns the format to which npu_dynamic_quant, or npu_dynamic_mx_quant, quantises, or None
    for others.
    """
    form = _BY_DST_TYPE.get(dst_type)
    if in_blocks:
        return MXFP8 if form is FP8 else None
    return form


def of_product(
    dtypes: Sequence[torch.dtype],
    numbers: Sequence[int | None],
    scales: Sequence[tuple[torch.dtype, int | None] | None] = (None, None),
    group_sizes: Sequence[int] | None = None,
) -> NumberFormat | None:
    """Returns the format of npu_quant_matmul's operands, or None for others.

    dtypes   the dtypes of x1 and x2
    numbers  x1_dtype and x2_dtype
    scales   dtype and *_dtype argument of the weight's and the tokens' scales, None without a scale
    """
    if len(set(dtypes)) > 1 or len(set(numbers)) > 1:
        return None
    groups = tuple(group_sizes or ())
    are_e8m0 = {scale is not None and _is_e8m0(*scale) for scale in scales}
    in_blocks = are_e8m0 == {True} and groups in IN_BLOCKS
    if not in_blocks and (True in are_e8m0 or any(groups)):
        return None
    for form in FORMATS:
        if (form.element, form.number, form.in_blocks) == (dtypes[0], numbers[0], in_blocks):
            return form
    return None


def _is_e8m0(dtype: torch.dtype, number: int | None) -> bool:
    """Returns True if a scale is a power of two."""
    return number == E8M0_NUMBER if number is not None else dtype == torch.float8_e8m0fnu
