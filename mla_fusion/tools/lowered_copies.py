"""Is a cache written in place in the graph as it was lowered, or copied as a whole at every step?

The pass emits a functional call and ``copy_``; torchair turns the two into one call that writes in
place, where it can: not where its options forbid that, nor where nodes between the two run on
another stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch.fx import Graph, Node

from mla_fusion.fx.kinds import is_getitem, op_name
from mla_fusion.meta.prolog import CACHES, V3, V3_FUNCTIONAL
from mla_fusion.report.report import Report

_CALL = f"npu::{V3.name}"
_CACHES = tuple(map(V3_FUNCTIONAL.results.index, CACHES))  # results that are the caches


def correct(report: Report, lowered: Graph) -> None:
    """Say of each fusion whose cache is still copied in ``lowered`` that it is, in place of "in
    place".
    """
    calls = [node for node in lowered.nodes if op_name(node).startswith(_CALL)]
    if len(calls) != len(report.fused):
        # calls of the model's own stand between those of the pass: nothing can be said of one
        return
    for place, (fusion, call) in enumerate(zip(report.fused, calls, strict=True)):
        copied = sorted(node.name for node in _copied(call))
        if copied and fusion.placement == "in place":
            said = (
                f"written by the kernel, copied by copy_: the whole of {', '.join(copied)} at "
                "every step"
            )
            report.fused[place] = replace(fusion, placement=said)


def _copied(call: Node) -> Iterator[Node]:
    """Inputs into which a cache that the call gives out is copied."""
    for result in call.users:
        if (
            op_name(call).endswith("_functional")
            and is_getitem(result)
            and result.args[1] in _CACHES
        ):
            for user in result.users:
                target = user.args[0]
                if (
                    op_name(user) == "aten::copy_"
                    and isinstance(target, Node)
                    and target is not result
                ):
                    yield target
