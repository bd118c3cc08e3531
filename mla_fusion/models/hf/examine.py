"""Is this module an MLA attention whose latents can be attended directly? Found by what it holds
and does.

A child that is a projection from ``kv_lora_rank`` may be what expands latents. Then the module's
own forward is run on random hidden states, and what it hands to its attention function is read: the
keys and values of all heads. The converted forward is run too, and what it gives to its cache is
read: the latents. The keys must be ``[W_uk c_kv | k_pe]`` and the values ``W_uv c_kv``, W_uk and
W_uv being the projection's own weights. Both must come to their end, with several tokens and with
one.
"""

from __future__ import annotations

import copy
import dis
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.models.features import advice
from mla_fusion.models.hf.latent_attention import LatentDims, LatentForm, expanded
from mla_fusion.models.hf.latent_forward import (
    CACHE,
    IMPLEMENTATIONS,
    TABLE,
    latent_forward,
    local,
    rescoped,
    words,
)
from mla_fusion.models.refusal import OptimizeError

TOKENS = 3
# what forwards call it when attention does more
BEYOND_SOFTMAX = {"s_aux", "sinks", "softcap", "logits_soft_cap"}


def is_attention(module: nn.Module) -> bool:
    """Attentions know their place in the cache, and the scale of their scores or the rank of their
    latents.
    """
    known = hasattr(module, "scaling") or hasattr(module, "kv_lora_rank")
    return known and hasattr(module, "layer_idx") and len(list(_projections(module))) >= 3


def examine(module: nn.Module) -> LatentForm:
    """The latent form of an attention; raises OptimizeError where it has none. Nothing is
    changed.
    """
    projections = dict(_projections(module))
    rank = getattr(module, "kv_lora_rank", None)
    if rank is None:
        raise OptimizeError("attention.not_mla", f"its projections are {', '.join(projections)}")
    _require_known_forward(module)
    if not module.qk_rope_head_dim:
        raise OptimizeError("rope.absent", f"qk_rope_head_dim is {module.qk_rope_head_dim}")
    implementation = module.config._attn_implementation  # type: ignore[union-attr]
    if implementation not in IMPLEMENTATIONS:
        raise OptimizeError(
            "attention.implementation",
            f"attn_implementation is {implementation!r}, sdpa or eager needed",
        )
    refusals = []
    for name, weight in projections.items():
        if weight.shape[1] == rank:
            try:
                with torch.no_grad():
                    return _probe(module, name)
            except OptimizeError as refusal:
                refusals.append(refusal)
    if not refusals:
        wanted = f"no projection from kv_lora_rank {rank}: {', '.join(projections)}"
        raise OptimizeError("kv_up.absent", wanted)
    # Widths that fit by chance say only that these are no latents.
    raise min(refusals, key=lambda refusal: refusal.code in ("kv_up.differs", "cache.expanded"))


def _projections(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Children that hold a matrix."""
    for name, child in module.named_children():
        weight = getattr(child, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            yield name, weight


def _require_known_forward(module: nn.Module) -> None:
    """Raises OptimizeError where the module's code cannot run with another attention function."""
    forward = inspect.unwrap(type(module).forward)
    code = forward.__code__
    steps = {(step.opname, step.argval) for step in dis.get_instructions(code)}
    if ("LOAD_GLOBAL", TABLE) not in steps or TABLE not in forward.__globals__:
        own = ", it has a softmax of its own" if "softmax" in words(code) else ""
        raise OptimizeError(
            "cache.expanded",
            f"its forward does not call {TABLE} as a name of its file{own}{advice(module)}",
        )
    if "forward" in vars(module):
        raise OptimizeError("forward.unknown", "forward is replaced")
    stored = sorted(name for kind, name in steps if kind == "STORE_ATTR")
    if stored:
        raise OptimizeError(
            "forward.unknown", f"forward keeps {', '.join(stored)} from one call to the next"
        )
    beyond = sorted(BEYOND_SOFTMAX & words(code))
    if beyond:
        raise OptimizeError(
            "attention.differs", f"forward hands {', '.join(beyond)} to its attention"
        )


class _Kept:
    """A cache of one layer that holds nothing yet: it keeps what it is given, and gives it back."""

    states: tuple[Any, ...] = ()

    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self.states = keys, values
        return self.states

    def update_indexer(self, states: Any, *args: Any, **kwargs: Any) -> Any:
        return states


def _probe(module: nn.Module, name: str) -> LatentForm:
    """The form of a module whose child ``name`` seems to expand latents; raises OptimizeError where
    it has none.
    """
    up: Any = getattr(module, name)
    kind, weight = type(module), local(up.weight)
    floating = weight.is_floating_point() and weight.dtype.itemsize > 1
    if not floating or type(up).forward is not nn.Linear.forward:
        raise OptimizeError(
            "kv_up.weight", f"{name} is {type(up).__name__} with a weight of {weight.dtype}"
        )
    if up.bias is not None:
        raise OptimizeError("kv_up.bias", f"{name} has a bias")
    handed: list[Tensor] = []

    def attend(module: Any, query: Tensor, *given: Any, **options: Any) -> tuple[Tensor, None]:
        handed[:] = given[:2]
        batch, heads, tokens, _ = query.shape
        return query.new_zeros(batch, tokens, heads, given[1].shape[-1]), None

    own = rescoped(inspect.unwrap(kind.forward), dict.fromkeys(IMPLEMENTATIONS, attend))
    errors = []
    for complex_tables in (False, True):
        try:
            given = arguments_of(module, weight, complex_tables)
            own(_fresh(module), **given | {CACHE: _Kept()})
            break
        except Exception as error:  # code of any kind: whatever it raises, it cannot be asked
            errors.append(described(error))
    else:
        message = f"its forward cannot be run as transformers would: {errors[0]}{advice(module)}"
        raise OptimizeError("cache.expanded", message)
    _require_attended(handed)
    keys, values = handed
    heads, rope = keys.shape[1], int(module.qk_rope_head_dim)  # type: ignore[arg-type]
    dims = LatentDims(weight.shape[1], rope, keys.shape[-1] - rope, values.shape[-1])
    if weight.shape[0] != heads * (dims.nope + dims.value):
        raise OptimizeError(
            "kv_up.differs",
            f"keys {list(keys.shape)} and values {list(values.shape)} are not of {name}",
        )
    form = LatentForm(dims, heads, name, getattr(kind, "expand_kv", None), complex_tables)
    for tokens in (TOKENS, 1):
        handed.clear()
        cache, given = _Kept(), arguments_of(module, weight, complex_tables, tokens=tokens)
        try:
            own(_fresh(module), **given | {CACHE: _Kept()})
            latent_forward(kind, form)(_fresh(module), **given | {CACHE: cache})
            c_kv, k_pe = cache.states
        except Exception as error:  # code of any kind
            message = "its forward does more with keys and values than cache them: "
            raise OptimizeError(
                "cache.expanded", f"{message}{described(error)}{advice(module)}"
            ) from error
        _require_attended(handed)
        if not weight.is_meta and not _is_product(handed, c_kv, k_pe, weight, dims):
            raise OptimizeError(
                "kv_up.differs", f"the module makes other keys or values than the weight of {name}"
            )
    return form


def _fresh(module: nn.Module) -> nn.Module:
    """A copy with the same parameters: what a child keeps from one call to the next (an indexer its
    keys, in some releases) does not stay in the model."""
    shared = (*module.parameters(), *module.buffers(), module.config)
    return copy.deepcopy(module, {id(item): item for item in shared})


def _require_attended(handed: list[Tensor]) -> None:
    if not handed:
        raise OptimizeError(
            "attention.differs", "its forward does not hand all to its attention function"
        )


def _is_product(
    found: list[Tensor], c_kv: Tensor, k_pe: Tensor, weight: Tensor, dims: LatentDims
) -> bool:
    """Are keys and values those of ``c_kv @ weight.T``, but for rounding and the order of a float32
    sum?"""
    product = nn.functional.linear(c_kv.double(), weight.double())
    wanted = expanded(product, k_pe.double(), dims)
    own, sums = torch.finfo(weight.dtype).eps, dims.rank * torch.finfo(torch.float32).eps
    return all(
        got.shape == want.shape and (got - want).abs().max() <= (own + sums) * want.abs().max()
        for got, want in zip(found, wanted, strict=True)
    )


def arguments_of(
    module: Any,
    like: Tensor,
    complex_tables: bool,
    *,
    batch: int = 1,
    tokens: int = TOKENS,
    length: int | None = None,
) -> dict[str, Any]:
    """Arguments of the module's forward but its cache, those that its signature has. What else it
    requires is what layers hand to each other: an empty dictionary.

    like    a tensor of the dtype and on the device that hidden states have
    length  tokens in the cache, with the new ones; None: no others
    """
    positions = torch.arange(tokens, device=like.device)
    angles = _random(like, 1, tokens, module.qk_rope_head_dim // 2).float()
    both = torch.cat((angles, angles), dim=-1)
    arguments = {
        "hidden_states": _random(like, batch, tokens, module.config.hidden_size),
        "position_embeddings": torch.polar(torch.ones_like(angles), angles)
        if complex_tables
        else (both.cos().to(like.dtype), both.sin().to(like.dtype)),
        "attention_mask": like.new_zeros(batch, 1, tokens, length or tokens),
        "position_ids": positions.unsqueeze(0),
        "cache_position": positions,
        "prev_topk_indices": positions.expand(batch, tokens, -1),
    }
    _, *taken = inspect.signature(inspect.unwrap(type(module).forward)).parameters.values()
    return {
        item.name: arguments.get(item.name, {})
        for item in taken
        if item.name in arguments
        or (item.default is item.empty and item.kind is item.POSITIONAL_OR_KEYWORD)
    }


def _random(like: Tensor, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(like.device, like.dtype)


def described(error: BaseException) -> str:
    """Its class, and the first line that it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
