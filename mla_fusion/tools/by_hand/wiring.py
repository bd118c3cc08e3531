"""What a call shows without a reference: the contract, and arguments that are seldom meant."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mla_fusion.meta import ContractError, check, preprocess
from mla_fusion.meta.prolog import PROLOGS
from mla_fusion.tools.by_hand.calls import Call
from mla_fusion.tools.by_hand.outcome import Finding
from mla_fusion.tools.by_hand.repairs import OPERATORS_EPSILON
from mla_fusion.tools.by_hand.roles import Roles, roles_of


def findings(call: Call, soc: str, cann: str, path: str) -> Iterator[Finding]:
    """In the order: contract, storage format, constants, tables."""
    roles = roles_of(call.short)
    yield from _contract(call, soc, cann, path)
    for name, operator in call.reworked.items():
        said = (
            f"{operator} changed {name} after its cast to FRACTAL_NZ, where numbers stand in "
            "another order"
        )
        yield _found(
            call, "nz.reworked", f"{said}; pad, join or slice before npu_format_cast", name
        )
    yield from _constants(call, roles)
    yield from _tables(call, roles)


def _found(call: Call, code: str, message: str, argument: str, certain: bool = True) -> Finding:
    return Finding(code, message, argument, call.short, call.place, call.line, certain)


def _contract(call: Call, soc: str, cann: str, path: str) -> Iterator[Finding]:
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
        check(operator, soc=soc, cann=cann, path=path, values=True, **given)
    except ContractError as error:
        yield _found(call, f"contract:{error.code}", str(error), error.argument)


def _constants(call: Call, roles: Roles) -> Iterator[Finding]:
    for name in roles.epsilons:
        if call.arguments[name] == OPERATORS_EPSILON:
            said = f"{name} is 1e-05, as where it is not given; DeepSeek's models have 1e-06"
            yield _found(call, "epsilon.default", said, name, certain=False)
    for name in roles.scales:
        value = call.arguments.get(name)
        if isinstance(value, Tensor) and value.numel() > 1 and bool((value == 1).all()):
            yield _found(
                call,
                "scale.ones",
                f"every number of {name} is 1: is it a placeholder?",
                name,
                certain=False,
            )
    for name in roles.gammas:
        value = call.arguments.get(name)
        if isinstance(value, Tensor) and value.numel() > 1 and bool((value == 1).all()):
            yield _found(
                call,
                "gamma.ones",
                f"every number of {name} is 1: was it loaded?",
                name,
                certain=False,
            )


def _tables(call: Call, roles: Roles) -> Iterator[Finding]:
    cos, sin = call.arguments.get(roles.cos), call.arguments.get(roles.sin)
    if (
        not isinstance(cos, Tensor)
        or not isinstance(sin, Tensor)
        or cos.shape != sin.shape
        or not cos.numel()
    ):
        return
    both = f"{roles.cos}, {roles.sin}"
    a, b = (table.double().reshape(-1, table.shape[-1]) for table in (cos, sin))
    if bool(((a == 0) & (b == 1)).all(-1).any()) and not bool(((a == 1) & (b == 0)).all(-1).any()):
        said = (
            "a token's angles are all 90 degrees; at position 0 cos is 1 and sin is 0: are the "
            "two exchanged?"
        )
        yield _found(call, "tables.swapped", said, both, certain=False)
    half = a.shape[-1] // 2
    if half and not torch.equal(a[:, :half], a[:, half:]) and torch.equal(a[:, 0::2], a[:, 1::2]):
        said = f"{both} repeat each angle side by side; the kernel wants [a0 .. a31 | a0 .. a31]"
        yield _found(call, "tables.interleaved", said, both, certain=False)
