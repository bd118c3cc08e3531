"""Finds operators that no pass can look into, and says which of them hold an MLA prologue."""

from __future__ import annotations

from collections import Counter

from torch.fx import GraphModule

from mla_fusion.fx.kinds import check_graph_module, op_name

_TRANSPARENT = "aten prims npu air higher_order _c10d_functional c10d_functional inductor".split()
_PRODUCT_AND_WRITES = "the product with W_uk and, in older releases, the cache writes"

#: name -> what of the prologue is inside
KNOWN = {
    "vllm::mla_forward": "the whole attention, prologue included",
    "vllm::dsa_forward": "the whole attention, prologue included",
    "vllm::unified_mla_attention": _PRODUCT_AND_WRITES,
    "vllm::unified_mla_attention_with_output": _PRODUCT_AND_WRITES,
    "vllm::unified_mla_kv_cache_update": "the cache writes",
}


def opaque_operators(gm: GraphModule) -> Counter[str]:
    """Returns how often each operator outside of ATen and torch_npu is called, by schema name.

    Raises TypeError for what is no graph.
    """
    check_graph_module(gm)
    names = filter(None, map(op_name, gm.graph.nodes))
    return Counter(name for name in names if name.partition("::")[0] not in _TRANSPARENT)


def hidden_prologues(gm: GraphModule) -> list[str]:
    """Returns one line for each known operator in the graph that hides a prologue: its name, count
    and what is inside.
    """
    return [
        f"{count} x {name} holds {KNOWN[name]}"
        for name, count in opaque_operators(gm).items()
        if name in KNOWN
    ]
