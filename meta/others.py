"""The operators beside the prologue: what checks a call of each, and what infers its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mla_fusion.meta.attention import ATTENTION
from mla_fusion.meta.attention_check import check_attention, infer_attention
from mla_fusion.meta.binder import Binder
from mla_fusion.meta.key_operator import OPERATORS, check_key_operator, infer_key_operator
from mla_fusion.meta.preprocess import ATB, check_preprocess, infer_preprocess
from mla_fusion.meta.prolog import Operator


@dataclass(frozen=True)
class Other:
    """check   of (op, soc, cann, values, every argument by name): the call; raises ContractError
    infer   of (op, every argument by name): shapes and dtypes of the results
    """

    operator: Operator
    check: Callable[..., Binder]
    infer: Callable[..., list[Any]]


OTHERS = {
    other.operator.name: other
    for other in (
        Other(ATTENTION, check_attention, infer_attention),
        Other(ATB, check_preprocess, infer_preprocess),
        *(Other(one, check_key_operator, infer_key_operator) for one in OPERATORS),
    )
}
