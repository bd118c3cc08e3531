"""npu_kv_rmsnorm_rope_cache (v1, v2): norm, rotation and both cache writes of the key side in one
operator.

Argument order of the operator: cos before sin, rope cache before latent cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from mla_fusion.fx.kinds import argument, word
from mla_fusion.fx.view import View
from mla_fusion.meta import number_formats
from mla_fusion.meta.number_formats import INT8, NumberFormat
from mla_fusion.operators.known import calls_of, dtype_of

_RESULTS = {  # operator -> index of (k_pe, c_kv, kr_cache, kv_cache) among its results
    "npu_kv_rmsnorm_rope_cache": (2, 3, 0, 1),
    "npu_kv_rmsnorm_rope_cache_v2_functional": (0, 1, 2, 3),
}

_KERNEL_MODE = {"PA": "PA_BSND", "PA_BNSD": "PA_BSND", "PA_NZ": "PA_NZ"}

# its first arguments, in order
_TENSORS = ("latent", "gamma", "cos", "sin", "index", "kr_cache", "kv_cache")


@dataclass(frozen=True, kw_only=True)
class KvOperatorFact:
    """One such node. ``hidden_write`` (v1): the caches change though the schema does not say so.

    gives_rows           are the new rows among its results (``is_output_kv``)?
    kv_scale, kr_scale   multiplied onto the rows before they are rounded to a format of one byte;
                         None: rows are cast
    other                an argument that the kernel has no counterpart of (an offset, a separate
                         v), or None
    """

    node: Node
    latent: Node
    gamma: Node
    cos: Node
    sin: Node
    index: Node
    kr_cache: Node
    kv_cache: Node
    eps: float
    cache_mode: str | None
    results: tuple[int, int, int, int]
    hidden_write: bool
    gives_rows: bool
    kv_scale: Node | None
    kr_scale: Node | None
    other: str | None
    kv_format: NumberFormat | None = INT8
    kr_format: NumberFormat | None = INT8


def is_one(node: Node) -> bool:
    """Is the node such an operator, whatever its arguments are?"""
    return word(node) in _RESULTS


def find(view: View) -> list[KvOperatorFact]:
    found = []
    for node in calls_of(view.gm.graph, _RESULTS):
        name = word(node)
        tensors = dict(zip(_TENSORS, node.args, strict=False))
        if not all(isinstance(tensors.get(name), Node) for name in _TENSORS):
            continue
        foreign = ("k_rope_offset", "c_kv_offset", "v")
        found.append(
            KvOperatorFact(
                node=node,
                **tensors,  # type: ignore[arg-type]
                eps=float(argument(node, "epsilon", 1e-5)),
                cache_mode=_KERNEL_MODE.get(argument(node, "cache_mode", "Norm")),
                results=_RESULTS[name],
                hidden_write=name.endswith("cache"),
                gives_rows=bool(argument(node, "is_output_kv", False)),
                kv_scale=argument(node, "c_kv_scale"),
                kr_scale=argument(node, "k_rope_scale"),
                other=next((name for name in foreign if argument(node, name) is not None), None),
                kv_format=_format(tensors["kv_cache"], argument(node, "ckv_cache_dtype")),
                kr_format=_format(tensors["kr_cache"], argument(node, "k_cache_dtype")),
            )
        )
    return found


def _format(cache: Any, number: int | None) -> NumberFormat | None:
    """What the cache's rows are rounded to where a scale is given; None: none of the known
    formats.
    """
    dtype = dtype_of(cache)
    return number_formats.of_product((dtype,), (number,))
