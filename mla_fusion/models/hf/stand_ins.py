"""What a module's ``forward`` is handed in place of tensors, its cache and itself, so that it runs
over latents.

Each answers to what the forwards of ``transformers`` do with the thing it stands for, and to
nothing else: code that does more fails when it is probed, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.models.features import TWO_WIDTHS
from mla_fusion.models.hf.latent_attention import LatentDims, LatentForm
from mla_fusion.models.refusal import OptimizeError


class SplitQuery:
    """``[B, N, S, D]`` and ``[B, N, S, Dr]`` in place of their concatenation.

    factor   what the query is multiplied by (a number for each token, say), None where it is not:
             put off until there are scores, so that the absorbed product reads q_nope as the
             projection gives it
    """

    def __init__(self, nope: Tensor, rope: Tensor, factor: Any = None) -> None:
        self.nope = nope
        self.rope = rope
        self.factor = factor

    def __mul__(self, factor: Any) -> SplitQuery:
        return SplitQuery(
            self.nope, self.rope, factor if self.factor is None else self.factor * factor
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> SplitQuery:
        """Dynamo, and a tensor on the left, ask here for products with tensors."""
        if function not in _PRODUCTS or len(args) != 2:
            return NotImplemented
        one, other = args
        product: SplitQuery = one * other if isinstance(one, SplitQuery) else other.__mul__(one)
        return product

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.nope.shape[:-1], self.nope.shape[-1] + self.rope.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.nope.dtype

    def joined(self) -> Tensor:
        whole = torch.cat((self.nope, self.rope), dim=-1)
        return whole if self.factor is None else whole * self.factor


_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)


class PutOff:
    """Latents ``[B, 1, S, R]`` in place of what the up projection, or one part of it, would make of
    them.

    Its shape is that of one head: the rotated key is then expanded to one, which is how it is
    cached.
    """

    def __init__(self, c_kv: Tensor, width: int, dims: LatentDims) -> None:
        self.c_kv = c_kv
        self.width = width
        self.dims = dims

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.c_kv.shape[:-1], self.width))

    def view(self, *shape: Any) -> PutOff:
        return self

    reshape = transpose = contiguous = view

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"keys and values are taken apart by {name}; write split([nope, value], dim=-1)"
        )

    def split(self, widths: Sequence[int], dim: int = 0) -> tuple[PutOff, PutOff]:
        nope, value = wanted = [self.dims.nope, self.dims.value]
        if [*widths] != wanted or dim not in (-1, 3):
            raise ValueError(
                f"keys and values are split as {widths} along {dim}; write split({wanted}, dim=-1)"
            )
        return PutOff(self.c_kv, nope, self.dims), PutOff(self.c_kv, value, self.dims)


class LatentKey:
    """``[B, 1, S, R]`` and ``[B, 1, S, Dr]`` in place of the keys of all heads."""

    def __init__(self, nope: PutOff, k_pe: Tensor) -> None:
        self.c_kv = nope.c_kv
        self.k_pe = k_pe
        self.width = nope.width + k_pe.shape[-1]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.c_kv.shape[:-1], self.width))


class LatentCache:
    """A cache that is given latents where the forward gives it keys and values that were put
    off.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update(
        self, keys: LatentKey, values: PutOff, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            _check_widths(self.cache, layer)
        states: tuple[Tensor, Tensor] = self.cache.update(
            keys.c_kv, keys.k_pe, layer, *args, **kwargs
        )
        return states


def _check_widths(cache: Any, index: int) -> None:
    """Refuse a static layer that would give rotated keys the width of latents."""
    layers = getattr(cache, "layers", ())
    layer: Any = layers[index] if index < len(layers) else None
    if (
        hasattr(layer, "max_cache_len")
        and not layer.is_initialized
        and not TWO_WIDTHS.has(type(layer))
    ):
        raise OptimizeError(
            "cache.kind",
            f"the {type(cache).__name__} of this transformers has one width for keys and values, "
            "latents have two:"
            f" take hf.MlaPagedCache(model, max_cache_len=..), or {TWO_WIDTHS.install}",
        )


SPARSE = "npu_sparse"  # an attention implementation that is neither sdpa nor eager


class SparseConfig:
    """A configuration under which a forward hands its picks over."""

    _attn_implementation = SPARSE

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


class LatentSelf:
    """The module as its own forward sees it, with other things by some of its names."""

    def __init__(self, module: nn.Module, instead: dict[str, Any]) -> None:
        self.module = module
        self.instead = instead

    def __getattr__(self, name: str) -> Any:
        return self.instead[name] if name in self.instead else getattr(self.module, name)


def expansion_put_off(form: LatentForm) -> dict[str, Any]:
    """In place of what expands latents: keys and values are made, where at all, by the attention
    function.
    """
    if form.expand_kv is not None:
        return {"expand_kv": lambda c_kv, k_pe: (c_kv, k_pe)}
    width = form.dims.nope + form.dims.value
    return {form.kv_up: lambda c_kv: PutOff(c_kv.unsqueeze(1), width, form.dims)}


def cat_of(dims: LatentDims) -> Callable[..., Any]:
    """``torch.cat``, but for the two parts of a query or of a key that was put off."""

    def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
        if len(tensors) == 2 and dim == -1:
            nope, rope = tensors
            if isinstance(nope, PutOff):
                return LatentKey(nope, rope)
            if nope.dim() == 4 and (nope.shape[-1], rope.shape[-1]) == (dims.nope, dims.rope):
                return SplitQuery(nope, rope)
        return torch.cat(list(tensors), dim=dim)

    return cat


def split(tensor: Any, widths: Any, dim: int = 0) -> Any:
    """``torch.split``, but for what was put off."""
    return (
        tensor.split(widths, dim)
        if isinstance(tensor, PutOff)
        else torch.split(tensor, widths, dim=dim)
    )
