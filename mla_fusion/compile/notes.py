"""What dynamo's graph tells and AOT autograd's does not: why a prologue may not be whole in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch.fx import GraphModule

from mla_fusion.compat import broken_at

log = logging.getLogger("mla_fusion")
_WRITES_UNSAID = "npu_kv_rmsnorm_rope_cache"


def of(gm: GraphModule) -> tuple[str, ...]:
    """A sentence or two for each; logged too, where the model computes something else for it."""
    dropped = list(_dropped(gm))
    for text in dropped:
        log.warning(text)
    place = broken_at(gm)
    return (*dropped, *([_BROKEN.format(place)] if place else ()))


_BROKEN = (
    "Dynamo broke the graph in pieces, of which this one ends at {}: parts of a prologue may stand "
    "in others. TORCH_LOGS=graph_breaks lists the breaks and their reasons, "
    "torch.compile(.., fullgraph=True) raises at the first"
)


def _dropped(gm: GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
        if name == _WRITES_UNSAID and not node.users:
            yield (
                f"nothing reads the results of {name} ({node.name}), whose schema does not say "
                "that it writes the caches: AOT autograd drops the call, and they are not written. "
                f"Read the caches that it returns, or call {name}_v2"
            )
