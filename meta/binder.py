"""`Binder`: tensors of one call against named axes; the first tensor that has an axis binds its
size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.symbolic import different


class Binder:
    """The arguments of one call and the axis sizes known so far; every rule that fails raises
    ContractError.

    A shape is written as axes, "T N C" or "BlockNum C/32 128 32": a number stands for itself, a
    name for the size that an earlier tensor gave it or `dims` holds.
    """

    def __init__(self, op: str, source: str, full: Mapping[str, Any]) -> None:
        self.op, self.source, self.full = op, source, full
        self.dims: dict[str, Any] = {}

    def refuse(self, code: str, argument: str, expected: object, found: object) -> NoReturn:
        raise ContractError(
            code, argument, f"{expected}", f"{found}", self.dims, self.source, self.op
        )

    def tensor(self, name: str, shape: str, dtype: torch.dtype) -> None:
        self.dtype(name, dtype)
        self.sizes(name, tuple(self.full[name].shape), shape)

    def needed(self, name: str, shape: str, dtype: torch.dtype, why: str) -> None:
        """A tensor that the schema leaves open and the modes ``why`` require."""
        if self.full[name] is None:
            self.refuse(f"required.{name}", name, f"a tensor with {why}", "nothing")
        self.tensor(name, shape, dtype)

    def dtype(self, name: str, dtype: torch.dtype) -> None:
        if self.full[name].dtype != dtype:
            self.refuse(f"dtype.{name}", name, dtype, self.full[name].dtype)

    def sizes(self, name: str, found: tuple[Any, ...], shape: str) -> None:
        axes = shape.split()
        if len(found) != len(axes):
            self.refuse(f"rank.{name}", name, f"[{', '.join(axes)}]", list(self.full[name].shape))
        for axis, size in zip(axes, found, strict=True):
            wanted = int(axis) if axis.isdigit() else self.dims.setdefault(axis, size)
            if size is not wanted and different(size, wanted):
                shown = ", ".join(
                    a if a.isdigit() else f"{a} = {self.dims.get(a, 'any')}" for a in axes
                )
                self.refuse(f"shape.{name}", name, f"[{shown}]", list(self.full[name].shape))

    def weight(self, name: str, n: str, k: str, dtype: torch.dtype) -> None:
        """[n, k], or FRACTAL_NZ storage [1, k/C0, n, C0], C0 being 32 bytes."""
        self.dtype(name, dtype)
        tensor = self.full[name]
        sizes = tuple(tensor.shape)
        if len(sizes) == 4:
            c0 = 32 // tensor.element_size()
            if different(sizes[0], 1) or different(sizes[3], c0):
                self.refuse(f"shape.{name}", name, f"[1, {k}/{c0}, {n}, {c0}]", list(sizes))
            sizes = (sizes[2], sizes[1] * c0)
        self.sizes(name, sizes, f"{n} {k}")

    def absorb(self, name: str, dtype: torch.dtype) -> None:
        """[N, D, C], or FRACTAL_NZ storage [N, C/16, D, 16]."""
        self.dtype(name, dtype)
        sizes = tuple(self.full[name].shape)
        if len(sizes) == 4:
            if different(sizes[3], 16):
                self.refuse(f"shape.{name}", name, "[N, C/16, D, 16] or [N, D, C]", list(sizes))
            sizes = (sizes[0], sizes[2], sizes[1] * sizes[3])
        self.sizes(name, sizes, "N D C")
