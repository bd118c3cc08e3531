"""Is this module an MLA attention whose latents can be attended directly? Found by what it holds
and does.

An attention has latents where a down projection of width R + Dr, a norm of width R and an up
projection from R stand side by side, and where the module itself makes ``key = [W_uk c_kv | k_pe]``
and ``value = W_uv c_kv`` of a token, W_uk and W_uv being the up projection's own weights. Every
width is read off what it makes:

* of a module that expands what it reads from its cache, its ``expand_kv``, on random latents;
* of one that expands before it caches, its ``forward``, on random hidden states and up to the
  cache: the up projection says which latents came in, the cache which keys and values came out.
  Then the converted forward is run to the same place, and must bring the latents themselves.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mla_fusion.models.features import EXPANDS_AFTER_CACHE, advice
from mla_fusion.models.hf.latent_attention import LatentDims, LatentForm, expanded
from mla_fusion.models.hf.latent_forward import CACHE, latent_forward, words
from mla_fusion.models.hf.seen import IMPLEMENTATIONS, local
from mla_fusion.models.refusal import OptimizeError

TOKENS = 3
UPDATE = "update"
CALLED = (UPDATE, "ALL_ATTENTION_FUNCTIONS", "torch")
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
    refusals = []
    for latents in candidates:
        try:
            return probe(module, *latents)
        except OptimizeError as refusal:
            refusals.append(refusal)
    # Widths that fit by chance say only that these are no latents.
    raise min(refusals, key=lambda refusal: refusal.code in ("kv_up.differs", "cache.expanded"))


def _require_known_forward(module: nn.Module) -> None:
    """Raises OptimizeError where the module's code cannot run with another attention function."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None:
        raise OptimizeError(
            "forward.unknown", f"its forward is no function but {type(forward).__name__}"
        )
    steps = [(step.opname, str(step.argval)) for step in dis.get_instructions(code)]
    read = {name for kind, name in steps if kind == "LOAD_GLOBAL" and name in forward.__globals__}
    # of the cache a method, of the file names
    missing = [name for name in CALLED if name not in (code.co_names if name == UPDATE else read)]
    after_cache = EXPANDS_AFTER_CACHE.has(type(module))
    if missing and not after_cache:
        instead = (
            ", it has a softmax of its own"
            if "softmax" in words(code)
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
    stored = sorted({name for kind, name in steps if kind == "STORE_ATTR"})
    if stored:
        raise OptimizeError(
            "forward.unknown", f"forward keeps {', '.join(stored)} from one call to the next"
        )
    beyond = sorted(set(BEYOND_SOFTMAX) & words(code))
    if beyond:
        raise OptimizeError(
            "attention.differs", f"forward hands {', '.join(beyond)} to its attention"
        )


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
    reads hidden states, which are as wide as what some projection, that of the output, gives. Where
    the module knows the rank, only those of that rank."""
    given = {_width(projection, 0) for projection in projections.values()}
    for name, up in projections.items():
        rank = _width(up, 1)
        if rank not in _norm_widths(module) or rank != getattr(module, "kv_lora_rank", rank):
            continue
        for down in projections.values():
            rope = _width(down, 0) - rank
            if down is not up and rope > 0 and _width(down, 1) in given:
                yield Latents(name, rank, rope, _width(down, 1))


def _width(projection: nn.Module, axis: int) -> int:
    weight = projection.weight
    assert isinstance(weight, Tensor)
    return weight.shape[axis]


class Answer(NamedTuple):
    """Latents ``[1, 1, S, R]``, ``[1, 1, S, Dr]`` and the keys and values ``[1, N, S, ..]`` that
    were made of them.
    """

    c_kv: Tensor
    k_pe: Tensor
    keys: Tensor
    values: Tensor


class _Reached(Exception):
    """The module has come to its cache, with these keys and values."""


def _ends(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> None:
    """``update`` of what stands in place of a cache."""
    raise _Reached(keys, values)


def _keeps(keys: Any, values: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The same, of a cache that holds nothing before this step."""
    return keys, values


class _Unanswered(Exception):
    """The module could not be asked; the message says why."""


def probe(module: nn.Module, name: str, rank: int, rope: int, hidden: int) -> LatentForm:
    """The form of a module whose child ``name`` seems to expand latents of width ``rank``; raises
    OptimizeError where it has none.
    """
    up: Any = getattr(module, name)
    weight = up.weight
    if (
        not weight.is_floating_point()
        or weight.dtype.itemsize < 2
        or type(up).forward is not nn.Linear.forward
    ):
        raise OptimizeError(
            "kv_up.weight", f"{name} is {type(up).__name__} with a weight of {weight.dtype}"
        )
    if up.bias is not None:
        raise OptimizeError("kv_up.bias", f"{name} has a bias")
    after_cache = EXPANDS_AFTER_CACHE.has(type(module))
    inputs = list(arguments_of(module, weight, rope, hidden))
    with torch.no_grad():
        try:
            answer = (
                _by_expansion(module, weight, rank, rope)
                if after_cache
                else _by_forward(module, up, inputs, rope)
            )
        except _Unanswered as error:
            unknown = "kv_up.differs" if after_cache else "cache.expanded"
            hint = "" if after_cache else advice(module)
            raise OptimizeError(
                unknown, f"{name} expands no latents of {rank} and {rope}: {error}{hint}"
            ) from error
        form = _compared(up, name, answer, getattr(type(module), "expand_kv", None), hidden)
        if not after_cache:
            _require_cached_latents(module, form, answer, inputs)
        _require_same_end(module, form, weight, rope)
    return form


def _compared(up: Any, name: str, answer: Answer, expand_kv: Any, hidden: int) -> LatentForm:
    """Are keys and values those of the up projection's weights?"""
    c_kv, k_pe, keys, values = answer
    heads, rope = keys.shape[1], k_pe.shape[-1]
    dims = LatentDims(c_kv.shape[-1], rope, keys.shape[-1] - rope, values.shape[-1])
    weight = local(up.weight)
    if dims.nope <= 0 or weight.shape[0] != heads * dims.up:
        raise OptimizeError(
            "kv_up.differs",
            f"keys {list(keys.shape)} and values {list(values.shape)} are not of {name}",
        )
    if not keys.is_meta and not _is_product((keys, values), c_kv, k_pe, weight, dims):
        raise OptimizeError(
            "kv_up.differs", f"the module makes other keys or values than the weight of {name}"
        )
    return LatentForm(dims, heads, name, hidden, expand_kv)


def _is_product(
    found: tuple[Tensor, Tensor], c_kv: Tensor, k_pe: Tensor, weight: Tensor, dims: LatentDims
) -> bool:
    """Are keys and values those of ``c_kv @ weight.T``, but for rounding?

    Each number may be off by its own rounding and by that of the float32 sum that it is: a
    processor may add in another order for another memory layout. Rotated keys are copied, and must
    be equal.
    """
    wide, matrix = c_kv.double(), weight.double()
    wanted = expanded(nn.functional.linear(wide, matrix), k_pe.double(), dims)
    terms = expanded(
        nn.functional.linear(wide.abs(), matrix.abs()), torch.zeros_like(k_pe).double(), dims
    )
    own, sums = torch.finfo(weight.dtype).eps, weight.shape[1] * torch.finfo(torch.float32).eps
    return all(
        bool(((got.double() - want).abs() <= own * want.abs() * (most > 0) + sums * most).all())
        for got, want, most in zip(found, wanted, terms, strict=True)
    )


def _by_expansion(module: Any, weight: Tensor, rank: int, rope: int) -> Answer:
    c_kv, k_pe = (_random(weight, 1, 1, TOKENS, width) for width in (rank, rope))
    try:
        keys, values = type(module).expand_kv(module, c_kv, k_pe)
    except Exception as error:  # code of any kind
        reason = _first_line(error) if isinstance(error, RuntimeError) else described(error)
        raise _Unanswered(reason) from error
    if any(not isinstance(found, Tensor) or found.dim() != 4 for found in (keys, values)):
        raise _Unanswered("expand_kv returns no keys and values of four axes")
    return Answer(c_kv, k_pe, keys, values)


def _by_forward(
    module: nn.Module, up: nn.Module, inputs: list[dict[str, Any]], rope: int
) -> Answer:
    """The rotated key is read off the first head: what it is does not matter, but that all heads
    have it.
    """
    given: list[Tensor] = []
    handle = up.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    try:
        keys, values = _cached(module, type(module).forward, inputs)
    finally:
        handle.remove()
    if not given:
        raise _Unanswered("forward caches before it expands")
    if keys.dim() != 4 or values.dim() != 4:
        raise _Unanswered(f"forward caches {list(keys.shape)} and {list(values.shape)}")
    c_kv = local(given[-1]).reshape(1, 1, TOKENS, -1)
    return Answer(c_kv, keys[:, :1, :, keys.shape[-1] - rope :], keys, values)


def _require_cached_latents(
    module: nn.Module, form: LatentForm, answer: Answer, inputs: list[dict[str, Any]]
) -> None:
    """Does the converted forward cache the latents?"""
    try:
        c_kv, k_pe = _cached(module, latent_forward(type(module), form), inputs)
    except _Unanswered as error:
        message = (
            f"its forward does more with keys and values than cache them: {error}{advice(module)}"
        )
        raise OptimizeError("cache.expanded", message) from error
    for found, wanted in ((c_kv, answer.c_kv), (k_pe, answer.k_pe)):
        if found.shape != wanted.shape or not (found.is_meta or torch.equal(found, wanted)):
            raise OptimizeError(
                "kv_up.differs", f"put off, the product with {form.kv_up} is one with other latents"
            )


def _require_same_end(module: nn.Module, form: LatentForm, weight: Tensor, rope: int) -> None:
    """The converted forward comes to its end, of one token, where the module's own does."""
    forward = inspect.unwrap(type(module).forward)
    for arguments in arguments_of(module, weight, rope, form.hidden, tokens=1):
        if CACHE in arguments:
            arguments[CACHE] = SimpleNamespace(update=_keeps)
        try:
            forward(module, **arguments)
        except Exception:  # its tables are of another kind, or it asks more of a cache
            continue
        try:
            latent_forward(type(module), form)(module, **arguments)
        except Exception as error:  # code of any kind
            raise OptimizeError(
                "attention.differs",
                f"its forward does not hand all to its attention function: {described(error)}",
            ) from error


def _cached(
    module: nn.Module, forward: Callable[..., Any], inputs: list[dict[str, Any]]
) -> tuple[Tensor, Tensor]:
    """What ``forward`` (unbound) hands to its cache, by the first arguments that it takes."""
    reasons = []
    for arguments in inputs:
        try:
            inspect.unwrap(forward)(module, **arguments)
        except _Reached as reached:
            keys, values = reached.args
            return keys, values
        except Exception as error:  # code of any kind: whatever it raises, it cannot be asked
            reasons.append(described(error))
        else:
            reasons.append("forward does not come to its cache")
    raise _Unanswered(reasons[0])


def arguments_of(
    module: nn.Module, weight: Tensor, rope: int, hidden: int, batch: int = 1, tokens: int = TOKENS
) -> Iterator[dict[str, Any]]:
    """Arguments of the module's forward, those that its signature has; rotary tables are a pair of
    cosines and sines, or complex numbers. What else a forward requires is what layers hand to each
    other: an empty dictionary.
    """
    positions = torch.arange(tokens, device=weight.device)
    angles = _random(weight, 1, tokens, rope // 2).float()
    both = torch.cat((angles, angles), dim=-1)
    tables = (
        (both.cos().to(weight.dtype), both.sin().to(weight.dtype)),
        torch.polar(torch.ones_like(angles), angles),
    )
    taken = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    for table in tables:
        arguments = {
            "hidden_states": _random(weight, batch, tokens, hidden),
            "position_embeddings": table,
            "attention_mask": None,
            "position_ids": positions.unsqueeze(0),
            "cache_position": positions,
            "prev_topk_indices": positions.expand(batch, tokens, -1),
            CACHE: SimpleNamespace(update=_ends),
        }
        yield {
            name: arguments.get(name, {})
            for name, parameter in list(taken.items())[1:]
            if name in arguments
            or (
                parameter.default is parameter.empty
                and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            )
        }


def _random(like: Tensor, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(like.device, like.dtype)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]


def described(error: BaseException) -> str:
    """Its class, and the first line that it says."""
    return f"{type(error).__name__}: {_first_line(error)}"
