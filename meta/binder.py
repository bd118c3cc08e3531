"""`Binder`: one call against named axes; the first tensor that has an axis binds its size.

The contract of each operator is a `Binder` with rules of its own; what the operators ask alike of
tensors, devices, strides and slots stands here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.layout import contiguous, different, holds_data, writable
from mla_fusion.meta.limits import Sizes, sizes_of
from mla_fusion.meta.prolog import Operator
from torch import Tensor

Result = tuple[tuple[Any, ...], torch.dtype]


def size_of(axis: str, dims: Mapping[str, Any]) -> Any:
    """The size of an axis: a number, a name (None where it has no size yet, and of "*"), or a sum
    of products of these, in which "He/32" is a whole division.
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
    """A symbolic size that is one of ``sizes`` for some of its values only."""

    axis: str
    argument: str
    size: Any
    sizes: Sizes


class Binder:
    """The arguments of one call and the axis sizes known so far; every rule that fails raises
    ContractError.

    A shape is written as axes, "T N C" or "BlockNum C/32 128 *": "*" stands for any size, a name
    for the size that an earlier tensor gave it, and others for what `size_of` makes of these.
    """

    def __init__(self, operator: Operator, source: str, full: Mapping[str, Any]) -> None:
        self.op, self.source, self.full = operator.name, source, full
        self.names = operator.ge_inputs
        self.dims: dict[str, Any] = {}
        self.owners: dict[str, str] = {}
        self.undecided: list[Undecided] = []
        for name in self.names:
            value = full[name]
            if value is None or (isinstance(value, Tensor) and value.layout is torch.strided):
                continue
            is_tensor = isinstance(value, Tensor)
            found = f"a {value.layout} tensor" if is_tensor else type(value).__name__
            self.refuse(f"type.{name}", name, "a strided tensor", found)

    def refuse(
        self, code: str, argument: str, expected: object, found: object, source: str = ""
    ) -> NoReturn:
        raise ContractError(
            code, argument, f"{expected}", f"{found}", self.dims, source or self.source, self.op
        )

    def pick(
        self, name: str, allowed: Collection[Any], why: str = "", code: str = "", source: str = ""
    ) -> None:
        """An attribute that has one of these values."""
        if self.full[name] not in allowed:
            expected = "one of " * (len(allowed) > 1) + ", ".join(map(str, allowed)) + why
            self.refuse(code or name, name, expected, repr(self.full[name]), source)

    # -- tensors

    def presence(self, name: str, needed: bool, why: str) -> None:
        """A tensor that the schema leaves open, and the modes ``why`` require or forbid."""
        given = self.full.get(name)
        if needed and given is None:
            self.refuse(f"required.{name}", name, f"a tensor {why}", "nothing")
        if not needed and given is not None:
            self.refuse(f"forbidden.{name}", name, f"nothing {why}", "a tensor")

    def tensor(self, name: str, shape: str, *dtypes: torch.dtype) -> None:
        self.dtype(name, *dtypes)
        self.sizes(name, shape)

    def tensor_if(self, needed: bool, why: str, name: str, shape: str, dtype: torch.dtype) -> None:
        """A tensor that the modes ``why`` require or forbid."""
        self.presence(name, needed, why)
        if needed:
            self.tensor(name, shape, dtype)

    def rank(self, name: str, *ranks: int, where: str = "") -> None:
        found = self.full[name].dim()
        if found not in ranks:
            expected = " or ".join(f"{rank}-D" for rank in ranks)
            self.refuse(f"rank.{name}", name, expected + where, f"{found}-D")

    def dtype(self, name: str, *dtypes: torch.dtype) -> torch.dtype:
        found: torch.dtype = self.full[name].dtype
        if found not in dtypes:
            self.refuse(f"dtype.{name}", name, " or ".join(map(str, dtypes)), found)
        return found

    def sizes(self, name: str, shape: str, found: tuple[Any, ...] | None = None) -> None:
        """``found``: in place of the tensor's own, where its storage has other axes."""
        axes, own = shape.split(), list(self.full[name].shape)
        found = tuple(own) if found is None else found
        if len(found) != len(axes):
            self.refuse(f"rank.{name}", name, f"[{', '.join(axes)}]", f"{len(own)}-D {own}")
        for axis, size in zip(axes, found, strict=True):
            if axis == "*":
                continue
            wanted = size_of(axis, self.dims)
            if wanted is None:
                self.bind(axis, size, name)
            elif size is not wanted and different(size, wanted):
                known = [
                    a if a.isdigit() else f"{a} = {'any' if of is None else of}"
                    for a in axes
                    for of in [size_of(a, self.dims)]
                ]
                self.refuse(f"shape.{name}", name, f"[{', '.join(known)}]", own)

    def bind(self, axis: str, size: Any, owner: str) -> None:
        """The size of an axis, and the argument that says it."""
        self.dims[axis], self.owners[axis] = size, owner

    def within(self, axis: str, sizes: Sizes | str, where: str = "") -> None:
        """The size of an axis is one that the operator takes."""
        size, argument = self.dims.get(axis), self.owners.get(axis, self.names[0])
        if size is None:
            return
        if isinstance(sizes, str):
            sizes = sizes_of(sizes)
        if sizes.exclude(size):
            expected = f"{axis} {sizes.describe()}{where}"
            self.refuse(f"dims.{axis.lower()}", argument, expected, self.found(axis, size, where))
        if type(size) is not int and not sizes.include(size):
            self.undecided.append(Undecided(axis, argument, size, sizes))

    def found(self, axis: str, size: Any, where: str) -> str:
        """A size that is refused, for the message."""
        return f"{axis} {size}"

    # -- memory

    def one_device(self) -> None:
        """All tensors lie on one; those on meta stand for tensors anywhere."""
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
        """What is written in place is laid out as `layout.writable` says."""
        for name in names:
            tensor = self.full[name]
            if not writable(tensor, first_axis_free=first_axis_free, ones_free=ones_free):
                self.refuse_strides(name, expected)

    def contiguous_but(self, written: Collection[str], source: str = "") -> None:
        """Every tensor is contiguous, except those that `caches` judges."""
        for name in self.names:
            tensor = self.full[name]
            if tensor is not None and name not in written and not contiguous(tensor):
                self.refuse_strides(name, "a contiguous tensor", source)

    def refuse_strides(self, name: str, expected: str, source: str = "") -> NoReturn:
        tensor = self.full[name]
        found = f"{list(tensor.shape)} with strides {list(tensor.stride())}"
        self.refuse(f"contiguous.{name}", name, expected, found, source)

    # -- values

    def readable(self, name: str) -> Tensor:
        tensor: Tensor = self.full[name]
        if not holds_data(tensor):
            found = f"a {type(tensor).__name__} on {tensor.device}"
            self.refuse("values.meta", name, "a tensor with data, to check its values", found)
        return tensor

    def rows(
        self, name: str, slots: Tensor, end: int, expected: str, least: int | None = None
    ) -> None:
        """Each slot is below ``end`` and names its row alone; negative ones, not below ``least``,
        are skipped.
        """
        bad = slots >= end
        bad = bad if least is None else bad | (slots < least)
        if bool(bad.any()):
            self.refuse(f"values.{name}.range", name, f"{expected} = {end}", int(slots[bad][0]))
        written = slots[slots >= 0].sort().values
        again = written[1:][written.diff() == 0]
        if len(again):
            code = f"values.{name}.duplicate"
            self.refuse(code, name, "every entry at most once", f"{int(again[0])} repeated")
