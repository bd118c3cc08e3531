"""A module's own ``forward``, with absorbed attention.

The code stays the module's: it runs in a scope of its own, in which the attention function gets
latents, the product with the up projection is put off, and the two parts of the query are not
joined. (Joined, they would be taken apart again at once, and the pass would not see that the
rotated part is what RoPE gave.) So whatever else the model does, scales, gates, indexers, its
rotary function, it goes on doing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import itemgetter
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.fx.registered import names_in
from mla_fusion.models.features import ASKS_FOR_INTERFACE
from mla_fusion.models.hf.as_examined import (
    TABLE,
    AttentionFunctions,
    Code,
    absorbed_weight,
    expand,
    keywords,
    require_same_code,
    say_that_it_expands,
)
from mla_fusion.models.hf.latent_attention import absorbed_attention, sparse_attention
from mla_fusion.models.hf.latent_form import IMPLEMENTATIONS, LatentForm
from mla_fusion.models.hf.stand_ins import (
    SPARSE,
    LatentCache,
    LatentKey,
    LatentSelf,
    SplitQuery,
    cat_of,
    split,
)
from mla_fusion.models.refusal import OptimizeError

Attention = Callable[..., tuple[Tensor, Tensor | None]]
CACHE = "past_key_values"
EAGER = "eager_attention_forward"
# the keyword by which a forward gives its attention function what an indexer has picked
PICKS = "indices"


def latent_forward(
    kind: type[nn.Module], form: LatentForm, name: str = "self_attn"
) -> Callable[..., Any]:
    """``kind.forward`` (unbound), of modules of this form, over latents.

    name  of the module in its model, for messages

    The result raises OptimizeError ``forward.unknown`` where code that was examined has been
    replaced since.
    """
    forward = kind.forward
    source = inspect.unwrap(forward)
    names = set(names_in(source.__code__))
    scope = {name: value for name, value in source.__globals__.items() if name in names}
    scope["__builtins__"] = source.__globals__["__builtins__"]
    functions = Functions(AttentionFunctions(source), form, name)
    code = Code.of(forward, source, names)
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
    picks = PICKS in keywords(source.__code__) and form.is_for_sparse_operator
    place = list(inspect.signature(source).parameters).index(CACHE) - 1

    def over_latents(module: Any, *args: Any, **kwargs: Any) -> Any:
        require_same_code(module, name, code)
        if not form.after_cache:
            if kwargs.get(CACHE) is not None:
                kwargs = {**kwargs, CACHE: LatentCache(kwargs[CACHE])}
            elif len(args) > place and args[place] is not None:
                args = (*args[:place], LatentCache(args[place]), *args[place + 1 :])
        hands_over = picks and functions.functions.stands(module.config._attn_implementation)
        return again(LatentSelf(module, form, hands_over), *args, **kwargs)

    return over_latents


class Functions:
    """``ALL_ATTENTION_FUNCTIONS`` with latents in place of keys and values."""

    def __init__(self, functions: AttentionFunctions, form: LatentForm, name: str) -> None:
        self.functions = functions
        self.form = form
        self.name = name

    def get_interface(self, implementation: str, eager: Attention) -> Attention:
        if implementation == SPARSE:
            return self.over_latents(eager)
        return self._usual(implementation, lambda table: table.get_interface(implementation, eager))

    def __getitem__(self, implementation: str) -> Attention:
        return self._usual(implementation, itemgetter(implementation))

    def _usual(self, implementation: str, looked_up: Callable[[Any], Attention]) -> Attention:
        if implementation not in IMPLEMENTATIONS:
            raise OptimizeError(
                "attention.implementation",
                f"attn_implementation is {implementation!r}; an optimised model needs sdpa or "
                "eager",
            )
        usual = looked_up(self.functions.table)
        return self.over_latents(usual, self.functions.is_known(implementation, usual))

    def over_latents(self, usual: Attention, is_known: bool = True) -> Attention:
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
            module = itself.module
            # Without a cache they come as the forward put them off.
            c_kv, k_pe = (keys.c_kv, keys.k_pe) if isinstance(keys, LatentKey) else (keys, values)
            length = query.shape[2]
            picks = options.get(PICKS)
            weight = absorbed_weight(module, form) if is_known else None
            is_split = isinstance(query, SplitQuery)
            parts = query if is_split else SplitQuery(*form.dims.split_query(query))
            latents = parts.nope, parts.rope, c_kv, k_pe
            scaling = options.get("scaling")
            if picks is not None:
                assert weight is not None, "LatentSelf hands picks over only where there is one"
                return sparse_attention(
                    *latents, weight, form.dims, picks,
                    scaling=options["scaling"], factor=parts.factor, mask=attention_mask,
                )  # fmt: skip
            cheaper = form.dims.absorbs(length, c_kv.shape[2]) and (
                attention_mask is not None or length == 1
            )
            if cheaper and weight is None and not torch.compiler.is_compiling():
                say_that_it_expands(name, form)
            if cheaper and weight is not None:
                usual_scaling = (form.dims.nope + form.dims.rope) ** -0.5
                return absorbed_attention(
                    *latents, weight, form.dims,
                    scaling=usual_scaling if scaling is None else scaling,
                    factor=parts.factor, mask=attention_mask, dropout=options.get("dropout", 0.0),
                )  # fmt: skip
            expanded = expand(module, form, c_kv, k_pe)
            whole = query.joined() if is_split else query
            return usual(module, whole, *expanded, attention_mask, **options)

        return attend
