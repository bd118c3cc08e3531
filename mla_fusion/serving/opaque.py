"""Operators that no pass can look into, and which of them are known to hold an MLA prologue or a
part of it.
"""

from __future__ import annotations

from collections import Counter

from torch.fx import GraphModule

from mla_fusion.compat import OpOverload, schema_of
from mla_fusion.fx.kinds import called

_TRANSPARENT = frozenset(
    (
        "aten",
        "prims",
        "npu",
        "air",
        "higher_order",
        "_c10d_functional",
        "c10d_functional",
        "inductor",
    )
)

#: name -> what of the prologue is inside
KNOWN = {
    "vllm::mla_forward": "the whole attention, prologue included",
    "vllm::dsa_forward": "the whole attention, prologue included",
    "vllm::unified_mla_attention": "the product with W_uk and, in older releases, the cache writes",
    "vllm::unified_mla_attention_with_output": "the product with W_uk and, in older releases, the "
    "cache writes",
    "vllm::unified_mla_kv_cache_update": "the cache writes",
}


def opaque_operators(gm: GraphModule) -> Counter[str]:
    """How often each operator outside of ATen and torch_npu is called, by schema name."""
    return Counter(
        schema_of(operator).name
        for operator in map(called, gm.graph.nodes)
        if isinstance(operator, OpOverload) and operator.namespace not in _TRANSPARENT
    )


def hidden_prologues(gm: GraphModule) -> list[str]:
    """One line for each known operator in the graph that hides a prologue: its name, count and what
    is inside.
    """
    return [
        f"{count} x {name} holds {KNOWN[name]}"
        for name, count in opaque_operators(gm).items()
        if name in KNOWN
    ]
