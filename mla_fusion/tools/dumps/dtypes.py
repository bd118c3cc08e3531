"""Names of dtypes: GE's, as in protobuf text and as numbers in generated Python, and torch.fx's
short forms.
"""

from __future__ import annotations

GE_NUMBERS = {
    0: "DT_FLOAT", 1: "DT_FLOAT16", 2: "DT_INT8", 3: "DT_INT32", 4: "DT_UINT8", 6: "DT_INT16",
    7: "DT_UINT16",
    8: "DT_UINT32", 9: "DT_INT64", 10: "DT_UINT64", 11: "DT_DOUBLE", 12: "DT_BOOL",
    16: "DT_COMPLEX64",
    17: "DT_COMPLEX128", 27: "DT_BF16", 29: "DT_INT4", 30: "DT_UINT1", 33: "DT_COMPLEX32",
    34: "DT_HIFLOAT8",
    35: "DT_FLOAT8_E5M2", 36: "DT_FLOAT8_E4M3FN", 37: "DT_FLOAT8_E8M0", 40: "DT_FLOAT4_E2M1",
}  # fmt: skip

GE = {
    "DT_FLOAT": "float32", "DT_FLOAT16": "float16", "DT_INT8": "int8", "DT_INT32": "int32",
    "DT_UINT8": "uint8",
    "DT_INT16": "int16", "DT_UINT16": "uint16", "DT_UINT32": "uint32", "DT_INT64": "int64",
    "DT_UINT64": "uint64",
    "DT_DOUBLE": "float64", "DT_BOOL": "bool", "DT_COMPLEX64": "complex64",
    "DT_COMPLEX128": "complex128",
    "DT_BF16": "bfloat16", "DT_INT4": "int4", "DT_UINT1": "uint1", "DT_COMPLEX32": "complex32",
    "DT_HIFLOAT8": "hifloat8", "DT_FLOAT8_E5M2": "float8_e5m2", "DT_FLOAT8_E4M3FN": "float8_e4m3fn",
    "DT_FLOAT8_E8M0": "float8_e8m0fnu", "DT_FLOAT4_E2M1": "float4_e2m1fn_x2",
}  # fmt: skip

FX = {
    "bf16": "bfloat16", "f64": "float64", "f32": "float32", "f16": "float16", "c32": "complex32",
    "c64": "complex64",
    "c128": "complex128", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "b8": "bool", "u8": "uint8",
    "u16": "uint16", "u32": "uint32", "u64": "uint64", "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "f8e4m3fnuz": "float8_e4m3fnuz", "f8e5m2fnuz": "float8_e5m2fnuz", "f8e8m0fnu": "float8_e8m0fnu",
    "f4e2m1fnx2": "float4_e2m1fn_x2", "b1": "bits1x8", "b4": "bits4x2",
}  # fmt: skip


def from_ge(name: str) -> str:
    """torch's name of a GE dtype; GE's own, in small letters, where torch has none."""
    return GE.get(name, name.removeprefix("DT_").lower())


def from_number(number: int) -> str:
    """torch's name of a GE dtype given as a number, as ``dst_type`` holds it; "" for an unknown
    one.
    """
    return from_ge(GE_NUMBERS[number]) if number in GE_NUMBERS else ""


def to_ge(name: str) -> str:
    """GE's name of a dtype."""
    return _TO_GE.get(name, f"DT_{name.upper()}")


_TO_GE = {name: ge for ge, name in GE.items()}
