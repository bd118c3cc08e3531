"""Finds out, from what a module holds and does, whether it is an MLA attention over latents.

A child that is a projection from ``kv_lora_rank`` may expand latents. The module's own forward is
run on random hidden states, and passes keys and values of all heads to its attention function. The
converted forward is run too, and passes latents to its cache. The keys must be ``[W_uk c_kv |
k_pe]`` and the values ``W_uv c_kv``, with the projection's own weights W_uk and W_uv. Both forwards
must finish, with several tokens and with one.
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
from mla_fusion.report.text_tables import first_line

TOKENS = 3
# arguments of attention functions that do more than a softmax
BEYOND_SOFTMAX = {"s_aux", "sinks", "softcap", "logits_soft_cap"}


def is_attention(module: nn.Module) -> bool:
    """Returns True if the module knows its place in the cache, and the scale of its scores or the
    rank of its latents.
    """
    is_known = hasattr(module, "scaling") or hasattr(module, "kv_lora_rank")
    return is_known and hasattr(module, "layer_idx") and len(list(_projections(module))) >= 3


def examine(module: nn.Module) -> LatentForm:
    """Returns the latent form of an attention, and changes nothing.

    Raises OptimizeError if it has none.
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
        message = f"no projection from kv_lora_rank {rank}: {', '.join(projections)}"
        raise OptimizeError("kv_up.absent", message)
    # a projection whose width fits by chance gives these two codes, which say less
    raise min(refusals, key=lambda refusal: refusal.code in ("kv_up.differs", "cache.expanded"))


def _projections(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the children that hold a matrix, with their names."""
    for name, child in module.named_children():
        weight = getattr(child, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            yield name, weight


def _require_known_forward(module: nn.Module) -> None:
    """Raises OptimizeError if the module's code cannot run with another attention function."""
    forward = inspect.unwrap(type(module).forward)
    code = forward.__code__
    steps = {(step.opname, step.argval) for step in dis.get_instructions(code)}
    if ("LOAD_GLOBAL", TABLE) not in steps or TABLE not in forward.__globals__:
        reason = ", it has a softmax of its own" if "softmax" in words(code) else ""
        raise OptimizeError(
            "cache.expanded",
            f"its forward does not call {TABLE} as a name of its file{reason}{advice(module)}",
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


class _EmptyCache:
    """A cache of one layer that holds no earlier tokens: ``update`` returns its arguments."""

    states: tuple[Any, ...] = ()

    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self.states = keys, values
        return self.states

    def update_indexer(self, states: Any, *args: Any, **kwargs: Any) -> Any:
        return states


def _probe(module: nn.Module, name: str) -> LatentForm:
    """Returns the form of a module whose child ``name`` may expand latents.

    Raises OptimizeError if it has none.
    """
    up: Any = getattr(module, name)
    kind, weight = type(module), local(up.weight)
    is_floating = weight.is_floating_point() and weight.dtype.itemsize > 1
    if not is_floating or type(up).forward is not nn.Linear.forward:
        raise OptimizeError(
            "kv_up.weight", f"{name} is {type(up).__name__} with a weight of {weight.dtype}"
        )
    if up.bias is not None:
        raise OptimizeError("kv_up.bias", f"{name} has a bias")
    attended: list[Tensor] = []  # keys and values

    def attend(
        module: Any, query: Tensor, keys: Tensor, values: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, None]:
        attended[:] = keys, values
        batch, heads, tokens, _ = query.shape
        return query.new_zeros(batch, tokens, heads, values.shape[-1]), None

    def run(forward: Any, complex_tables: bool, tokens: int) -> tuple[Any, ...]:
        """Returns what a forward caches of random hidden states."""
        cache = _EmptyCache()
        arguments = arguments_of(module, weight, complex_tables, tokens=tokens)
        forward(_shallow_copy(module), **arguments | {CACHE: cache})
        return cache.states

    own_forward = rescoped(inspect.unwrap(kind.forward), dict.fromkeys(IMPLEMENTATIONS, attend))
    errors = []
    for complex_tables in (False, True):
        try:
            run(own_forward, complex_tables, TOKENS)
            break
        except Exception as error:  # code of any kind raises anything
            errors.append(first_line(error))
    else:
        message = f"its forward cannot be run as transformers would: {errors[0]}{advice(module)}"
        raise OptimizeError("cache.expanded", message)
    _require_attended(attended)
    keys, values = attended
    heads, rope = keys.shape[1], int(module.qk_rope_head_dim)  # type: ignore[arg-type]
    dims = LatentDims(weight.shape[1], rope, keys.shape[-1] - rope, values.shape[-1])
    if weight.shape[0] != heads * (dims.nope + dims.value):
        raise OptimizeError(
            "kv_up.differs",
            f"keys {list(keys.shape)} and values {list(values.shape)} are not of {name}",
        )
    form = LatentForm(dims, heads, name, getattr(kind, "expand_kv", None), complex_tables)
    for tokens in (TOKENS, 1):
        attended.clear()
        try:
            run(own_forward, complex_tables, tokens)
            c_kv, k_pe = run(latent_forward(kind, form), complex_tables, tokens)
        except Exception as error:  # code of any kind
            message = "its forward does more with keys and values than cache them: "
            raise OptimizeError(
                "cache.expanded", f"{message}{first_line(error)}{advice(module)}"
            ) from error
        _require_attended(attended)
        if not weight.is_meta and not _is_product(attended, c_kv, k_pe, weight, dims):
            raise OptimizeError(
                "kv_up.differs", f"the module makes other keys or values than the weight of {name}"
            )
    return form


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Returns a copy with the same parameters.

    Children keep state from one call to the next (an indexer its keys, in some releases). The state
    of a probe must not stay in the model.
    """
    shared = (*module.parameters(), *module.buffers(), module.config)
    return copy.deepcopy(module, {id(item): item for item in shared})


def _require_attended(attended: list[Tensor]) -> None:
    if not attended:
        raise OptimizeError(
            "attention.differs", "its forward does not hand all to its attention function"
        )


def _is_product(
    attended: list[Tensor], c_kv: Tensor, k_pe: Tensor, weight: Tensor, dims: LatentDims
) -> bool:
    """Returns True if keys and values are those of ``c_kv @ weight.T``, but for rounding and the
    order of a float32 sum.
    """
    product = nn.functional.linear(c_kv.double(), weight.double())
    expected = expanded(product, k_pe.double(), dims)
    rounding, sums = torch.finfo(weight.dtype).eps, dims.rank * torch.finfo(torch.float32).eps
    return all(
        actual.shape == target.shape
        and (actual - target).abs().max() <= (rounding + sums) * target.abs().max()
        for actual, target in zip(attended, expected, strict=True)
    )


def arguments_of(
    module: Any,
    like: Tensor,
    complex_tables: bool,
    *,
    batch: int = 1,
    tokens: int,
    length: int | None = None,
) -> dict[str, Any]:
    """Returns the arguments that the signature of the module's forward has, without its cache.

    Other arguments that it requires are empty dictionaries: layers pass them to each other.

    like    a tensor of the dtype and on the device that hidden states have
    length  tokens in the cache, the new tokens included; None if there are no old tokens
    """
    positions = torch.arange(tokens, device=like.device)
    angles = _random(like, 1, tokens, module.qk_rope_head_dim // 2).float()
    both_halves = torch.cat((angles, angles), dim=-1)
    arguments = {
        "hidden_states": _random(like, batch, tokens, module.config.hidden_size),
        "position_embeddings": torch.polar(torch.ones_like(angles), angles)
        if complex_tables
        else (both_halves.cos().to(like.dtype), both_halves.sin().to(like.dtype)),
        "attention_mask": like.new_zeros(batch, 1, tokens, length or tokens),
        "position_ids": positions.unsqueeze(0),
        "cache_position": positions,
        "prev_topk_indices": positions.expand(batch, tokens, -1),
    }
    _, *parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters.values()
    return {
        item.name: arguments.get(item.name, {})
        for item in parameters
        if item.name in arguments
        or (item.default is item.empty and item.kind is item.POSITIONAL_OR_KEYWORD)
    }


def _random(like: Tensor, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(like.device, like.dtype)
