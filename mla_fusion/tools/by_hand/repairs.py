"""What is usually wrong with a hand-written call: every repair that could change something of
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta.prolog import PROLOGS
from mla_fusion.tools.by_hand.calls import After, Call, Change
from mla_fusion.tools.by_hand.columns import of_columns
from mla_fusion.tools.by_hand.others import Parameters, of_others
from mla_fusion.tools.by_hand.repair import KR, KV, QUERY, Repair, both, instead, on, touching
from mla_fusion.tools.by_hand.roles import Roles, roles_of

OPERATORS_EPSILON = 1e-5  # of every audited operator
_EPSILONS = (1e-6, 1e-5, 1e-8, 1e-12, 1e-3)
_SAME = 1e-12  # relative: two epsilons are one


def candidates(call: Call, parameters: Parameters, epsilons: Iterable[float]) -> list[Repair]:
    """Every repair that changes something of ``call``.

    parameters   those of the models, by name: one may have been meant where another is given
    epsilons     those that the models hold
    """
    roles = roles_of(call.short)
    found = [
        *_tables(roles),
        *of_columns(roles, call),
        *_epsilons(roles, call, epsilons),
        *_gammas(roles, call),
        *_scales(roles, call),
        *_slots(roles, call),
        *_modes(call),
        *_written_back(roles, call),
        *of_others(roles, call, parameters),
    ]
    return [repair for repair in found if repair.after is not None or _has_effect(repair, call)]


def _has_effect(repair: Repair, call: Call) -> bool:
    for name, value in repair.change(call).items():
        before = call.arguments[name]
        if isinstance(value, Tensor) and isinstance(before, Tensor):
            # to be written, whatever it holds
            another = any(value is held for held in call.held.values())
            if another or value.shape != before.shape or not torch.equal(value, before):
                return True
        elif value != before:
            return True
    return False


# -- RoPE's tables


def _tables(roles: Roles) -> Iterator[Repair]:
    cos, sin = roles.cos, roles.sin
    tables = f"{cos}, {sin}"
    touches = touching(QUERY, KR)

    def swapped(call: Call) -> dict[str, Any]:
        return {cos: call.arguments[sin], sin: call.arguments[cos]}

    def of_each(function: Callable[[Tensor], Tensor]) -> Change:
        return both(on(cos, function), on(sin, function))

    yield Repair("tables.swapped", f"{cos} and {sin} are exchanged", tables, touches, swapped)
    yield Repair("tables.sign", f"{sin} has the wrong sign", sin, touches, on(sin, torch.neg))
    yield Repair(
        "tables.interleaved",
        f"{tables} repeat each angle side by side; the kernel wants [a0 .. a31 | a0 .. a31]",
        tables,
        touches,
        of_each(lambda table: torch.cat([table[..., 0::2], table[..., 0::2]], -1)),
    )
    for shift, where in ((-1, "one position later"), (1, "one position earlier")):
        for of_sequence in (False, True):

            def rolled(
                table: Tensor, shift: int = shift, of_sequence: bool = of_sequence
            ) -> Tensor:
                """Along the tokens, or along those of each sequence."""
                if of_sequence:
                    return table.roll(shift, -2) if table.dim() > 2 else table
                return table.flatten(0, -2).roll(shift, 0).reshape(table.shape)

            yield Repair(
                "tables.position",
                f"{tables} are those of the token {'before' if shift < 0 else 'behind'}: each row "
                f"belongs {where}",
                tables,
                touches,
                of_each(rolled),
            )


# -- norms


def _epsilons(roles: Roles, call: Call, held: Iterable[float]) -> Iterator[Repair]:
    known = list(dict.fromkeys([*held, *_EPSILONS]))
    for name, touched in roles.epsilons.items():
        now = call.arguments[name]
        for epsilon in known:
            if abs(epsilon - now) > _SAME * epsilon:
                how = ", the operator's default" if now == OPERATORS_EPSILON else ""
                text = f"{name} is {now:g}{how}; the model's is {epsilon:g}"
                yield Repair("epsilon", text, name, frozenset(touched), instead(name, epsilon))


def _gammas(roles: Roles, call: Call) -> Iterator[Repair]:
    for name, touched in roles.gammas.items():
        touches = frozenset(touched)
        for text, shift in (
            ("the weight is kept as gamma - 1 and 1 is not added", 1),
            ("1 is added to it twice", -1),
        ):
            yield Repair(
                "gamma.offset",
                f"{name}: {text}",
                name,
                touches,
                on(name, partial(torch.add, other=shift)),
            )


# -- scales


def _scales(roles: Roles, call: Call) -> Iterator[Repair]:
    for name, touched in roles.scales.items():
        value, touches = call.arguments.get(name), frozenset(touched)
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield Repair(
                "scale.inverted",
                f"{name} is the reciprocal",
                name,
                touches,
                on(name, torch.reciprocal),
            )
        elif isinstance(value, float):
            for number, text in _numbers(value, call):
                if not math.isclose(number, value, rel_tol=1e-6):
                    code = "scale.inverted" if text == "the reciprocal" else "scale.value"
                    said = f"{name} is {value:g}; {number:.6g} would be right ({text})"
                    yield Repair(code, said, name, touches, instead(name, number))


def _numbers(value: float, call: Call) -> Iterator[tuple[float, str]]:
    if value:
        yield 1 / value, "the reciprocal"
        yield value**2, "its square"
    yield 1.0, "none"
    x, ranks = call.arguments.get("token_x"), ("rmsnorm_gamma_cq", "rmsnorm_gamma_ckv")
    for rank in ranks:
        gamma = call.arguments.get(rank)
        if isinstance(x, Tensor) and isinstance(gamma, Tensor):
            yield math.sqrt(x.shape[-1] / gamma.numel()), f"sqrt(He / {gamma.numel()})"


# -- caches


def _slots(roles: Roles, call: Call) -> Iterator[Repair]:
    cache = call.arguments.get(roles.kv_cache)
    touches = touching(KV, KR)
    block = int(cache.shape[1]) if isinstance(cache, Tensor) and cache.dim() == 4 else 0
    shifts = [(1, "a slot"), (-1, "a slot")] + (
        [(block, "a block"), (-block, "a block")] if block > 1 else []
    )
    for shift, what in shifts:
        way = "too low" if shift > 0 else "too high"
        text = f"{roles.slots} is {what} {way}"
        yield Repair(
            "slots.off",
            text,
            roles.slots,
            touches,
            on(roles.slots, partial(torch.add, other=shift)),
        )
    for shift in (1, -1):
        text = f"{roles.slots} has the slots of the token {'behind' if shift > 0 else 'before'}"
        yield Repair(
            "slots.rolled",
            text,
            roles.slots,
            touches,
            on(roles.slots, partial(torch.roll, shifts=shift, dims=-1)),
        )


def _modes(call: Call) -> Iterator[Repair]:
    mode = call.arguments.get("cache_mode")
    modes = ("PA_BSND", "PA_NZ") if call.short in PROLOGS else ("Norm", "PA", "PA_BNSD", "PA_NZ")
    for other in modes:
        if mode in modes and other != mode:
            text = f"cache_mode is {mode}; attention reads the caches as {other} writes them"
            yield Repair(
                "cache_mode",
                text,
                "cache_mode",
                touching(KV, KR),
                instead("cache_mode", other),
            )
    for name in ("weight_quant_mode", "kv_cache_quant_mode", "query_quant_mode"):
        now = call.arguments.get(name)
        for value in range(4) if isinstance(now, int) else ():
            if value != now:
                text = f"{name} is {now}; {value} would be right"
                yield Repair(
                    "quant_mode",
                    text,
                    name,
                    touching(QUERY, KV, KR),
                    instead(name, value),
                )


def _written_back(roles: Roles, call: Call) -> Iterator[Repair]:
    """Of an operator that returns its caches: into the model's, each alone and all together."""

    def copying(*returned: tuple[str, int, str]) -> After:
        def after(call: Call, results: Any) -> None:
            for cache, place, _ in returned:
                given, made = call.arguments[cache], results[place]
                if given.shape == made.shape and roles.fresh and made.dim() == 4:
                    slots = call.arguments[roles.slots].long()
                    given.flatten(0, 2)[slots] = made.flatten(0, 2)[slots]
                elif given.shape == made.shape:
                    given.copy_(made)

        return after

    every = roles.returned_caches
    out = "call its out overload with the model's caches as results"
    for cache, place, touched in every:
        remedy = (
            out
            if roles.fresh
            else f"copy the new {cache}, its result {place}, into the model's cache"
        )
        text = f"{call.short} does not write {cache}: {remedy}"
        after = copying((cache, place, touched))
        yield Repair("cache.not_written", text, cache, touching(touched), after=after)
    if every:
        names = ", ".join(cache for cache, _, _ in every)
        remedy = out if roles.fresh else f"copy the new caches, its last results, into {names}"
        text = f"{call.short} does not write {names}: {remedy}"
        yield Repair("cache.not_written", text, names, touching(KV, KR), after=copying(*every))
