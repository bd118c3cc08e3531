"""Arguments in whose place another tensor was meant: the weight of another norm or layer, the rows
of W_uv, a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_fusion.tools.by_hand.calls import Call
from mla_fusion.tools.by_hand.draws import fingerprint
from mla_fusion.tools.by_hand.repair import KR, KV, QUERY, Repair, touching
from mla_fusion.tools.by_hand.roles import Roles

Parameters = Iterable[tuple[str, Tensor]]


def of_others(roles: Roles, call: Call, parameters: Parameters) -> Iterator[Repair]:
    parameters = list(parameters)
    yield from _gammas(roles, call, parameters)
    yield from _weights(roles, call, parameters)
    yield from _caches(roles, call)


def _gammas(roles: Roles, call: Call, parameters: Parameters) -> Iterator[Repair]:
    for name, touched in roles.gammas.items():
        gamma = call.arguments.get(name)
        if not isinstance(gamma, Tensor):
            continue
        for source, vector in parameters:
            if vector.dim() == 1 and vector.numel() == gamma.numel():
                value = vector.detach().reshape(gamma.shape).to(gamma.dtype)
                text = f"{name} is not the norm's weight: {source} is"
                yield Repair("gamma.other", text, name, frozenset(touched), _given(name, value))


def _weights(roles: Roles, call: Call, parameters: Parameters) -> Iterator[Repair]:
    """Of the same numbers in another order, `tools.by_hand.columns` says what is wrong with the
    order.
    """
    touches = {
        roles.down_query: (QUERY,),
        roles.up: (QUERY,),
        roles.absorbed: (QUERY,),
        roles.down: (KV, KR),
    }
    for name, touched in touches.items():
        weight = call.arguments.get(name)
        if not isinstance(weight, Tensor) or roles.of_rows:
            continue
        mark = fingerprint(weight)
        for source, parameter in parameters:
            for rows, value in _as(weight, parameter.detach()):
                if value.dtype == weight.dtype and fingerprint(value) != mark:
                    text = f"{name} holds other numbers than {rows}{source}"
                    yield Repair(
                        "weight.other",
                        text,
                        name,
                        touching(*touched),
                        _given(name, value.contiguous()),
                    )


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
    if (
        parameter.dim() == 2
        and parameter.shape != weight.shape
        and parameter.T.shape == weight.shape
    ):
        yield "", parameter.T


def _caches(roles: Roles, call: Call) -> Iterator[Repair]:
    """Another tensor of the caller's that has the cache's shape: that of another layer, or the one
    that was copied.
    """
    for name, touched in ((roles.kv_cache, KV), (roles.kr_cache, KR)):
        cache = call.arguments.get(name)
        if not isinstance(cache, Tensor) or not cache.numel():
            continue
        mine = next((label for label, value in call.held.items() if _shares(value, cache)), None)
        for label, value in call.held.items():
            if (
                value.shape == cache.shape
                and value.dtype == cache.dtype
                and not _shares(value, cache)
            ):
                text = (
                    f"{name} is {mine or 'memory of its own (a copy?)'}; the model writes {label}"
                )
                yield Repair(
                    "cache.other",
                    text,
                    name,
                    touching(touched),
                    partial(_held, name, label),
                )


def _held(name: str, label: str, call: Call) -> dict[str, Any]:
    return {name: call.held[label]}


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _given(name: str, value: Tensor) -> Any:
    return lambda _: {name: value}


def parameters_of(*models: object) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by name, each once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for model in models:
        if isinstance(model, torch.nn.Module):
            for name, value in (*model.named_parameters(), *model.named_buffers()):
                found.setdefault(value.data_ptr(), (name, value))
    return list(found.values())
