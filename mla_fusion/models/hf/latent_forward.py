"""A module's own ``forward``, with absorbed attention.

The forward runs in a scope of its own. There, the attention function takes latents, the product
with the up projection is left out, and the two parts of the query are not joined. (The attention
function would split them again, and the pass would not see that the rotated part comes from RoPE.)
All else that the model does stays: scales, gates, indexers, its rotary function.

Each call checks that the module is still what ``optimize`` has seen. Replaced code raises
OptimizeError. An up projection that does more than multiply (LoRA, a hook, a bias, a quantisation)
is called as a module: latents are expanded, which is slower.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mla_fusion.models.hf.latent_attention import LatentForm, absorbed_attention, expanded
from mla_fusion.models.hf.stand_ins import (
    LatentKey,
    Overlay,
    SplitQuery,
    functions_of_torch,
    latent_cache,
    without_expansion,
)
from mla_fusion.models.refusal import OptimizeError
from mla_fusion.modes import has_hooks, is_call_of_torch

Attention = Callable[..., tuple[Tensor, Tensor | None]]
CACHE = "past_key_values"
IMPLEMENTATIONS = ("sdpa", "eager")
_SPARSE = "npu_sparse"  # an implementation under which forwards pass on an indexer's picks
TABLE, EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"
PICKS = "indices"  # the keyword of an attention function that takes an indexer's picks
# As torch defines them, whoever patches them later.
_PRODUCT, _LINEAR = nn.Linear.forward, nn.functional.linear
_SHARDING = "torch.distributed.tensor"  # its hooks only take a rank's share of a weight


def names_in(code: CodeType) -> Iterator[str]:
    """Yields the names that code looks up, and those of functions that are defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def words(code: Any) -> set[str]:
    """Returns the names that the code uses, those of keyword arguments included."""
    constants = (constant for constant in code.co_consts if isinstance(constant, tuple))
    keywords = (name for names in constants for name in names if isinstance(name, str))
    return {*code.co_names, *keywords}


@dataclass(eq=False)
class Functions:
    """A table like ``ALL_ATTENTION_FUNCTIONS``."""

    functions: Mapping[str, Attention]

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
    """Returns a copy of a forward that calls these attention functions.

    names  what other names mean in the copy
    """
    scope = source.__globals__ | names
    scope |= {TABLE: Functions(functions), EAGER: functions["eager"]}
    # torch.compile would look names up in the module of this name
    del scope["__name__"]
    # Code of its own: torch.compile keeps what it makes of a part of the code with the code, and
    # calls it by names that are in the scope of one function only.
    copied = FunctionType(
        source.__code__.replace(), scope, source.__name__, source.__defaults__, source.__closure__
    )
    copied.__kwdefaults__ = source.__kwdefaults__
    return copied


def latent_forward(
    kind: type[nn.Module], form: LatentForm, name: str = "self_attn"
) -> Callable[..., Any]:
    """Returns ``kind.forward`` (unbound) over latents, for modules of this form.

    name  of the module in its model, for messages

    The result raises OptimizeError ``forward.unknown`` if code that was seen here has been
    replaced since.
    """
    forward: Any = kind.forward
    source = inspect.unwrap(forward)
    scope = source.__globals__
    file, table = sys.modules.get(source.__module__), scope[TABLE]
    functions = {
        used: scope[used]
        for used in names_in(source.__code__)
        if isinstance(scope.get(used), FunctionType) or used == TABLE
        # code that was put together has a scope that is no file's
        if getattr(file, used, None) is scope[used]
    }
    registered = {used: table[used] for used in IMPLEMENTATIONS if used in table}
    attends = {
        used: _over_latents(usual, form, name)
        for used, usual in ({"eager": scope.get(EAGER)} | registered).items()
    }
    attends[_SPARSE] = attends["eager"]
    run = rescoped(source, attends, torch=functions_of_torch(form.dims))
    picks = PICKS in words(source.__code__) and form.takes_picks
    attributes = without_expansion(form)

    def require(is_unchanged: bool, code: str) -> None:
        if not is_unchanged:
            raise OptimizeError(
                "forward.unknown",
                f"{code} has been replaced since {name} was optimised: hf.revert(model), then "
                "hf.optimize(model) again",
            )

    def over_latents(module: Any, *args: Any, **kwargs: Any) -> Any:
        require(type(module).forward is forward, f"{type(module).__name__}.forward")
        for used, function in functions.items():
            require(getattr(file, used, None) is function, f"{used} of {kind.__module__}")
        for used, usual in registered.items():
            require(table[used] is usual, f"{TABLE}[{used!r}]")
        if form.expand_kv is None and kwargs.get(CACHE) is not None:
            kwargs = {**kwargs, CACHE: latent_cache(kwargs[CACHE])}
        overlay = Overlay(module, attributes)
        weight = absorbed_weight(module, form) if picks else None
        if (
            weight is not None
            and weight.device.type == "npu"
            and weight.dtype in (torch.bfloat16, torch.float16)
        ):
            config = Overlay(module.config, {"_attn_implementation": _SPARSE})
            overlay = Overlay(module, {**attributes, "config": config})
        return run(overlay, *args, **kwargs)

    return over_latents


def _over_latents(usual: Attention, form: LatentForm, name: str) -> Attention:
    """Returns an attention function that absorbs if this is cheaper, and else expands latents for
    the usual function.
    """

    def attend(
        overlay: Overlay,
        query: Any,
        keys: Any,
        values: Any,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = overlay.original
        # a cache returns latents; without a cache the forward passes its stand-in
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
    """Returns the up projection's weight, this rank's rows ``[N * (D + Dv), R]``, to be absorbed.

    Returns None if a call of the projection, or of ``expand_kv``, does more than the product with
    it. Compiled code sees changes as torch.compile does: it sees those of hooks only if dynamo
    guards hooks (``torch._dynamo.config.skip_nnmodule_hook_guards = False``).
    """
    up: Any = getattr(module, form.kv_up)
    is_product = (
        isinstance(up, nn.Linear)
        and _is_method(up, "forward", _PRODUCT)
        and nn.functional.linear is _LINEAR
        and is_call_of_torch(type(up).__call__)
        and up.bias is None
        and not has_hooks(up, but_of=_SHARDING)
        and (form.expand_kv is None or _is_method(module, "expand_kv", form.expand_kv))
    )
    weight = local(up.weight) if is_product else None
    # a tensor of another class has products of its own
    return weight if type(weight) in (Tensor, nn.Parameter) else None


def _is_method(module: nn.Module, name: str, function: Any) -> bool:
    """Returns True if the attribute of the module is this function of its class."""
    getattr(module, name)  # read, so that torch.compile guards what it is
    return getattr(type(module), name) is function and name not in vars(module)


def local(weight: Any) -> Tensor:
    """Returns this rank's share of a weight that is sharded by heads."""
    # not by attributes: dynamo traces a parameter as an ordinary tensor
    share: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return share
