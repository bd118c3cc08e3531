"""Checks a call against named axes. The first tensor that has an axis binds its size.

The contract of each operator is a `Binder` with more rules. The rules that the operators share,
about tensors, devices, strides and slots, are in this file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.layout import different, known, not_, writable
from mla_fusion.meta.limits import Sizes, sizes_of
from mla_fusion.meta.prolog import Operator
from torch import Tensor

from mla_fusion.compat import FakeTensor

Result = tuple[tuple[Any, ...], torch.dtype]


def size_of(axis: str, dims: Mapping[str, Any]) -> Any:
    """Returns the size of an axis, or None for "*" and for a name without a size.

    axis  a number, a name, or a sum of products of these, where "He/32" is an integer division
    """
    if axis.isalnum() or axis == "*":
        return int(axis) if axis.isdigit() else dims.get(axis)
    total = 0
    for term in axis.split("+"):
        product = 1
        for factor in term.split("*"):
            name, _, divisor = factor.partition("/")
            size = size_of(name, dims)
            product *= size // size_of(divisor, dims) if divisor else size
        total += product
    return total


class Undecided(NamedTuple):
    """A symbolic size that ``sizes`` has for some values of its symbols only."""

    axis: str
    argument: str
    size: Any
    sizes: Sizes


class Binder:
    """The arguments of a call and the sizes of axes that are bound. A rule that fails raises
    ContractError.

    A shape is written as axes, "T N C" or "BlockNum C/32 128 *": "*" stands for any size, a name
    for the size that an earlier tensor bound, and a formula for what `size_of` returns.
    """

    def __init__(self, operator: Operator, source: str, full: Mapping[str, Any]) -> None:
        self.op, self.source, self.full = operator.name, source, full
        self.names = operator.ge_inputs
        self.dims: dict[str, Any] = {}
        self.owners: dict[str, str] = {}
        self.undecided: list[Undecided] = []
        for name in self.names:
            value = full[name]
            if isinstance(value, Tensor):
                if value.layout is not torch.strided:
                    found = f"a {value.layout} tensor"
                    self.refuse(f"type.{name}", name, "a strided tensor", found)
            elif value is not None:
                self.refuse(f"type.{name}", name, "a strided tensor", type(value).__name__)

    def refuse(
        self, code: str, argument: str, expected: object, found: object, source: str = ""
    ) -> NoReturn:
        raise ContractError(
            code, argument, f"{expected}", f"{found}", self.dims, source or self.source, self.op
        )

    def pick(
        self, name: str, allowed: Collection[Any], why: str = "", code: str = "", source: str = ""
    ) -> None:
        """Refuses an attribute with another value than these."""
        value = self.full[name]
        # the comparison of anything else may raise
        if not isinstance(value, (str, int, type(None))) or value not in allowed:
            expected = "one of " * (len(allowed) > 1) + ", ".join(map(str, allowed)) + why
            self.refuse(code or name, name, expected, repr(value), source)

    # -- tensors

    def presence(self, name: str, is_required: bool, why: str) -> None:
        """Refuses a call without an optional tensor that the modes ``why`` require, or with a
        tensor that they forbid.
        """
        is_present = self.full.get(name) is not None
        if is_required and not is_present:
            self.refuse(f"required.{name}", name, f"a tensor {why}", "nothing")
        if is_present and not is_required:
            self.refuse(f"forbidden.{name}", name, f"nothing {why}", "a tensor")

    def tensor(self, name: str, shape: str, *dtypes: torch.dtype) -> None:
        self.dtype(name, *dtypes)
        self.sizes(name, shape)

    def rank(self, name: str, *ranks: int, where: str = "") -> None:
        actual = self.full[name].dim()
        if actual not in ranks:
            expected = " or ".join(f"{rank}-D" for rank in ranks)
            self.refuse(f"rank.{name}", name, expected + where, f"{actual}-D")

    def dtype(self, name: str, *dtypes: torch.dtype) -> torch.dtype:
        actual: torch.dtype = self.full[name].dtype
        if actual not in dtypes:
            self.refuse(f"dtype.{name}", name, " or ".join(map(str, dtypes)), actual)
        return actual

    def sizes(self, name: str, shape: str, logical: tuple[Any, ...] | None = None) -> None:
        """Checks a shape, and binds axes without a size.

        logical  the sizes to check, if the tensor's storage has other axes
        """
        axes, actual = shape.split(), list(self.full[name].shape)
        sizes = tuple(actual) if logical is None else logical
        if len(sizes) != len(axes):
            self.refuse(f"rank.{name}", name, f"[{', '.join(axes)}]", f"{len(actual)}-D {actual}")
        for axis, size in zip(axes, sizes, strict=True):
            if axis == "*":
                continue
            bound = size_of(axis, self.dims)
            if bound is None:
                self.bind(axis, size, name)
            elif size is not bound and different(size, bound):
                texts = [self._axis_text(axis) for axis in axes]
                self.refuse(f"shape.{name}", name, f"[{', '.join(texts)}]", actual)

    def _axis_text(self, axis: str) -> str:
        """Returns an axis with its size, for a message."""
        size = size_of(axis, self.dims)
        return axis if axis.isdigit() else f"{axis} = {'any' if size is None else size}"

    def bind(self, axis: str, size: Any, owner: str) -> None:
        """Binds the size of an axis, which the argument ``owner`` has."""
        self.dims[axis], self.owners[axis] = size, owner

    def within(self, axis: str, sizes: Sizes | str, where: str = "") -> None:
        """Refuses the size of an axis that the operator does not take for any value of its symbols.
        Appends to ``undecided`` a size that it takes for some values.
        """
        size, argument = self.dims.get(axis), self.owners.get(axis, self.names[0])
        if size is None:
            return
        if isinstance(sizes, str):
            sizes = sizes_of(sizes)
        condition = sizes.condition(size)
        if known(not_(condition)):
            expected = f"{axis} {sizes.describe()}{where}"
            found = self.size_text(axis, size, where)
            self.refuse(f"dims.{axis.lower()}", argument, expected, found)
        if not known(condition):
            self.undecided.append(Undecided(axis, argument, size, sizes))

    def size_text(self, axis: str, size: Any, where: str) -> str:
        """Returns the text of a message for a size that is refused."""
        return f"{axis} {size}"

    # -- memory

    def one_device(self) -> None:
        """Refuses tensors on several devices. Tensors on meta stand for tensors anywhere."""
        home = None
        for name in self.names:
            tensor = self.full[name]
            if tensor is None or tensor.is_meta:
                continue
            home = home or tensor.device
            if tensor.device != home:
                expected = f"a tensor on {home}, as those before it"
                self.refuse(f"device.{name}", name, expected, tensor.device)

    def caches(
        self,
        names: Iterable[str],
        expected: str = "a contiguous tensor: of others a copy is written",
        *,
        first_axis_free: bool = False,
        ones_free: bool = True,
    ) -> None:
        """Refuses caches that are not `layout.writable`."""
        for name in names:
            if not writable(self.full[name], first_axis_free=first_axis_free, ones_free=ones_free):
                self.refuse_strides(name, expected)

    def contiguous_but(self, written: Collection[str], source: str = "") -> None:
        """Refuses tensors that are not contiguous, except those that are ``written``.

        A fake tensor passes: GE lays every tensor of a compiled graph out contiguously.
        """
        for name in self.names:
            tensor = self.full[name]
            if tensor is None or name in written or isinstance(tensor, FakeTensor):
                continue
            if not tensor.is_contiguous():
                self.refuse_strides(name, "a contiguous tensor", source)

    def refuse_strides(self, name: str, expected: str, source: str = "") -> NoReturn:
        tensor = self.full[name]
        found = f"{list(tensor.shape)} with strides {list(tensor.stride())}"
        self.refuse(f"contiguous.{name}", name, expected, found, source)

    # -- values

    def readable(self, name: str) -> Tensor:
        """Returns a tensor. Refuses it if it holds no data."""
        tensor: Tensor = self.full[name]
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            found = f"a {type(tensor).__name__} on {tensor.device}"
            self.refuse("values.meta", name, "a tensor with data, to check its values", found)
        return tensor

    def rows(
        self, name: str, slots: Tensor, end: int, expected: str, least: int | None = None
    ) -> None:
        """Refuses slots that are not below ``end`` or are below ``least``, and rows that several
        slots name. The kernel skips negative slots.
        """
        bad = slots >= end
        if least is not None:
            bad |= slots < least
        if bad.any():
            self.refuse(f"values.{name}.range", name, f"{expected} = {end}", int(slots[bad][0]))
        rows = slots[slots >= 0].sort().values
        repeated = rows[1:][rows.diff() == 0]
        if len(repeated):
            code = f"values.{name}.duplicate"
            self.refuse(code, name, "every entry at most once", f"{int(repeated[0])} repeated")
