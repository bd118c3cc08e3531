"""npu_format_cast in a GE graph: the tensor itself.

Eager torch_npu stores a tensor in the format it is told. In a GE graph formats are GE's own
business: the operator definition of MlaPrologV3 declares its weights FRACTAL_NZ, and GE inserts the
TransData that it needs, folded into the weight where ``frozen_parameter`` makes the weight a
constant. A cast in the graph has nothing left to say, so no node is emitted for it.
"""

from __future__ import annotations

from typing import Any


def format_cast(tensor: Any, acl_format: int, **_: Any) -> Any:
    """``npu_format_cast(input, acl_format)``: its input."""
    return tensor
