"""A module's own ``forward``, with absorbed attention.

The code stays the module's: it runs in a scope of its own, in which the attention function gets
latents, the product with the up projection is put off, and the two parts of the query are not
joined. (Joined, they would be taken apart again at once, and the pass would not see that the
rotated part is what RoPE gave.) So whatever else the model does, scales, gates, indexers, its
rotary function, it goes on doing.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.fx.registered import names_in
from mla_fusion.models.attention import sparse
from mla_fusion.models.features import ASKS_FOR_INTERFACE
from mla_fusion.models.hf.latent_attention import (
    LatentForm,
    absorbed_attention,
    expanded,
    sparse_attention,
)
from mla_fusion.models.hf.seen import IMPLEMENTATIONS, TABLE, Seen, absorbed_weight
from mla_fusion.models.hf.stand_ins import (
    SPARSE,
    LatentCache,
    LatentKey,
    LatentSelf,
    SparseConfig,
    SplitQuery,
    cat_of,
    expansion_put_off,
    split,
)
from mla_fusion.models.refusal import OptimizeError

Attention = Callable[..., tuple[Tensor, Tensor | None]]
CACHE = "past_key_values"
EAGER = "eager_attention_forward"
# the keyword by which a forward gives its attention function what an indexer has picked
PICKS = "indices"


def words(code: Any) -> set[str]:
    """Names that the code uses, those of keyword arguments included."""
    constants = (constant for constant in code.co_consts if isinstance(constant, tuple))
    keywords = (name for names in constants for name in names if isinstance(name, str))
    return {*code.co_names, *keywords}


def latent_forward(
    kind: type[nn.Module], form: LatentForm, name: str = "self_attn"
) -> Callable[..., Any]:
    """``kind.forward`` (unbound), of modules of this form, over latents.

    name  of the module in its model, for messages

    The result raises OptimizeError ``forward.unknown`` where code that was seen here has been
    replaced since.
    """
    source = inspect.unwrap(kind.forward)
    names = set(names_in(source.__code__))
    scope = {name: value for name, value in source.__globals__.items() if name in names}
    scope["__builtins__"] = source.__globals__["__builtins__"]
    seen = Seen(kind, source, names)
    functions = Functions(seen.attend, form, name)
    scope[TABLE] = functions
    if not ASKS_FOR_INTERFACE.has(names) and EAGER in scope:
        scope[EAGER] = functions.over_latents(scope[EAGER])
    scope["torch"] = SimpleNamespace(
        **{name: getattr(torch, name) for name in names if hasattr(torch, name)}
    )
    scope["torch"].cat = cat_of(form.dims)
    scope["torch"].split = split
    # No module's name: torch.compile would look names up in that module. And code of its own: what
    # torch.compile makes of a part of the code it keeps with the code, and calls by names that it
    # has put into the scope of one function.
    again = FunctionType(
        source.__code__.replace(), scope, source.__name__, source.__defaults__, source.__closure__
    )
    again.__kwdefaults__ = source.__kwdefaults__
    picks = (
        PICKS in words(source.__code__)
        and sparse.is_there()
        and sparse.takes(form.heads, form.dims.rank, form.dims.rope)
    )
    place = list(inspect.signature(source).parameters).index(CACHE) - 1
    instead = expansion_put_off(form)

    def over_latents(module: Any, *args: Any, **kwargs: Any) -> Any:
        seen.require(module, name)
        if not form.after_cache:
            if kwargs.get(CACHE) is not None:
                kwargs = {**kwargs, CACHE: LatentCache(kwargs[CACHE])}
            elif len(args) > place and args[place] is not None:
                args = (*args[:place], LatentCache(args[place]), *args[place + 1 :])
        itself = LatentSelf(module, instead)
        if picks:
            weight = absorbed_weight(module, form)
            if weight is not None and sparse.runs_on(weight):
                itself = LatentSelf(module, {**instead, "config": SparseConfig(module.config)})
        return again(itself, *args, **kwargs)

    return over_latents


class Functions:
    """``ALL_ATTENTION_FUNCTIONS`` with latents in place of keys and values."""

    def __init__(self, known: dict[str, Attention], form: LatentForm, name: str) -> None:
        self.known = known
        self.form = form
        self.name = name

    def get_interface(self, implementation: str, eager: Any = None) -> Attention:
        if implementation not in (SPARSE, *IMPLEMENTATIONS):
            raise OptimizeError(
                "attention.implementation",
                f"attn_implementation is {implementation!r}; an optimised model needs sdpa or "
                "eager",
            )
        return self.over_latents(self.known.get(implementation, eager))

    def __getitem__(self, implementation: str) -> Attention:
        return self.get_interface(implementation)

    def over_latents(self, usual: Attention) -> Attention:
        """An attention function that absorbs where this is cheaper, and otherwise expands for the
        usual one.
        """
        form, name = self.form, self.name

        def attend(
            itself: LatentSelf,
            query: Any,
            keys: Any,
            values: Any,
            attention_mask: Tensor | None,
            **options: Any,
        ) -> tuple[Tensor, Tensor | None]:
            module: Any = itself.module
            # Without a cache they come as the forward put them off.
            c_kv, k_pe = (keys.c_kv, keys.k_pe) if isinstance(keys, LatentKey) else (keys, values)
            length = query.shape[2]
            picks = options.get(PICKS)
            weight = absorbed_weight(module, form)
            if not isinstance(query, SplitQuery):
                query = SplitQuery(*form.dims.split_query(query))
            latents = query.nope, query.rope, c_kv, k_pe
            if picks is not None:
                assert weight is not None, "picks are handed over only where there is one"
                return sparse_attention(
                    *latents, weight, form.dims, picks,
                    scaling=options["scaling"], factor=query.factor, mask=attention_mask,
                )  # fmt: skip
            if form.dims.absorbs(length, c_kv.shape[2]) and (
                attention_mask is not None or length == 1
            ):
                if weight is not None:
                    scaling = options.get("scaling")
                    usual_scaling = (form.dims.nope + form.dims.rope) ** -0.5
                    return absorbed_attention(
                        *latents, weight, form.dims,
                        scaling=usual_scaling if scaling is None else scaling, factor=query.factor,
                        mask=attention_mask, dropout=options.get("dropout", 0.0),
                    )  # fmt: skip
                if not torch.compiler.is_compiling():
                    warnings.warn(
                        f"{name}.{form.kv_up} is no plain Linear any more (a hook, a wrapper, a "
                        "bias, a quantisation, a patch of torch): latents are expanded to all "
                        "heads at each step",
                        stacklevel=2,
                    )
            if form.after_cache:
                expansion = module.expand_kv(c_kv, k_pe)
            else:
                expansion = expanded(getattr(module, form.kv_up)(c_kv), k_pe, form.dims)
            return usual(module, query.joined(), *expansion, attention_mask, **options)

        return attend
