"""Is this module an MLA attention whose latents can be attended directly? Found by what it holds
and does.

An attention has latents where a down projection of width R + Dr, a norm of width R and an up
projection from R stand side by side, and where the module itself makes ``key = [W_uk c_kv | k_pe]``
and ``value = W_uv c_kv`` of a token, W_uk and W_uv being the up projection's own weights. The last
is asked of the module (``latent_probe``), wherever in its code it expands; every width is read off
the answer.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import NamedTuple

from torch import Tensor, nn

from mla_fusion.models.features import EXPANDS_AFTER_CACHE, advice
from mla_fusion.models.hf.as_examined import keywords
from mla_fusion.models.hf.latent_form import IMPLEMENTATIONS, LatentForm
from mla_fusion.models.hf.latent_probe import probe
from mla_fusion.models.refusal import OptimizeError

CALLED = ("update", "ALL_ATTENTION_FUNCTIONS", "torch")
# what forwards call it when attention does more
BEYOND_SOFTMAX = ("s_aux", "sinks", "softcap", "logits_soft_cap")


class Latents(NamedTuple):
    """A down and an up projection whose widths fit: ``[R + Dr, He]`` and ``[.., R]``."""

    kv_up: str
    rank: int
    rope: int
    hidden: int


def is_attention(module: nn.Module) -> bool:
    """Attentions know their place in the cache, and the scale of their scores or the rank of their
    latents.
    """
    known = hasattr(module, "layer_idx") and (
        hasattr(module, "scaling") or hasattr(module, "kv_lora_rank")
    )
    return known and len(list(_projections(module))) >= 3


def examine(module: nn.Module) -> LatentForm:
    """The latent form of an attention; raises OptimizeError where it has none. Nothing is
    changed.
    """
    projections = dict(_projections(module))
    candidates = list(_latents(module, projections))
    if getattr(module, "qk_rope_head_dim", None) == 0:
        raise OptimizeError("rope.absent", "qk_rope_head_dim is 0")
    if not candidates:
        names = ", ".join(projections)
        if hasattr(module, "kv_lora_rank"):
            fit = f"no down projection, norm and up projection that fit: {names}"
            raise OptimizeError("kv_up.absent", fit)
        raise OptimizeError("attention.not_mla", f"its projections are {names}")
    _require_known_forward(module)
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if implementation not in IMPLEMENTATIONS:
        raise OptimizeError(
            "attention.implementation",
            f"attn_implementation is {implementation!r}, sdpa or eager needed",
        )
    refusals = {}
    for latents in candidates:
        try:
            return probe(module, *latents)
        except OptimizeError as refusal:
            refusals[latents] = refusal
    raise refusals[
        min(refusals, key=lambda latents: _by_chance(module, latents, refusals[latents]))
    ]


def _by_chance(module: nn.Module, latents: Latents, refusal: OptimizeError) -> tuple[bool, bool]:
    """The reason to give is that of the real latents: a triple whose widths fit by chance says only
    that it is none.
    """
    other_rank = getattr(module, "kv_lora_rank", latents.rank) != latents.rank
    return other_rank, refusal.code in ("kv_up.differs", "cache.expanded")


def _require_known_forward(module: nn.Module) -> None:
    """Raises OptimizeError where the module's code cannot run with another attention function."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None:
        raise OptimizeError(
            "forward.unknown", f"its forward is no function but {type(forward).__name__}"
        )
    missing = [name for name in CALLED if not _looks_up(forward, name)]
    after_cache = EXPANDS_AFTER_CACHE.has(type(module))
    if missing and not after_cache:
        instead = (
            ", it has a softmax of its own"
            if "softmax" in _words(code)
            else " as a name of its file"
        )
        raise OptimizeError(
            "cache.expanded",
            f"its forward does not call {', '.join(missing)}{instead}{advice(module)}",
        )
    if missing:
        raise OptimizeError("forward.unknown", f"forward does not call {', '.join(missing)}")
    if "forward" in vars(module):
        raise OptimizeError("forward.unknown", "forward is replaced")
    if not after_cache and "expand_kv" in code.co_names:
        raise OptimizeError(
            "cache.expanded", f"its forward calls expand_kv, which it lacks{advice(module)}"
        )
    stored = sorted(
        {str(step.argval) for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    )
    if stored:
        raise OptimizeError(
            "forward.unknown", f"forward keeps {', '.join(stored)} from one call to the next"
        )
    beyond = sorted(set(BEYOND_SOFTMAX) & _words(code))
    if beyond:
        raise OptimizeError(
            "attention.differs", f"forward hands {', '.join(beyond)} to its attention"
        )


def _looks_up(forward: FunctionType, name: str) -> bool:
    """Does a forward read the name of its file, or, of the cache, call a method of that name?"""
    read = {
        str(step.argval) for step in dis.get_instructions(forward) if step.opname == "LOAD_GLOBAL"
    }
    return (
        name in forward.__code__.co_names
        if name == "update"
        else name in read & forward.__globals__.keys()
    )


def _words(code: CodeType) -> set[str]:
    """Names that the code uses, those of keyword arguments included."""
    return {*code.co_names, *keywords(code)}


def _projections(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children that hold a matrix."""
    for name, child in module.named_children():
        weight = getattr(child, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            yield name, child


def _norm_widths(module: nn.Module) -> set[int]:
    weights = (getattr(child, "weight", None) for child in module.children())
    return {
        weight.shape[0] for weight in weights if isinstance(weight, Tensor) and weight.dim() == 1
    }


def _latents(module: nn.Module, projections: dict[str, nn.Module]) -> Iterator[Latents]:
    """Every triple of down projection, norm and up projection whose widths fit: the down projection
    reads hidden states, which are as wide as what some projection, that of the output, gives."""
    given = {_width(projection, 0) for projection in projections.values()}
    for name, up in projections.items():
        rank = _width(up, 1)
        if rank not in _norm_widths(module):
            continue
        for down in projections.values():
            rope = _width(down, 0) - rank
            if down is not up and rope > 0 and _width(down, 1) in given:
                yield Latents(name, rank, rope, _width(down, 1))


def _width(projection: nn.Module, axis: int) -> int:
    weight = projection.weight
    assert isinstance(weight, Tensor)
    return weight.shape[axis]
