"""The one-byte formats of quantised products, and how npu operators beside the prologue name them.

What a format is in the prologue's own call is the weight_quant_mode of `mla_fusion.meta.spec`; here
stands by which dtypes and arguments ``npu_dynamic_quant``, ``npu_dynamic_mx_quant`` and
``npu_quant_matmul`` say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from mla_fusion.meta.spec import HIFLOAT8 as HIFLOAT8_NUMBER
from mla_fusion.meta.spec import WEIGHT_MODES

E8M0_NUMBER = 293  # torch_npu.float8_e8m0fnu; such tensors are uint8
BLOCK = 32  # elements along k that share an e8m0 scale


class NumberFormat(NamedTuple):
    """full: the weight_quant_mode in which all three projections have it; partial: in which W_uq_qr
    alone has.
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
        """A scale for every block along k, not one for each row or column."""
        return self.scale_dtype == torch.float8_e8m0fnu

    @property
    def number(self) -> int | None:
        """What the *_dtype arguments say of its tensors, where their dtype does not."""
        return HIFLOAT8_NUMBER if self.element == torch.uint8 else None

    @property
    def block_rounding(self) -> str:
        """The one round_mode of npu_dynamic_block_quant to it: of a tie hifloat8 takes the larger
        number.
        """
        return "round" if self.number else "rint"


INT8 = NumberFormat("int8", 2, 1)
MXFP8 = NumberFormat("mxfp8", 3)
FP8 = NumberFormat("fp8", 4)
HIFLOAT8 = NumberFormat("hifloat8", 5)
FORMATS = (INT8, MXFP8, FP8, HIFLOAT8)

# dst_type: torch's own number of a dtype, or torch_npu's
_OF_ROWS: Mapping[int | None, NumberFormat] = {
    None: INT8,
    1: INT8,
    24: FP8,
    292: FP8,
    HIFLOAT8_NUMBER: HIFLOAT8,
}
_OF_BLOCKS: Mapping[int | None, NumberFormat] = {24: MXFP8, 292: MXFP8}
IN_BLOCKS = ((1, 1, BLOCK), (0, 0, BLOCK))  # group_sizes


def of_dst_type(dst_type: int | None, in_blocks: bool = False) -> NumberFormat | None:
    """What npu_dynamic_quant, or npu_dynamic_mx_quant, quantises to; None: none of these
    formats.
    """
    return (_OF_BLOCKS if in_blocks else _OF_ROWS).get(dst_type)


def of_product(
    dtypes: Sequence[torch.dtype],
    numbers: Sequence[int | None] = (None, None),
    scales: Sequence[tuple[torch.dtype, int | None] | None] = (None, None),
    group_sizes: Sequence[int] | None = None,
) -> NumberFormat | None:
    """The format of npu_quant_matmul's operands; None: none of these.

    dtypes, numbers   of x1 and x2: their dtypes, and x1_dtype and x2_dtype
    scales            of the weight's and the tokens' scales, dtype and *_dtype argument; None:
                      absent
    """
    if len(set(dtypes)) > 1 or len(set(numbers)) > 1:
        return None
    grouped = tuple(group_sizes or ())
    of_blocks = {scale is not None and _is_e8m0(*scale) for scale in scales}
    if True in of_blocks:
        whole = of_blocks == {True} and grouped in IN_BLOCKS and numbers[0] is None
        return MXFP8 if whole and dtypes[0] == MXFP8.element else None
    known = (form for form in FORMATS if not form.in_blocks and not any(grouped))
    return next(
        (form for form in known if (form.element, form.number) == (dtypes[0], numbers[0])), None
    )


def _is_e8m0(dtype: torch.dtype, number: int | None) -> bool:
    return number == E8M0_NUMBER if number is not None else dtype == torch.float8_e8m0fnu
