"""A module's own ``forward``, with absorbed attention.

The code stays the module's: it runs in a scope of its own, in which the attention function gets latents and the two
parts of the query are not joined. (Joined, they would be taken apart again at once, and the pass would not see that
the rotated part is what RoPE gave.) So whatever else the model does, scales, gates, indexers, its rotary function, it
goes on doing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mla_fusion.models.hf.latent_attention import LatentDims, absorbed_attention
from mla_fusion.models.hf.latent_form import IMPLEMENTATIONS, LatentForm
from mla_fusion.models.refusal import OptimizeError

Attention = Callable[..., tuple[Tensor, Tensor | None]]


class SplitQuery:
    """``[B, N, S, D]`` and ``[B, N, S, Dr]`` in place of their concatenation."""

    def __init__(self, nope: Tensor, rope: Tensor) -> None:
        self.nope = nope
        self.rope = rope

    def __mul__(self, factor: Any) -> SplitQuery:
        return SplitQuery(self.nope * factor, self.rope * factor)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.nope.shape[:-1], self.nope.shape[-1] + self.rope.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.nope.dtype

    def joined(self) -> Tensor:
        return torch.cat((self.nope, self.rope), dim=-1)


def latent_forward(forward: Callable[..., Any], form: LatentForm) -> Callable[..., Any]:
    """``forward`` (unbound) for a module whose ``expand_kv`` gives back the latents."""
    source = inspect.unwrap(forward)
    names = set(_names(source.__code__))
    scope = {name: value for name, value in source.__globals__.items() if name in names}
    scope["__builtins__"] = source.__globals__["__builtins__"]
    scope["ALL_ATTENTION_FUNCTIONS"] = SimpleNamespace(
        get_interface=_interface(source.__globals__["ALL_ATTENTION_FUNCTIONS"], form)
    )
    scope["torch"] = SimpleNamespace(**{name: getattr(torch, name) for name in names if hasattr(torch, name)})
    scope["torch"].cat = _query_parts(form.dims)
    # No module's name: torch.compile would look names up in that module.
    again = FunctionType(source.__code__, scope, source.__name__, source.__defaults__, source.__closure__)
    again.__kwdefaults__ = source.__kwdefaults__
    return again


def _names(code: CodeType) -> Iterator[str]:
    """Names that the code and what is defined in it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _query_parts(dims: LatentDims) -> Callable[..., Any]:
    """``torch.cat``, but for the two parts of a query."""

    def cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
        if len(tensors) == 2 and dim == -1:
            nope, rope = tensors
            if nope.dim() == 4 and (nope.shape[-1], rope.shape[-1]) == (dims.nope, dims.rope):
                return SplitQuery(nope, rope)
        return torch.cat(list(tensors), dim=dim)

    return cat


def _interface(functions: Any, form: LatentForm) -> Callable[[str, Attention], Attention]:
    """``ALL_ATTENTION_FUNCTIONS.get_interface`` with latents in place of keys and values."""

    def get_interface(implementation: str, eager: Attention) -> Attention:
        if implementation not in IMPLEMENTATIONS:
            raise OptimizeError(
                "attention.implementation",
                f"attn_implementation is {implementation!r}; an optimised model needs sdpa or eager",
            )
        usual = functions.get_interface(implementation, eager)

        def attend(
            module: Any, query: Any, c_kv: Tensor, k_pe: Tensor, attention_mask: Tensor | None, **options: Any
        ) -> tuple[Tensor, Tensor | None]:
            length = query.shape[2]
            if form.dims.absorbs(length, c_kv.shape[2]) and (attention_mask is not None or length == 1):
                parts = query if isinstance(query, SplitQuery) else SplitQuery(*form.dims.split_query(query))
                return absorbed_attention(
                    parts.nope,
                    parts.rope,
                    c_kv,
                    k_pe,
                    local(getattr(module, form.kv_up).weight),
                    form.dims,
                    scaling=options.get("scaling") or (form.dims.nope + form.dims.rope) ** -0.5,
                    mask=attention_mask,
                    dropout=options.get("dropout", 0.0),
                )
            keys, values = form.expand(module, c_kv, k_pe)
            whole = query.joined() if isinstance(query, SplitQuery) else query
            return usual(module, whole, keys, values, attention_mask, **options)

        return attend

    return get_interface


def local(weight: Any) -> Tensor:
    """This rank's share of a weight that is sharded by heads."""
    share: Tensor = weight.to_local() if isinstance(weight, _SHARDED) else weight
    return share


def _sharded() -> tuple[type[Any], ...]:
    """DTensor, where torch has it (dynamo cannot tell by attributes: it traces a parameter as a plain one)."""
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.tensor import DTensor

    return (DTensor,)


_SHARDED = _sharded()
