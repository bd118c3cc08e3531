"""What a graph without a prologue has of one: what the parts are, and how many products, norms and
writes there are.
"""

from __future__ import annotations

from collections import Counter

from torch.fx import Node

from mla_fusion.facts.cache_write import input_behind
from mla_fusion.fx import registered
from mla_fusion.fx.kinds import is_writer, op_name, word
from mla_fusion.match.finder import Finder

_ROOTS = frozenset(("rsqrt", "sqrt", "rms_norm", "_fused_rms_norm", "npu_rms_norm"))


def lines(finder: Finder) -> tuple[str, ...]:
    """For the report. Counted alone: nothing is probed, so that a graph of another kind costs
    nothing.
    """
    view, flat = finder.view, [item for item in finder.projections if item.is_flat]
    if flat and all(0 in view.binding.shape_of(item.origin) for item in flat):
        return (
            "no tokens in this graph: it was compiled for a call with none, which needs no fusion",
        )
    of_one = Counter(view.number(item.origin) for item in flat)
    pairs = sum(count > 1 for count in of_one.values())
    by_head = len(finder.projections) - len(flat)
    norms = sum(word(node) in _ROOTS for node in view.nodes)
    writes = sum(is_writer(node) and _writes_input(node) for node in view.nodes)
    unknown = ", ".join(registered.unknown(view.nodes))
    unused = {op_name(node): why for node in view.nodes if (why := registered.unused(node))}
    return (
        "no MLA prologue in this graph. The parts of one, and how many the graph has:",
        f"  products with weights (W_dq, W_dkv_kr, W_uq_qr): {len(flat)}",
        f"  values that more than one weight multiplies, as W_dq and W_dkv_kr multiply x: {pairs}",
        f"  norms (RMSNorm of c_q and of c_kv): {norms}",
        f"  products head by head (W_uk): {by_head}",
        f"  writes into inputs (both caches): {writes}",
        *(
            [
                f"  operators that the pass does not know: {unknown}. mf.register_operator tells "
                "it what one computes that writes into no argument"
            ]
            if unknown
            else ()
        ),
        *(f"  {name} is not known: {why}" for name, why in unused.items()),
    )


def _writes_input(node: Node) -> bool:
    target = node.args[0] if node.args else None
    return isinstance(target, Node) and input_behind(target) is not None
