"""A module's own ``forward``, with absorbed attention.

The code stays the module's: it runs in a scope of its own, in which the attention function gets
latents, the product with the up projection is put off, and the two parts of the query are not
joined. (Joined, they would be taken apart again at once, and the pass would not see that the
rotated part is what RoPE gave.) So whatever else the model does, scales, gates, indexers, its
rotary function, it goes on doing.

Each call looks whether the module is still what ``optimize`` has seen. Replaced code is an
OptimizeError. An up projection that does more than multiply (LoRA, a hook, a bias, a quantisation)
is called as a module: latents are expanded, which is slower.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mla_fusion.fx.registered import names_in
from mla_fusion.models.hf.latent_attention import LatentForm, absorbed_attention, expanded
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
from mla_fusion.modes import has_hooks, is_call_of_torch

Attention = Callable[..., tuple[Tensor, Tensor | None]]
CACHE = "past_key_values"
IMPLEMENTATIONS = ("sdpa", "eager")
TABLE, EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"
# the keyword by which a forward gives its attention function what an indexer has picked
PICKS = "indices"
# As torch has them, whoever patches them later.
_PRODUCT, _LINEAR = nn.Linear.forward, nn.functional.linear
_SHARDING = "torch.distributed.tensor"  # its hooks hand over each rank's share, and nothing else


def words(code: Any) -> set[str]:
    """Names that the code uses, those of keyword arguments included."""
    constants = (constant for constant in code.co_consts if isinstance(constant, tuple))
    keywords = (name for names in constants for name in names if isinstance(name, str))
    return {*code.co_names, *keywords}


class Functions:
    """``ALL_ATTENTION_FUNCTIONS`` with other functions."""

    def __init__(self, functions: Mapping[str, Attention]) -> None:
        self.functions = functions

    def get_interface(self, implementation: str, eager: Any = None) -> Attention:
        if implementation not in self.functions:
            raise OptimizeError(
                "attention.implementation",
                f"attn_implementation is {implementation!r}; an optimised model needs sdpa or "
                "eager",
            )
        return self.functions[implementation]

    def __getitem__(self, implementation: str) -> Attention:
        return self.get_interface(implementation)


def rescoped(source: FunctionType, functions: Mapping[str, Attention], **names: Any) -> Any:
    """A copy of a forward that calls these attention functions, and finds these things by their
    names."""
    used = set(names_in(source.__code__))
    scope = {name: value for name, value in source.__globals__.items() if name in used}
    scope["__builtins__"] = source.__globals__["__builtins__"]
    scope |= {TABLE: Functions(functions), EAGER: functions["eager"], **names}
    # No module's name: torch.compile would look names up in that module. And code of its own: what
    # torch.compile makes of a part of the code it keeps with the code, and calls by names that it
    # has put into the scope of one function.
    again = FunctionType(
        source.__code__.replace(), scope, source.__name__, source.__defaults__, source.__closure__
    )
    again.__kwdefaults__ = source.__kwdefaults__
    return again


def latent_forward(
    kind: type[nn.Module], form: LatentForm, name: str = "self_attn"
) -> Callable[..., Any]:
    """``kind.forward`` (unbound), of modules of this form, over latents.

    name  of the module in its model, for messages

    The result raises OptimizeError ``forward.unknown`` where code that was seen here has been
    replaced since.
    """
    forward: Any = kind.forward
    source = inspect.unwrap(forward)
    scope, names = source.__globals__, set(names_in(source.__code__))
    file, table = sys.modules.get(source.__module__), scope[TABLE]
    functions = {called: scope[called] for called in names if called in scope}
    seen = [
        (called, function)
        for called, function in functions.items()
        if isinstance(function, FunctionType) or called == TABLE
        # of a forward that was put together, the scope is no file's
        if getattr(file, called, None) is function
    ]
    registered = {called: table[called] for called in IMPLEMENTATIONS if called in table}
    attends = {
        called: _over_latents(usual, form, name)
        for called, usual in ({"eager": scope.get(EAGER)} | registered).items()
    }
    attends[SPARSE] = attends["eager"]
    of_torch = {called: getattr(torch, called) for called in names if hasattr(torch, called)}
    of_torch |= {"cat": cat_of(form.dims), "split": split}
    again = rescoped(source, attends, torch=SimpleNamespace(**of_torch))
    picks = PICKS in words(source.__code__) and form.takes_picks
    instead = expansion_put_off(form)

    def require(known: bool, what: str) -> None:
        if not known:
            raise OptimizeError(
                "forward.unknown",
                f"{what} has been replaced since {name} was optimised: hf.revert(model), then "
                "hf.optimize(model) again",
            )

    def over_latents(module: Any, *args: Any, **kwargs: Any) -> Any:
        require(type(module).forward is forward, f"{type(module).__name__}.forward")
        for called, function in seen:
            require(getattr(file, called, None) is function, f"{called} of {kind.__module__}")
        for called, usual in registered.items():
            require(table[called] is usual, f"{TABLE}[{called!r}]")
        if form.expand_kv is None and kwargs.get(CACHE) is not None:
            kwargs = {**kwargs, CACHE: LatentCache(kwargs[CACHE])}
        itself = LatentSelf(module, instead)
        if picks:
            weight = absorbed_weight(module, form)
            if (
                weight is not None
                and weight.device.type == "npu"
                and weight.dtype in (torch.bfloat16, torch.float16)
            ):
                itself = LatentSelf(module, {**instead, "config": SparseConfig(module.config)})
        return again(itself, *args, **kwargs)

    return over_latents


def _over_latents(usual: Attention, form: LatentForm, name: str) -> Attention:
    """An attention function that absorbs where this is cheaper, and otherwise expands for the usual
    one.
    """

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
        length, picks = query.shape[2], options.get(PICKS)
        if not isinstance(query, SplitQuery):
            query = SplitQuery(query[..., : form.dims.nope], query[..., form.dims.nope :])
        absorbs = form.dims.absorbs(length, c_kv.shape[2])
        if picks is not None or (absorbs and (attention_mask is not None or length == 1)):
            weight = absorbed_weight(module, form)
            if weight is not None:
                scaling = options.get("scaling")
                return absorbed_attention(
                    query.nope, query.rope, c_kv, k_pe, weight, form.dims,
                    scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
                    factor=query.factor, mask=attention_mask,
                    dropout=options.get("dropout", 0.0), picks=picks,
                )  # fmt: skip
            if not torch.compiler.is_compiling():
                warnings.warn(
                    f"{name}.{form.kv_up} is no plain Linear any more (a hook, a wrapper, a "
                    "bias, a quantisation, a patch of torch): latents are expanded to all "
                    "heads at each step",
                    stacklevel=2,
                )
        if form.expand_kv is not None:
            expansion = module.expand_kv(c_kv, k_pe)
        else:
            expansion = expanded(getattr(module, form.kv_up)(c_kv), k_pe, form.dims)
        return usual(module, query.joined(), *expansion, attention_mask, **options)

    return attend


def absorbed_weight(module: nn.Module, form: LatentForm) -> Tensor | None:
    """The up projection's weight, this rank's rows ``[N * (D + Dv), R]``, to be absorbed.

    None where calling the projection, or ``expand_kv``, does anything beside the product with it.
    Compiled code meets changes as torch.compile does: those of hooks only where dynamo guards hooks
    (``torch._dynamo.config.skip_nnmodule_hook_guards = False``).
    """
    up: Any = getattr(module, form.kv_up)
    if not isinstance(up, nn.Linear) or not _is_method(up, "forward", _PRODUCT):
        return None
    if nn.functional.linear is not _LINEAR or not is_call_of_torch(type(up).__call__):
        return None
    if up.bias is not None or has_hooks(up, but_of=_SHARDING):
        return None
    if form.expand_kv is not None and not _is_method(module, "expand_kv", form.expand_kv):
        return None
    weight = local(up.weight)
    # a tensor of another class has products of its own
    return weight if type(weight) in (Tensor, nn.Parameter) else None


def _is_method(module: nn.Module, name: str, function: Any) -> bool:
    """Is an attribute of a module this function of its class?"""
    getattr(module, name)  # read, so that torch.compile guards what it is
    return getattr(type(module), name) is function and name not in vars(module)


def local(weight: Any) -> Tensor:
    """This rank's share of a weight that is sharded by heads."""
    # not by attributes: dynamo traces a parameter as a plain one
    share: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return share
