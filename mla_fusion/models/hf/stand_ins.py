"""Stand-ins for tensors, caches and modules, with which a module's ``forward`` runs over latents.

A stand-in supports what the forwards of ``transformers`` do with the original, and nothing else.
Code that does more fails when it is probed, and is not converted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_fusion.models.features import TWO_WIDTHS
from mla_fusion.models.hf.latent_attention import LatentDims, LatentForm
from mla_fusion.models.refusal import OptimizeError


@dataclass(eq=False)
class Overlay:
    """An object with other values for some of its attributes."""

    original: Any
    attributes: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.attributes[name] if name in self.attributes else getattr(self.original, name)


@dataclass(eq=False)
class SplitQuery:
    """``[B, N, S, D]`` and ``[B, N, S, Dr]`` in place of their concatenation.

    factor  multiplies the query (a number for each token, say); None without a factor. The scores
            are multiplied by it later, so that the absorbed product reads q_nope as the projection
            returns it.
    """

    nope: Tensor
    rope: Tensor
    factor: Any = None

    def __mul__(self, factor: Any) -> SplitQuery:
        return SplitQuery(
            self.nope, self.rope, factor if self.factor is None else self.factor * factor
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> SplitQuery:
        """Returns products with tensors. Dynamo calls it, and so does a tensor on the left."""
        if function not in _PRODUCTS or len(args) != 2:
            return NotImplemented
        query, factor = args if isinstance(args[0], SplitQuery) else reversed(args)
        scaled: SplitQuery = query.__mul__(factor)  # ``*`` would come back here in a trace
        return scaled

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.nope.shape[:-1], self.nope.shape[-1] + self.rope.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.nope.dtype

    def joined(self) -> Tensor:
        """Returns the query itself."""
        query = torch.cat((self.nope, self.rope), dim=-1)
        return query if self.factor is None else query * self.factor


_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)


class Expansion:
    """Latents ``[B, 1, S, R]`` in place of their product with the up projection, or of a part.

    It has the shape of one head, so the forward expands the rotated key to one head, as it is
    cached.

    width  columns of the product, or of the part
    """

    def __init__(self, c_kv: Tensor, width: int, dims: LatentDims) -> None:
        self.c_kv = c_kv
        self.dims = dims
        self.shape = torch.Size((*c_kv.shape[:-1], width))

    def view(self, *shape: Any) -> Expansion:
        return self

    reshape = transpose = contiguous = view

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"keys and values are taken apart by {name}; write split([nope, value], dim=-1)"
        )

    def split(self, widths: Sequence[int], dim: int = 0) -> tuple[Expansion, Expansion]:
        nope, value = expected = [self.dims.nope, self.dims.value]
        if [*widths] != expected or dim not in (-1, 3):
            raise ValueError(
                f"keys and values are split as {widths} along {dim}; write split({expected}, "
                "dim=-1)"
            )
        return Expansion(self.c_kv, nope, self.dims), Expansion(self.c_kv, value, self.dims)


class LatentKey:
    """``[B, 1, S, R]`` and ``[B, 1, S, Dr]`` in place of the keys of all heads."""

    def __init__(self, nope: Expansion, k_pe: Tensor) -> None:
        self.c_kv = nope.c_kv
        self.k_pe = k_pe
        self.shape = torch.Size((*nope.shape[:-1], nope.shape[-1] + k_pe.shape[-1]))


def latent_cache(cache: Any) -> Overlay:
    """Returns the cache, whose ``update`` takes a `LatentKey` and an `Expansion`."""

    def update(
        keys: LatentKey, values: Expansion, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            _check_widths(cache, layer)
        states: tuple[Tensor, Tensor] = cache.update(keys.c_kv, keys.k_pe, layer, *args, **kwargs)
        return states

    return Overlay(cache, {"update": update})


def _check_widths(cache: Any, index: int) -> None:
    """Refuses a static layer that would give rotated keys the width of latents."""
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
            "latents have two: take hf.MlaPagedCache(model, max_cache_len=..), or "
            f"{TWO_WIDTHS.install}",
        )


def without_expansion(form: LatentForm) -> dict[str, Any]:
    """Returns the attributes of a module that expand latents, replaced by functions that do not.

    If keys and values are needed, the attention function makes them.
    """
    if form.expand_kv is not None:
        return {"expand_kv": lambda c_kv, k_pe: (c_kv, k_pe)}
    width = form.dims.nope + form.dims.value
    return {form.kv_up: lambda c_kv: Expansion(c_kv.unsqueeze(1), width, form.dims)}


def functions_of_torch(dims: LatentDims) -> Overlay:
    """Returns torch, with functions ``cat`` and ``split`` that also take stand-ins."""

    def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
        if len(tensors) == 2 and dim == -1:
            nope, rope = tensors
            if isinstance(nope, Expansion):
                return LatentKey(nope, rope)
            if nope.dim() == 4 and (nope.shape[-1], rope.shape[-1]) == (dims.nope, dims.rope):
                return SplitQuery(nope, rope)
        return torch.cat(list(tensors), dim=dim)

    def split(tensor: Any, widths: Any, dim: int = 0) -> Any:
        if isinstance(tensor, Expansion):
            return tensor.split(widths, dim)
        return torch.split(tensor, widths, dim=dim)

    return Overlay(torch, {"cat": cat, "split": split})
