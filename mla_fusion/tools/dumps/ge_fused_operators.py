"""What GE's fused operators mean: norms, rotations, quantisation, writes of both caches; see
``ge_operators``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch

import mla_fusion.ops  # noqa: F401  # npu:: operators, where torch_npu has not defined them
from mla_fusion.tools.dumps import Operator, dtypes, names
from mla_fusion.tools.dumps.ge_values import OperatorReader, Unmapped

npu = torch.ops.npu
_INT8 = 2


def options(r: OperatorReader, op: Operator, names: Sequence[str], first: int) -> dict[str, Any]:
    """Optional arguments from place ``first`` on, by the names that torch_npu gives them."""
    return {name: r.node(op, place) for place, name in enumerate(names, first) if r.has(op, place)}


def torch_dtype(op: Operator, attribute: str, default: int | None = None) -> torch.dtype:
    """``default``: GE's number of the dtype where the attribute is left out."""
    stated = op.attributes.get(attribute, default)
    found = names.dtype(dtypes.from_number(stated) if isinstance(stated, int) else str(stated))
    if found is None:
        raise Unmapped
    return found


def _rms_norm(r: OperatorReader, op: Operator) -> Sequence[Any]:
    both = r.call(
        npu.npu_rms_norm.default, r.node(op, 0), r.node(op, 1), float(op.attributes["epsilon"])
    )
    return [r.call(getitem, both, index) for index in range(2)]


def _add_rms_norm(r: OperatorReader, op: Operator) -> Sequence[Any]:
    x1, x2, gamma = (r.node(op, place) for place in range(3))
    found = r.call(npu.npu_add_rms_norm.default, x1, x2, gamma, float(op.attributes["epsilon"]))
    return [r.call(getitem, found, index) for index in range(3)]


def _interleave_rope(r: OperatorReader, op: Operator) -> Sequence[Any]:
    return [r.call(npu.npu_interleave_rope.default, r.node(op, 0), r.node(op, 1), r.node(op, 2))]


def _rotary(r: OperatorReader, op: Operator) -> Sequence[Any]:
    mode = op.attributes.get("mode", 0)
    if mode not in (0, 1) or r.has(op, 3):
        raise Unmapped
    name = "half" if mode == 0 else "interleave"
    return [r.call(npu.npu_rotary_mul.default, r.node(op, 0), r.node(op, 1), r.node(op, 2), name)]


_KV_OPTIONS = ("k_rope_scale", "c_kv_scale", "k_rope_offset", "c_kv_offset", "v")


def _kv_rmsnorm_rope_cache(r: OperatorReader, op: Operator) -> Sequence[Any]:
    """GE returns the caches first, the functional operator of torch_npu last."""
    needed = [r.node(op, place) for place in range(7)]
    given = options(r, op, _KV_OPTIONS, 7)
    given |= {
        name: op.attributes[name]
        for name in ("cache_mode", "is_output_kv")
        if name in op.attributes
    }
    given["epsilon"] = float(op.attributes["epsilon"])
    found = r.call(npu.npu_kv_rmsnorm_rope_cache_v2_functional.default, *needed, **given)
    parts = [r.call(getitem, found, index) for index in (2, 3, 0, 1)]
    return [r.write(needed[5], parts[0]), r.write(needed[6], parts[1]), *parts[2:]]


def _dynamic_quant(r: OperatorReader, op: Operator) -> Sequence[Any]:
    if torch_dtype(op, "dst_type", _INT8) is not torch.int8:
        raise Unmapped
    given = options(r, op, ("smooth_scales", "group_index"), 1)
    both = r.call(npu.npu_dynamic_quant.default, r.node(op, 0), **given)
    return [r.call(getitem, both, index) for index in range(2)]


def _dynamic_quant_v2(r: OperatorReader, op: Operator) -> Sequence[Any]:
    """Its symmetric form, one scale a token, is ``DynamicQuant``; the others have no counterpart in
    the pass.
    """
    if (
        not op.attributes.get("is_symmetrical")
        or op.attributes.get("quant_mode", "pertoken") != "pertoken"
    ):
        return r.opaque(op)
    return [*_dynamic_quant(r, op), None]


def _quant_matmul(r: OperatorReader, op: Operator) -> Sequence[Any]:
    """GE's order: x1, x2, scale, offset, bias, pertoken_scale."""
    sides = [r.node(op, 0), r.node(op, 1)]
    for place, name in enumerate(("transpose_x1", "transpose_x2")):
        if op.attributes.get(name):
            sides[place] = r.call(torch.ops.aten.transpose.int, sides[place], -2, -1)
    given = options(r, op, ("offset", "bias", "pertoken_scale"), 3)
    found = r.call(
        npu.npu_quant_matmul.default,
        *sides,
        r.node(op, 2),
        **given,
        output_dtype=torch_dtype(op, "dtype"),
    )
    return [found]


def _scatter_pa(r: OperatorReader, op: Operator) -> Sequence[Any]:
    """GE's order: key, key_cache, slot_mapping, value, value_cache."""
    key, key_cache, slots, value, value_cache = (r.node(op, place) for place in range(5))
    given = options(r, op, ("compress_lens", "compress_seq_offsets", "seq_lens"), 5)
    if op.attributes.get("scatter_mode", "None") != "None":
        raise Unmapped
    mode = str(op.attributes.get("cache_mode", "Norm"))
    call = npu.npu_scatter_pa_kv_cache_functional.default
    both = r.call(call, key, value, key_cache, value_cache, slots, **given, cache_mode=mode)
    parts = [r.call(getitem, both, index) for index in range(2)]
    return [r.write(key_cache, parts[0]), r.write(value_cache, parts[1])]


TABLE: dict[str, Callable[[OperatorReader, Operator], Sequence[Any]]] = {
    "RmsNorm": _rms_norm,
    "AddRmsNorm": _add_rms_norm,
    "InterleaveRope": _interleave_rope,
    "RotaryMul": _rotary,
    "RotaryPositionEmbedding": _rotary,
    "KvRmsNormRopeCache": _kv_rmsnorm_rope_cache,
    "DynamicQuant": _dynamic_quant,
    "DynamicQuantV2": _dynamic_quant_v2,
    "QuantBatchMatmulV3": _quant_matmul,
    "ScatterPaKvCache": _scatter_pa,
}
