"""Another processor in software: floating products and reductions add their terms in another order.

The order in which a processor adds depends on its instructions, and on shapes, strides and
alignment of the operands. Here the order is drawn from these and from a seed. So two sums of the
same numbers differ in their last bits where the numbers lie in memory in different ways.
``OTHER_PROCESSOR=1 pytest ..`` runs tests so; the number is the seed. The kernels are replaced
below torch's dispatcher. Tracing and compiling do not change.
"""

from __future__ import annotations

import functools
import os
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]  # torch's own, for the same arguments
SEED = os.environ.get("OTHER_PROCESSOR", "")
_ALIGNMENT = 64  # bytes: torch's allocator aligns to it, and vector loads depend on it


@functools.cache
def _order(length: int, memory: tuple[Any, ...]) -> Tensor:
    places = list(range(length))
    random.Random(f"{SEED} {memory}").shuffle(places)
    return torch.tensor(places, dtype=torch.int64)


def _order_for(length: int, *tensors: Tensor) -> Tensor:
    """The order in which ``length`` terms are added, by how the operands lie in memory."""
    return _order(
        length, tuple((*t.shape, *t.stride(), t.data_ptr() % _ALIGNMENT) for t in tensors)
    )


def _product(kernel: Kernel, left: Tensor, right: Tensor, first: tuple[Any, ...], rest: Any) -> Any:
    """``left @ right``, of which ``first`` are the arguments in front (a bias)."""
    axis = right.dim() - 2 if right.dim() > 1 else 0
    if left.shape[-1] == right.shape[axis]:  # else torch raises its own error
        order = _order_for(left.shape[-1], left, right)
        left, right = left.index_select(-1, order), right.index_select(axis, order)
    return kernel(*first, left, right, **rest)


def _mm(kernel: Kernel, left: Tensor, right: Tensor) -> Tensor:
    return _product(kernel, left, right, (), {})


def _addmm(kernel: Kernel, bias: Tensor, left: Tensor, right: Tensor, **scales: Any) -> Tensor:
    return _product(kernel, left, right, (bias,), scales)


def _addbmm(kernel: Kernel, bias: Tensor, left: Tensor, right: Tensor, **scales: Any) -> Tensor:
    order = _order_for(left.shape[0], left, right)  # adds over the batch too
    return _product(kernel, left[order], right[order], (bias,), scales)


def _shuffled(x: Tensor, dims: Sequence[int] | None) -> Tensor:
    """The same numbers along ``dims``, in another order."""
    given = [dims] if isinstance(dims, int) else list(dims or range(x.dim()))
    axes = sorted(d % x.dim() for d in given) if x.dim() else []
    if not axes:
        return x
    kept = [d for d in range(x.dim()) if d not in axes]
    flat = x.permute(kept + axes).flatten(len(kept))
    flat = flat.index_select(-1, _order_for(flat.shape[-1], x))
    back = [(kept + axes).index(d) for d in range(x.dim())]
    return flat.unflatten(-1, [x.shape[d] for d in axes]).permute(back)


def _reduction(at: int | None) -> Kernel:
    """A reduction whose argument ``at`` are its axes; None: all of them."""

    def reduce(kernel: Kernel, x: Tensor, *args: Any, **options: Any) -> Any:
        dims = args[at] if at is not None and len(args) > at else options.get("dim")
        return kernel(_shuffled(x, dims), *args, **options)

    return reduce


def _softmax(kernel: Kernel, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    if not x.dim():
        return kernel(x, dim, half_to_float)
    order = _order_for(x.shape[dim], x)
    return kernel(x.index_select(dim, order), dim, half_to_float).index_select(dim, order.argsort())


def _layer_norm(
    kernel: Kernel,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    order = _order_for(x.shape[-len(shape) :].numel(), x)

    def moved(value: Tensor | None, order: Tensor) -> Tensor | None:
        if value is None:
            return None
        lead = value.shape[: value.dim() - len(shape)]
        return value.reshape(*lead, -1).index_select(-1, order).reshape(*lead, *shape)

    out, mean, rstd = kernel(moved(x, order), shape, moved(weight, order), moved(bias, order), eps)
    return moved(out, order.argsort()), mean, rstd


def _attention(kernel: Kernel, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
    order = _order_for(query.shape[-1], query, key)

    def moved(x: Tensor) -> Tensor:  # the strides of the result are those of the query
        return torch.empty_like(x).copy_(x.index_select(-1, order))

    return kernel(moved(query), moved(key), *rest, **options)


KERNELS: dict[str, Kernel] = {
    "mm": _mm, "bmm": _mm, "mv": _mm, "dot": _mm, "vdot": _mm,
    "addmm": _addmm, "baddbmm": _addmm, "addmv": _addmm, "addbmm": _addbmm,
    "sum": _reduction(None), "mean": _reduction(None), "nansum": _reduction(0),
    "sum.dim_IntList": _reduction(0), "mean.dim": _reduction(0),
    "linalg_vector_norm": _reduction(1), "norm.Scalar": _reduction(None),
    "norm.ScalarOpt_dim": _reduction(1), "norm.ScalarOpt_dim_dtype": _reduction(1),
    "var.correction": _reduction(0), "std.correction": _reduction(0),
    "var_mean.correction": _reduction(0), "logsumexp": _reduction(0),
    "_softmax": _softmax, "_log_softmax": _softmax,
    "native_layer_norm": _layer_norm,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
}  # fmt: skip
_LIBRARIES: list[torch.library.Library] = []  # a library that is freed takes its kernels with it


def install() -> None:
    """Replaces torch's CPU kernels in ``KERNELS``, for the life of this process."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch names what it replaces
        for name, other in KERNELS.items():
            library.impl(name, _replacement(f"aten::{name}", other), "CPU", with_keyset=True)
    _LIBRARIES.append(library)


def _replacement(name: str, other: Kernel) -> Kernel:
    original = torch.library.get_kernel(name, "CPU")

    def run(keyset: Any, *args: Any, **options: Any) -> Any:
        kernel = functools.partial(original.call_boxed, keyset)
        floats = [a for a in args if isinstance(a, Tensor)]
        if not all(t.is_floating_point() or t.is_complex() for t in floats):
            return kernel(*args, **options)  # integers add up to the same in any order
        return other(kernel, *args, **options)

    return run
