"""What a call shows without a reference: the contract, and arguments that are seldom meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mla_fusion.meta import ContractError, check, preprocess
from mla_fusion.meta.prolog import PROLOGS
from mla_fusion.tools.by_hand.calls import Call
from mla_fusion.tools.by_hand.outcome import Finding
from mla_fusion.tools.by_hand.repairs import OPERATORS_EPSILON, SIDE_BY_SIDE


def findings(call: Call, **limits: Any) -> Iterator[Finding]:
    """In the order: contract, storage format, constants, tables. ``limits`` as `contract` has
    them.
    """
    yield from contract(call, **limits)
    for name, operator in call.reworked.items():
        said = (
            f"{operator} changed {name} after its cast to FRACTAL_NZ, where numbers stand in "
            "another order; pad, join or slice before npu_format_cast"
        )
        yield call.finding("nz.reworked", said, name)
    yield from epsilons(call)
    yield from _constants(call)
    yield from _tables(call)


def contract(call: Call, values: bool = True, **limits: Any) -> Iterator[Finding]:
    """``values``: the arguments' numbers are looked at too; ``limits``: soc, cann and path, as
    `meta.check` has them.
    """
    operator = call.short.removesuffix(".out")
    if operator not in (*PROLOGS, preprocess.OP):
        return
    results = preprocess.RESULTS if operator == preprocess.OP else ()
    given = {
        name: value
        for name, value in call.arguments.items()
        if value is not None and name not in results
    }
    try:
        check(operator, values=values, **limits, **given)
    except ContractError as error:
        yield call.finding(f"contract:{error.code}", str(error), error.argument)


def epsilons(call: Call) -> Iterator[Finding]:
    for name in call.roles.epsilons:
        if call.arguments.get(name, OPERATORS_EPSILON) == OPERATORS_EPSILON:
            said = f"{name} is 1e-05, as where it is not given; DeepSeek's models have 1e-06"
            yield call.finding("epsilon.default", said, name, certain=False)


def _constants(call: Call) -> Iterator[Finding]:
    for kind, question in (("scale", "is it a placeholder?"), ("gamma", "was it loaded?")):
        for name in getattr(call.roles, f"{kind}s"):
            value = call.tensor(name)
            if value is not None and value.numel() > 1 and bool((value == 1).all()):
                said = f"every number of {name} is 1: {question}"
                yield call.finding(f"{kind}.ones", said, name, certain=False)


def _tables(call: Call) -> Iterator[Finding]:
    roles = call.roles
    cos, sin = call.tensor(roles.cos), call.tensor(roles.sin)
    if cos is None or sin is None or cos.shape != sin.shape:
        return
    both = f"{roles.cos}, {roles.sin}"
    a, b = (table.double().reshape(-1, table.shape[-1]) for table in (cos, sin))
    if bool(((a == 0) & (b == 1)).all(-1).any()) and not bool(((a == 1) & (b == 0)).all(-1).any()):
        said = (
            "a token's angles are all 90 degrees; at position 0 cos is 1 and sin is 0: are the "
            "two exchanged?"
        )
        yield call.finding("tables.swapped", said, both, certain=False)
    half = a.shape[-1] // 2
    if half and not torch.equal(a[:, :half], a[:, half:]) and torch.equal(a[:, 0::2], a[:, 1::2]):
        said = f"{both} {SIDE_BY_SIDE}"
        yield call.finding("tables.interleaved", said, both, certain=False)
