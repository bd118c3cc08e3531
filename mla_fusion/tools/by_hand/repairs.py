"""What is usually wrong with a hand-written call: every repair that could change something of
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_fusion.meta.prolog import PROLOGS
from mla_fusion.tools.by_hand.calls import Call, Repair, instead, on
from mla_fusion.tools.by_hand.columns import of_columns
from mla_fusion.tools.by_hand.draws import fingerprint
from mla_fusion.tools.by_hand.memory import place
from mla_fusion.tools.by_hand.roles import ALL, KR, KV, QUERY, Touched

OPERATORS_EPSILON = 1e-5  # of every audited operator
_EPSILONS = (1e-6, 1e-5, 1e-8, 1e-12, 1e-3)
_SAME = 1e-12  # relative: two epsilons are one
SIDE_BY_SIDE = "repeat each angle side by side; the kernel wants [a0 .. a31 | a0 .. a31]"

Parameters = Sequence[tuple[str, Tensor]]


def candidates(call: Call, parameters: Parameters, epsilons: Iterable[float]) -> list[Repair]:
    """Every repair that changes something of ``call``.

    parameters   those of the models, by name: one may have been meant where another is given
    epsilons     those that the models hold
    """
    found = [
        *_of_tensors(call),
        *of_columns(call),
        *_epsilons(call, epsilons),
        *_factors(call),
        *_modes(call),
        *_gammas(call, parameters),
        *_weights(call, parameters),
        *_caches(call),
    ]
    found = [repair for repair in found if repair.has_effect(call)]
    return [*found, *_written_back(call)]


def _of_tensors(call: Call) -> Iterator[Repair]:
    """Tables, weights of norms, scales and slots: other numbers, or rows in another order."""
    roles = call.roles
    cos, sin, slots = roles.cos, roles.sin, roles.slots
    tables, rotated, rows = f"{cos}, {sin}", QUERY | KR, KV | KR

    def swapped(call: Call) -> dict[str, Any]:
        return {cos: call.arguments[sin], sin: call.arguments[cos]}

    def repair(
        code: str, text: str, said: str, touches: Touched, made: Callable[[Tensor], Tensor]
    ) -> Repair:
        return Repair(code, text, said, touches, on(made, *said.split(", ")))

    exchanged = f"{cos} and {sin} are exchanged"
    yield Repair("tables.swapped", exchanged, tables, rotated, swapped)
    yield repair("tables.sign", f"{sin} has the wrong sign", sin, rotated, torch.neg)
    text = f"{tables} {SIDE_BY_SIDE}"
    yield repair("tables.interleaved", text, tables, rotated, _in_halves)
    for shift, where, other in ((-1, "before", "later"), (1, "behind", "earlier")):
        text = f"{tables} are those of the token {where}: each row belongs one position {other}"
        for rolled in (_rolled_tokens, _rolled_in_sequences):
            yield repair("tables.position", text, tables, rotated, partial(rolled, shift))
    offsets = (
        (1, "the weight is kept as gamma - 1 and 1 is not added"),
        (-1, "1 is added to it twice"),
    )
    for name, touches in roles.gammas.items():
        for one, text in offsets:
            added = partial(torch.add, other=one)
            yield repair("gamma.offset", f"{name}: {text}", name, touches, added)
    for name, touches in roles.scales.items():
        value = call.tensor(name)
        if value is not None and value.is_floating_point():
            text = f"{name} is the reciprocal"
            yield repair("scale.inverted", text, name, touches, torch.reciprocal)
    cache = call.tensor(roles.kv_cache)
    block = int(cache.shape[1]) if cache is not None and cache.dim() == 4 else 0
    for size, what in [(1, "a slot"), *([(block, "a block")] if block > 1 else [])]:
        for shift, way in ((size, "too low"), (-size, "too high")):
            text = f"{slots} is {what} {way}"
            yield repair("slots.off", text, slots, rows, partial(torch.add, other=shift))
    for shift, where in ((1, "behind"), (-1, "before")):
        text = f"{slots} has the slots of the token {where}"
        rolled = partial(torch.roll, shifts=shift, dims=-1)
        yield repair("slots.rolled", text, slots, rows, rolled)


def _in_halves(table: Tensor) -> Tensor:
    return torch.cat([table[..., 0::2]] * 2, -1)


def _rolled_tokens(shift: int, table: Tensor) -> Tensor:
    return table.flatten(0, -2).roll(shift, 0).reshape(table.shape)


def _rolled_in_sequences(shift: int, table: Tensor) -> Tensor:
    return table.roll(shift, -2) if table.dim() > 2 else table


# -- numbers and words


def _epsilons(call: Call, held: Iterable[float]) -> Iterator[Repair]:
    known = list(dict.fromkeys([*held, *_EPSILONS]))
    for name, touches in call.roles.epsilons.items():
        now = call.arguments[name]
        for epsilon in known:
            if abs(epsilon - now) > _SAME * epsilon:
                how = ", the operator's default" if now == OPERATORS_EPSILON else ""
                text = f"{name} is {now:g}{how}; the model's is {epsilon:g}"
                yield Repair("epsilon", text, name, touches, instead(name, epsilon))


def _factors(call: Call) -> Iterator[Repair]:
    for name, touches in call.roles.scales.items():
        value = call.arguments.get(name)
        if not isinstance(value, float):
            continue
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
    x = call.tensor("token_x")
    for gamma in map(call.tensor, ("rmsnorm_gamma_cq", "rmsnorm_gamma_ckv")):
        if x is not None and gamma is not None:
            yield math.sqrt(x.shape[-1] / gamma.numel()), f"sqrt(He / {gamma.numel()})"


def _modes(call: Call) -> Iterator[Repair]:
    mode = call.arguments.get("cache_mode")
    modes = ("PA_BSND", "PA_NZ") if call.short in PROLOGS else ("Norm", "PA", "PA_BNSD", "PA_NZ")
    for other in modes if mode in modes else ():
        text = f"cache_mode is {mode}; attention reads the caches as {other} writes them"
        change = instead("cache_mode", other)
        yield Repair("cache_mode", text, "cache_mode", KV | KR, change)
    for name in ("weight_quant_mode", "kv_cache_quant_mode", "query_quant_mode"):
        now = call.arguments.get(name)
        for value in range(4) if isinstance(now, int) else ():
            text = f"{name} is {now}; {value} would be right"
            yield Repair("quant_mode", text, name, ALL, instead(name, value))


# -- caches


def _written_back(call: Call) -> Iterator[Repair]:
    """Of an operator that returns its caches: into the model's, each alone and all together."""
    roles, every = call.roles, call.roles.returned_caches

    def copying(returned: Iterable[tuple[str, int, Touched]], call: Call, results: Any) -> None:
        for cache, at, _ in returned:
            given, made = call.arguments[cache], results[at]
            if given.shape == made.shape and roles.fresh and made.dim() == 4:
                slots = call.arguments[roles.slots].long()
                given.flatten(0, 2)[slots] = made.flatten(0, 2)[slots]
            elif given.shape == made.shape:
                given.copy_(made)

    for returned in [*((one,) for one in every), *([every] if every else [])]:
        names = ", ".join(cache for cache, _, _ in returned)
        places = " and ".join(str(at) for _, at, _ in returned)
        remedy = (
            "call its out overload with the model's caches as results"
            if roles.fresh
            else f"copy what it returns as result {places} into the model's {names}"
        )
        text = f"{call.short} does not write {names}: {remedy}"
        touches = frozenset().union(*(touched for _, _, touched in returned))
        after = partial(copying, returned)
        yield Repair("cache.not_written", text, names, touches, after=after)


# -- another tensor was meant: the weight of another norm or layer, the rows of W_uv, a cache


def _gammas(call: Call, parameters: Parameters) -> Iterator[Repair]:
    for name, touches in call.roles.gammas.items():
        gamma = call.tensor(name)
        for source, vector in parameters:
            if gamma is not None and vector.dim() == 1 and vector.numel() == gamma.numel():
                value = vector.detach().reshape(gamma.shape).to(gamma.dtype)
                text = f"{name} is not the norm's weight: {source} is"
                yield Repair("gamma.other", text, name, touches, instead(name, value))


def _weights(call: Call, parameters: Parameters) -> Iterator[Repair]:
    """Of the same numbers in another order, `tools.by_hand.columns` says what is wrong with the
    order.
    """
    roles = call.roles
    of_query = dict.fromkeys((roles.down_query, roles.up, roles.absorbed), QUERY)
    for name, touches in {**of_query, roles.down: KV | KR}.items():
        weight = call.tensor(name)
        if weight is None or roles.of_rows:
            continue
        mark = fingerprint(weight)
        for source, parameter in parameters:
            for rows, value in _as(weight, parameter.detach()):
                if value.dtype == weight.dtype and fingerprint(value) != mark:
                    text = f"{name} holds other numbers than {rows}{source}"
                    change = instead(name, value.contiguous())
                    yield Repair("weight.other", text, name, touches, change)


def _as(weight: Tensor, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter in the layout of ``weight``, and which of its rows that takes."""
    if weight.dim() == 3 and parameter.dim() == 2 and parameter.shape[1] == weight.shape[2]:
        heads, nope, _ = weight.shape
        if parameter.shape[0] % heads == 0 and parameter.shape[0] > heads * nope:
            of_heads = parameter.unflatten(0, (heads, -1))
            yield f"the first {nope} rows of each head of ", of_heads[:, :nope]
            yield f"the last {nope} rows of each head of ", of_heads[:, -nope:]
    if parameter.shape == weight.shape:
        yield "", parameter
    elif parameter.dim() == 2 and parameter.T.shape == weight.shape:
        yield "", parameter.T


def _caches(call: Call) -> Iterator[Repair]:
    """Another tensor of the caller's that has the cache's shape: that of another layer, or the one
    that was copied.
    """
    for name, cache, touches in call.caches():
        mine = [label for label, value in call.held.items() if place(value) == place(cache)]
        for label, value in call.held.items():
            alike = value.shape == cache.shape and value.dtype == cache.dtype
            if alike and place(value) != place(cache):
                now = mine[0] if mine else "memory of its own (a copy?)"
                text = f"{name} is {now}; the model writes {label}"

                def change(call: Call, name: str = name, label: str = label) -> dict[str, Tensor]:
                    return {name: call.held[label]}

                yield Repair("cache.other", text, name, touches, change)


def parameters_of(*models: object) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by name, each once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for model in models:
        if isinstance(model, torch.nn.Module):
            for name, value in (*model.named_parameters(), *model.named_buffers()):
                found.setdefault(value.data_ptr(), (name, value))
    return list(found.values())
