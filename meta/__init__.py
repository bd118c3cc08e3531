"""The operators' contract: specification, checks, and shape inference."""

from mla_fusion.meta.check import check, check_structure
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.explain import CallExplanation, Cost, explain_call
from mla_fusion.meta.infer import implied_quant_modes, infer
from mla_fusion.meta.limits import PATHS, RELEASES, SOCS, Limits, limits
from mla_fusion.meta.signature import bind, complete, signature

__all__ = [
    "PATHS",
    "RELEASES",
    "SOCS",
    "CallExplanation",
    "ContractError",
    "Cost",
    "Limits",
    "bind",
    "check",
    "check_structure",
    "complete",
    "explain_call",
    "implied_quant_modes",
    "infer",
    "limits",
    "signature",
]
