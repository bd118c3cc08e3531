"""The operator contract: one declarative spec, checks, and shape inference."""

from mla_fusion.meta.check import check, check_structure
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.infer import implied_quant_modes, infer
from mla_fusion.meta.limits import RELEASES, SOCS, Limits, limits
from mla_fusion.meta.signature import bind, complete, signature

__all__ = [
    "RELEASES",
    "SOCS",
    "ContractError",
    "Limits",
    "bind",
    "check",
    "check_structure",
    "complete",
    "implied_quant_modes",
    "infer",
    "limits",
    "signature",
]
