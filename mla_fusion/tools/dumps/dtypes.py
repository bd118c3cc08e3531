"""Names of dtypes: GE's, as in protobuf text and as numbers in generated Python, and torch.fx's
short forms.
"""

from __future__ import annotations

from torch.fx.graph import dtype_abbrs

_ROWS = [
    row.split()
    for row in """
    0   DT_FLOAT          float32
    1   DT_FLOAT16        float16
    2   DT_INT8           int8
    3   DT_INT32          int32
    4   DT_UINT8          uint8
    6   DT_INT16          int16
    7   DT_UINT16         uint16
    8   DT_UINT32         uint32
    9   DT_INT64          int64
    10  DT_UINT64         uint64
    11  DT_DOUBLE         float64
    12  DT_BOOL           bool
    16  DT_COMPLEX64      complex64
    17  DT_COMPLEX128     complex128
    27  DT_BF16           bfloat16
    29  DT_INT4           int4
    30  DT_UINT1          uint1
    33  DT_COMPLEX32      complex32
    34  DT_HIFLOAT8       hifloat8
    35  DT_FLOAT8_E5M2    float8_e5m2
    36  DT_FLOAT8_E4M3FN  float8_e4m3fn
    37  DT_FLOAT8_E8M0    float8_e8m0fnu
    40  DT_FLOAT4_E2M1    float4_e2m1fn_x2
    """.strip().splitlines()
]
_OF_NUMBER = {int(number): name for number, _, name in _ROWS}
_OF_GE = {ge: name for _, ge, name in _ROWS}
FX = {short: str(dtype).removeprefix("torch.") for dtype, short in dtype_abbrs.items()}


def from_ge(name: str) -> str:
    """torch's name of a GE dtype; GE's own, in small letters, where torch has none."""
    return _OF_GE.get(name, name.removeprefix("DT_").lower())


def from_number(number: object) -> str:
    """torch's name of a GE dtype given as a number, as ``dst_type`` holds it; "" for an unknown
    one.
    """
    return _OF_NUMBER.get(number, "") if isinstance(number, int) else ""
