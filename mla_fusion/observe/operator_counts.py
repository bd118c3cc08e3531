"""How often each operator is called in a graph."""

from __future__ import annotations

from collections import Counter
from inspect import isfunction

from torch.fx import GraphModule


def count_operators(gm: GraphModule) -> dict[str, int]:
    """How often each operator is called, the commonest first."""
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    # their hashes and names cost more than the counting
    by_identity = {id(target): target for target in targets}
    counts = Counter[str]()
    for identity, count in Counter(map(id, targets)).items():
        target = by_identity[identity]
        # str of a Python function has its address
        counts[target.__name__ if isfunction(target) else str(target)] += count
    return dict(counts.most_common())
