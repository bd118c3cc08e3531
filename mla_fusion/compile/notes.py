"""What dynamo's graph tells and AOT autograd's does not: why a prologue may not be whole in it."""

from __future__ import annotations

import logging

from torch.fx import GraphModule

from mla_fusion.compat import broken_at

log = logging.getLogger("mla_fusion")
_WRITES_UNSAID = "npu_kv_rmsnorm_rope_cache"


_BROKEN = (
    "Dynamo broke the graph in pieces, of which this one ends at {}: parts of a prologue may stand "
    "in others. TORCH_LOGS=graph_breaks lists the breaks and their reasons, "
    "torch.compile(.., fullgraph=True) raises at the first"
)
_DROPPED = (
    "nothing reads the results of {0} ({1}), whose schema does not say that it writes the caches: "
    "AOT autograd drops the call, and they are not written. Read the caches that it returns, or "
    "call {0}_v2"
)


def of(gm: GraphModule) -> tuple[str, ...]:
    """A sentence or two for each; logged too, where the model computes something else for it."""
    found = []
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
        if name == _WRITES_UNSAID and not node.users:
            found.append(_DROPPED.format(name, node.name))
            log.warning(found[-1])
    place = broken_at(gm)
    return (*found, *([_BROKEN.format(place)] if place else ()))
