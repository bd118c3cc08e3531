"""What is usually wrong with a hand-written call, each with the change of its arguments that mends it.

A repair names the mistake; ``change`` gives the arguments that would have been right, or none where the call is not of
the shape that the mistake needs. ``touches`` are the values that it can alter: "query", "kv" and "kr".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_fusion.by_hand.calls import After, Call, Change
from mla_fusion.by_hand.roles import Roles, roles_of

QUERY, KV, KR = "query", "kv", "kr"
OPERATORS_EPSILON = 1e-5  # of every audited operator
_EPSILONS = (1e-6, 1e-5, 1e-8, 1e-12, 1e-3)
_SAME = 1e-12  # relative: two epsilons are one


@dataclass(frozen=True)
class Repair:
    """``code`` is stable; ``text`` says what is wrong and what is right; ``argument`` is what it is about."""

    code: str
    text: str
    argument: str
    touches: frozenset[str]
    change: Change = lambda call: {}
    after: After | None = None
    place: int | None = None  # of the call that it mends; None: of every call

    def at(self, place: int) -> Repair:
        def change(call: Call) -> dict[str, Any]:
            return self.change(call) if call.place == place else {}

        def after(call: Call, results: Any) -> None:
            if call.place == place and self.after is not None:
                self.after(call, results)

        return Repair(
            self.code, self.text, self.argument, self.touches, change, after if self.after else None, place
        )


def candidates(call: Call, vectors: Iterable[tuple[str, Tensor]], epsilons: Iterable[float]) -> list[Repair]:
    """Every repair that changes something of ``call``.

    vectors    parameters of one axis, by name, which a norm may have been meant to have
    epsilons   those that the models hold
    """
    roles = roles_of(call.short)
    found = [
        *_tables(roles),
        *_rope_columns(roles, call),
        *_order_of_columns(roles, call),
        *_up_by_heads(roles),
        *_transposed(roles),
        *_epsilons(roles, call, epsilons),
        *_gammas(roles, call, vectors),
        *_scales(roles, call),
        *_slots(roles, call),
        *_modes(call),
        *_written_back(roles, call),
    ]
    return [repair for repair in found if repair.after is not None or _has_effect(repair, call)]


def _has_effect(repair: Repair, call: Call) -> bool:
    for name, value in repair.change(call).items():
        before = call.arguments[name]
        if isinstance(value, Tensor) and isinstance(before, Tensor):
            if value.shape != before.shape or not torch.equal(value, before):
                return True
        elif value != before:
            return True
    return False


def _on(name: str, function: Callable[[Tensor], Tensor | None]) -> Change:
    """Apply to one tensor argument, where it is given and of the right shape."""

    def change(call: Call) -> dict[str, Any]:
        value = call.arguments.get(name)
        made = function(value) if isinstance(value, Tensor) else None
        return {} if made is None else {name: made.contiguous()}

    return change


def _both(*changes: Change) -> Change:
    def change(call: Call) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for one in changes:
            made |= one(call)
        return made

    return change


def _touching(*what: str) -> frozenset[str]:
    return frozenset(what)


# -- RoPE's tables


def _tables(roles: Roles) -> Iterator[Repair]:
    cos, sin = roles.cos, roles.sin
    both = f"{cos}, {sin}"
    touches = _touching(QUERY, KR)

    def swapped(call: Call) -> dict[str, Any]:
        return {cos: call.arguments[sin], sin: call.arguments[cos]}

    def of_each(function: Callable[[Tensor], Tensor]) -> Change:
        return _both(_on(cos, function), _on(sin, function))

    yield Repair("tables.swapped", f"{cos} and {sin} are exchanged", both, touches, swapped)
    yield Repair("tables.sign", f"{sin} has the wrong sign", sin, touches, _on(sin, torch.neg))
    yield Repair(
        "tables.interleaved",
        f"{both} repeat each angle side by side; the kernel wants [a0 .. a31 | a0 .. a31]",
        both,
        touches,
        of_each(lambda table: torch.cat([table[..., 0::2], table[..., 0::2]], -1)),
    )
    for shift, where in ((-1, "one position later"), (1, "one position earlier")):
        yield Repair(
            "tables.position",
            f"{both} are those of the token {'before' if shift < 0 else 'behind'}: each row belongs {where}",
            both,
            touches,
            of_each(lambda table, shift=shift: table.roll(shift, 0)),  # type: ignore[misc]
        )


# -- columns


def _interleaved(columns: Tensor) -> Tensor:
    """[a0 .. | b0 ..] to a0, b0, a1, b1, .. along the last axis."""
    return columns.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _halved(columns: Tensor) -> Tensor:
    return columns.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


_ORDERS: tuple[tuple[str, Callable[[Tensor], Tensor], str], ...] = (
    ("half", _interleaved, "are in half layout; the kernel wants interleaved pairs"),
    ("interleaved", _halved, "were interleaved twice, or of a model that interleaves already"),
)


def _rope_columns(roles: Roles, call: Call) -> Iterator[Repair]:
    rope = roles.rope_dim(call)
    for label, order, text in _ORDERS:
        for weight, scale, touched in ((roles.up, roles.up_scale, QUERY), (roles.down, roles.down_scale, KR)):
            if not weight:
                continue

            def rows(matrix: Tensor, order: Any = order, of_query: bool = touched == QUERY) -> Tensor | None:
                return _reordered_rope(matrix, roles, call, rope, order, of_query)

            code = f"rope_columns.{label}"
            every: list[tuple[str, Change]] = [(weight, _on(weight, rows))]
            if scale and isinstance(call.arguments.get(scale), Tensor):
                both = _both(_on(weight, rows), _on(scale, rows))
                every += [(scale, _on(scale, rows)), (f"{weight}, {scale}", both)]
            for name, change in every:
                yield Repair(code, f"{name}: the rope columns {text}", name, _touching(touched), change)


def _reordered_rope(
    matrix: Tensor, roles: Roles, call: Call, rope: int, order: Callable[[Tensor], Tensor], of_query: bool
) -> Tensor | None:
    columns = roles.columns(matrix)
    if columns is None:
        return None
    if of_query:
        heads = roles.heads(call)
        per_head = columns.shape[-1] // heads if heads else 0
        if not heads or columns.shape[-1] % heads or per_head <= rope:
            return None
        split = columns.unflatten(-1, (heads, per_head))
        made = torch.cat([split[..., :-rope], order(split[..., -rope:])], -1).flatten(-2)
    else:
        start = roles.latent_dim(call)
        if columns.shape[-1] < start + rope:
            return None
        made = columns.clone()
        made[..., start : start + rope] = order(columns[..., start : start + rope])
    return roles.like(matrix, made)


def _order_of_columns(roles: Roles, call: Call) -> Iterator[Repair]:
    rope, latent = roles.rope_dim(call), roles.latent_dim(call)
    if not roles.down:
        return

    def key_first(matrix: Tensor) -> Tensor | None:
        columns = roles.columns(matrix)
        if columns is None or columns.shape[-1] < latent + rope:
            return None
        rest = columns[..., latent + rope :]
        made = torch.cat([columns[..., rope : rope + latent], columns[..., :rope], rest], -1)
        return roles.like(matrix, made)

    changes = [_on(name, key_first) for name in (roles.down, roles.down_scale) if name]
    yield Repair(
        "columns.key_first",
        f"{roles.down} has the columns [k_pe | c_kv]; the kernel wants [c_kv | k_pe]",
        roles.down,
        _touching(KV, KR),
        _both(*changes),
    )
    if roles.down_also_query:

        def query_first(matrix: Tensor) -> Tensor | None:
            columns = roles.columns(matrix)
            if columns is None or columns.shape[-1] <= latent + rope:
                return None
            rank = columns.shape[-1] - latent - rope
            return roles.like(matrix, torch.cat([columns[..., rank:], columns[..., :rank]], -1))

        changes = [_on(name, query_first) for name in (roles.down, *roles.down_vectors)]
        yield Repair(
            "columns.query_first",
            f"{roles.down} has the columns [q | kv]; the kernel wants [kv | q]",
            roles.down,
            _touching(QUERY, KV, KR),
            _both(*changes),
        )


def _up_by_heads(roles: Roles) -> Iterator[Repair]:
    """The columns of W_uq_qr, and the axes of W_uk."""
    if roles.up:

        def by_heads(arrange: Callable[[Tensor, int, int, int], Tensor]) -> Change:
            def change(call: Call) -> dict[str, Any]:
                heads, rope = roles.heads(call), roles.rope_dim(call)

                def rows(matrix: Tensor) -> Tensor | None:
                    columns = roles.columns(matrix)
                    if columns is None or not heads or columns.shape[-1] % heads:
                        return None
                    width = columns.shape[-1] // heads
                    return roles.like(matrix, arrange(columns, heads, width - rope, rope)) if width > rope else None

                return _both(*(_on(name, rows) for name in (roles.up, roles.up_scale) if name))(call)

            return change

        for code, text, arrange in (
            ("heads.nope_then_rope", "all nope columns come before all rope columns", _all_nope_first),
            ("heads.rope_first", "each head is [Dr | D]", _rope_first),
            ("heads.transposed", "heads vary fastest: [D + Dr, N]", _heads_last),
        ):
            wanted = "the kernel wants [D | Dr] head by head"
            yield Repair(code, f"{roles.up}: {text}; {wanted}", roles.up, _touching(QUERY), by_heads(arrange))
    if roles.absorbed:

        def as_latent_rows(weight: Tensor) -> Tensor | None:
            if weight.dim() != 3:
                return None
            heads, nope, latent = weight.shape
            return weight.reshape(heads, latent, nope).transpose(1, 2)

        def as_heads_last(weight: Tensor) -> Tensor | None:
            if weight.dim() != 3:
                return None
            heads, nope, latent = weight.shape
            return weight.reshape(nope, heads, latent).transpose(0, 1)

        for code, axes, function in (
            ("w_uk.transposed", "[N, Hckv, D]", as_latent_rows),
            ("w_uk.heads", "[D, N, Hckv]", as_heads_last),
        ):
            text = f"{roles.absorbed} holds {axes} reshaped to [N, D, Hckv]: transpose it instead"
            yield Repair(code, text, roles.absorbed, _touching(QUERY), _on(roles.absorbed, function))


def _all_nope_first(columns: Tensor, heads: int, nope: int, rope: int) -> Tensor:
    of_nope = columns[..., : heads * nope].unflatten(-1, (heads, nope))
    of_rope = columns[..., heads * nope :].unflatten(-1, (heads, rope))
    return torch.cat([of_nope, of_rope], -1).flatten(-2)


def _rope_first(columns: Tensor, heads: int, nope: int, rope: int) -> Tensor:
    split = columns.unflatten(-1, (heads, nope + rope))
    return torch.cat([split[..., rope:], split[..., :rope]], -1).flatten(-2)


def _heads_last(columns: Tensor, heads: int, nope: int, rope: int) -> Tensor:
    return columns.unflatten(-1, (nope + rope, heads)).transpose(-1, -2).flatten(-2)


def _transposed(roles: Roles) -> Iterator[Repair]:
    for weight, touched in ((roles.down_query, (QUERY,)), (roles.up, (QUERY,)), (roles.down, (KV, KR))):
        if not weight:
            continue

        def read_as_rows(matrix: Tensor) -> Tensor | None:
            return matrix.reshape(matrix.shape[1], matrix.shape[0]).t() if matrix.dim() == 2 else None

        text = f"{weight} holds a linear layer's [out, in] reshaped to [in, out]: transpose it instead"
        yield Repair("weight.reshaped", text, weight, _touching(*touched), _on(weight, read_as_rows))


# -- norms


def _epsilons(roles: Roles, call: Call, held: Iterable[float]) -> Iterator[Repair]:
    known = list(dict.fromkeys([*held, *_EPSILONS]))
    for name, touched in roles.epsilons.items():
        now = call.arguments[name]
        for epsilon in known:
            if abs(epsilon - now) > _SAME * epsilon:
                how = ", the operator's default" if now == OPERATORS_EPSILON else ""
                text = f"{name} is {now:g}{how}; the model's is {epsilon:g}"
                yield Repair("epsilon", text, name, frozenset(touched), lambda _, n=name, e=epsilon: {n: e})  # type: ignore[misc]


def _gammas(roles: Roles, call: Call, vectors: Iterable[tuple[str, Tensor]]) -> Iterator[Repair]:
    vectors = list(vectors)
    for name, touched in roles.gammas.items():
        gamma = call.arguments.get(name)
        if not isinstance(gamma, Tensor):
            continue
        touches = frozenset(touched)
        for text, shift in (("the weight is kept as gamma - 1 and 1 is not added", 1), ("1 is added to it twice", -1)):
            yield Repair("gamma.offset", f"{name}: {text}", name, touches, _on(name, lambda g, s=shift: g + s))  # type: ignore[misc]
        for source, vector in vectors:
            if vector.numel() == gamma.numel():
                value = vector.detach().reshape(gamma.shape).to(gamma.dtype)
                text = f"{name} is not the norm's weight: {source} is"
                yield Repair("gamma.other", text, name, touches, lambda _, n=name, v=value: {n: v})  # type: ignore[misc]


# -- scales


def _scales(roles: Roles, call: Call) -> Iterator[Repair]:
    for name, touched in roles.scales.items():
        value, touches = call.arguments.get(name), frozenset(touched)
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield Repair("scale.inverted", f"{name} is the reciprocal", name, touches, _on(name, torch.reciprocal))
        elif isinstance(value, float):
            for number, text in _numbers(value, call):
                if not math.isclose(number, value, rel_tol=1e-6):
                    code = "scale.inverted" if text == "the reciprocal" else "scale.value"
                    said = f"{name} is {value:g}; {number:.6g} would be right ({text})"
                    yield Repair(code, said, name, touches, lambda _, n=name, x=number: {n: x})  # type: ignore[misc]


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
    touches = _touching(KV, KR)
    block = int(cache.shape[1]) if isinstance(cache, Tensor) and cache.dim() == 4 else 0
    shifts = [(1, "a slot"), (-1, "a slot")] + ([(block, "a block"), (-block, "a block")] if block > 1 else [])
    for shift, what in shifts:
        way = "too low" if shift > 0 else "too high"
        text = f"{roles.slots} is {what} {way}"
        yield Repair("slots.off", text, roles.slots, touches, _on(roles.slots, lambda v, s=shift: v + s))  # type: ignore[misc]
    for shift in (1, -1):
        text = f"{roles.slots} has the slots of the token {'behind' if shift > 0 else 'before'}"
        yield Repair("slots.rolled", text, roles.slots, touches, _on(roles.slots, lambda v, s=shift: v.roll(s, -1)))  # type: ignore[misc]


def _modes(call: Call) -> Iterator[Repair]:
    mode = call.arguments.get("cache_mode")
    for other in ("PA_BSND", "PA_NZ"):
        if mode in ("PA_BSND", "PA_NZ") and other != mode:
            text = f"cache_mode is {mode}; attention reads the caches as {other} writes them"
            yield Repair("cache_mode", text, "cache_mode", _touching(KV, KR), lambda _, m=other: {"cache_mode": m})  # type: ignore[misc]
    for name in ("weight_quant_mode", "kv_cache_quant_mode", "query_quant_mode"):
        now = call.arguments.get(name)
        for value in range(4) if isinstance(now, int) else ():
            if value != now:
                text = f"{name} is {now}; {value} would be right"
                yield Repair("quant_mode", text, name, _touching(QUERY, KV, KR), lambda _, n=name, v=value: {n: v})  # type: ignore[misc]


def _written_back(roles: Roles, call: Call) -> Iterator[Repair]:
    """Of an operator that returns its caches: into the model's."""
    for cache, place, touched in roles.returned_caches:

        def after(call: Call, results: Any, cache: str = cache, place: int = place) -> None:
            value = call.arguments[cache]
            if results[place].shape == value.shape:
                value.copy_(results[place])

        text = f"{call.short} writes nothing: copy the new {cache}, its result {place}, into the model's cache"
        yield Repair("cache.not_written", text, cache, _touching(touched), after=after)
    if roles.returned_caches:

        def every(call: Call, results: Any) -> None:
            for cache, place, _ in roles.returned_caches:
                if results[place].shape == call.arguments[cache].shape:
                    call.arguments[cache].copy_(results[place])

        names = ", ".join(cache for cache, _, _ in roles.returned_caches)
        text = f"{call.short} writes nothing: copy the new caches, its last results, into {names}"
        yield Repair("cache.not_written", text, names, _touching(KV, KR), after=every)
