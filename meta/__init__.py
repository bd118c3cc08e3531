"""The operator contract: one declarative spec, checks, and shape inference."""

from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.infer import implied_quant_modes, infer
from mla_fusion.meta.signature import bind


def check_structure(op, arguments):
    pass


__all__ = ["ContractError", "bind", "check_structure", "implied_quant_modes", "infer"]
