"""Arguments in whose place another tensor was meant: the weight of another norm or layer, the rows
of W_uv, a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mla_fusion.tools.by_hand.calls import Call, Repair, instead
from mla_fusion.tools.by_hand.draws import fingerprint
from mla_fusion.tools.by_hand.memory import place
from mla_fusion.tools.by_hand.roles import KR, KV, QUERY

Parameters = Sequence[tuple[str, Tensor]]


def of_others(call: Call, parameters: Parameters) -> Iterator[Repair]:
    yield from _gammas(call, parameters)
    yield from _weights(call, parameters)
    yield from _caches(call)


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
