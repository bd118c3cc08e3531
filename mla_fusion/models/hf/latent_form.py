"""Is this module an MLA attention whose latents can be attended directly? Found by what it holds and does.

An attention caches the latent where a down projection of width R + Dr, a norm of width R and an up projection from R
stand side by side, and where its own ``expand_kv`` makes ``key = [W_uk c_kv | k_pe]`` and ``value = W_uv c_kv`` of a
cached token. The last is asked of the module itself, on random latents; every width is read off the answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.models.hf.latent_attention import LatentDims

IMPLEMENTATIONS = ("sdpa", "eager")
CALLED = ("update", "expand_kv", "ALL_ATTENTION_FUNCTIONS", "get_interface", "torch")
BEYOND_SOFTMAX = ("s_aux", "sinks", "softcap", "logits_soft_cap")  # what forwards call it when attention does more
PROBE_TOKENS = 3


@dataclass(frozen=True)
class Refusal:
    """A code of ``refusal.CODES`` and what was found."""

    code: str
    message: str


@dataclass(frozen=True)
class LatentForm:
    """What the absorbed form needs to know of one attention.

    kv_up    name of the child that expands latents
    expand   the module's own expansion, ``(c_kv [B, 1, L, R], k_pe [B, 1, L, Dr]) -> keys, values``, unbound
    """

    dims: LatentDims
    heads: int
    kv_up: str
    expand: Callable[..., tuple[Tensor, Tensor]]


def is_attention(module: nn.Module) -> bool:
    """Attentions know their place in the cache, and the scale of their scores or the rank of their latents."""
    known = hasattr(module, "layer_idx") and (hasattr(module, "scaling") or hasattr(module, "kv_lora_rank"))
    return known and len(list(_projections(module))) >= 3


def examine(module: nn.Module) -> LatentForm | Refusal:
    """The latent form of an attention, or why it has none. Nothing is changed."""
    projections = dict(_projections(module))
    candidates = list(_latents(module, projections))
    expand = getattr(type(module), "expand_kv", None)
    if expand is not None and getattr(module, "qk_rope_head_dim", None) == 0:
        return Refusal("rope.absent", "qk_rope_head_dim is 0")
    if not candidates:
        return _why_no_latent(projections, expand)
    if expand is None:
        return Refusal("cache.expanded", "the module has no expand_kv between its cache and its attention")
    called = inspect.unwrap(type(module).forward).__code__.co_names
    missing = [name for name in CALLED if name not in called]
    if missing or "forward" in vars(module):
        return Refusal("forward.unknown", f"forward does not call {missing}" if missing else "forward is replaced")
    beyond = sorted(set(BEYOND_SOFTMAX) & _words(inspect.unwrap(type(module).forward).__code__))
    if beyond:
        return Refusal("attention.differs", f"forward hands {', '.join(beyond)} to its attention")
    implementation = getattr(module.config, "_attn_implementation", None)
    if implementation not in IMPLEMENTATIONS:
        return Refusal("attention.implementation", f"attn_implementation is {implementation!r}, sdpa or eager needed")
    refusals = []
    for name, rank, rope in candidates:
        answer = _probe(module, expand, name, rank, rope)
        if isinstance(answer, LatentForm):
            return answer
        refusals.append(answer)
    # A triple whose widths fit by chance says no more than that it is none.
    return min(refusals, key=lambda refusal: refusal.code == "kv_up.differs")


def _words(code: CodeType) -> set[str]:
    """Names that the code uses, those of keyword arguments included."""
    keywords = (constant for constant in code.co_consts if isinstance(constant, tuple))
    return {*code.co_names, *(name for names in keywords for name in names if isinstance(name, str))}


def _projections(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children that hold a matrix."""
    for name, child in module.named_children():
        weight = getattr(child, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            yield name, child


def _norm_widths(module: nn.Module) -> set[int]:
    weights = (getattr(child, "weight", None) for child in module.children())
    return {weight.shape[0] for weight in weights if isinstance(weight, Tensor) and weight.dim() == 1}


def _latents(module: nn.Module, projections: dict[str, nn.Module]) -> Iterator[tuple[str, int, int]]:
    """(name of the up projection, R, Dr) of every triple whose widths fit."""
    for name, up in projections.items():
        rank = _width(up, 1)
        if rank not in _norm_widths(module):
            continue
        for down in projections.values():
            rope = _width(down, 0) - rank
            if down is not up and rope > 0:
                yield name, rank, rope


def _width(projection: nn.Module, axis: int) -> int:
    weight = projection.weight
    assert isinstance(weight, Tensor)
    return weight.shape[axis]


def _why_no_latent(projections: dict[str, nn.Module], expand: Any) -> Refusal:
    if expand is None:
        return Refusal("attention.not_mla", f"its projections are {', '.join(projections)}")
    return Refusal("kv_up.absent", f"no down projection, norm and up projection that fit: {', '.join(projections)}")


def _probe(module: nn.Module, expand: Any, name: str, rank: int, rope: int) -> LatentForm | Refusal:
    """Ask the module what it makes of random latents, and compare with the projection's own answer."""
    up = getattr(module, name)
    weight = up.weight
    if not weight.is_floating_point() or weight.dtype.itemsize < 2 or type(up).forward is not nn.Linear.forward:
        return Refusal("kv_up.weight", f"{name} is {type(up).__name__} with a weight of {weight.dtype}")
    if up.bias is not None:
        return Refusal("kv_up.bias", f"{name} has a bias")
    generator = torch.Generator().manual_seed(0)
    c_kv, k_pe = (
        torch.randn(1, 1, PROBE_TOKENS, width, generator=generator).to(weight.device, weight.dtype)
        for width in (rank, rope)
    )
    with torch.no_grad():
        try:
            keys, values = expand(module, c_kv, k_pe)
            heads, nope, value = keys.shape[1], keys.shape[-1] - rope, values.shape[-1]
            flat = up(c_kv).view(1, PROBE_TOKENS, heads, -1).transpose(1, 2)
        except RuntimeError as error:
            reason = str(error).split("\n", 1)[0]
            return Refusal("kv_up.differs", f"{name} expands no latents of {rank} and {rope}: {reason}")
    if nope <= 0 or flat.shape[-1] != nope + value or keys.shape[:3] != flat.shape[:3]:
        return Refusal("kv_up.differs", f"keys {list(keys.shape)} and values {list(values.shape)} are not of {name}")
    wanted = torch.cat([flat[..., :nope], k_pe.expand(-1, heads, -1, -1)], -1), flat[..., nope:]
    if not weight.is_meta and not (torch.equal(keys, wanted[0]) and torch.equal(values, wanted[1])):
        return Refusal("kv_up.differs", f"expand_kv gives other keys or values than {name}")
    return LatentForm(LatentDims(rank=rank, rope=rope, nope=nope, value=value), heads, name, expand)
