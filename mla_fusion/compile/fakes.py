"""Stand a user's function and arguments on another device without allocating anything.

Tensors become fake tensors of the same shape, stride and dtype on the wanted device; tensors that
share storage still do, because whether two caches are views of one pool decides what a compiler may
do in place. The user's objects are never altered: modules are copied with their tensors swapped,
functions are rebuilt over swapped closures.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from mla_fusion.compat import FakeTensorMode, copy_marks, storage_id, tree_leaves
from mla_fusion.compile.dynamo import remember_numbers


class Relocation:
    """Copies of objects with every tensor replaced by a fake one on ``device``."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._memo: dict[int, Any] = {}
        self._storages: dict[int, torch.Tensor] = {}
        self._keep: list[Any] = []  # what the memo knows by id must not be freed meanwhile

    def __call__(self, value: Any) -> Any:
        """The relocated counterpart of a tensor, container, module or function; anything else as it
        is.
        """
        known = self._memo.get(id(value))
        if known is not None:
            return known
        moved = self._move(value)
        if moved is not value:
            self._memo[id(value)] = moved
            self._keep.append(value)
        return moved

    def _move(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.nn.Module):
            return self._module(value)
        if isinstance(value, functools.partial):
            return functools.partial(self(value.func), *self(value.args), **self(value.keywords))
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self(value.__self__))
        if isinstance(value, types.FunctionType) and value.__closure__:
            return self._function(value)
        if isinstance(value, tuple):
            moved = [self(item) for item in value]
            return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
        if type(value) is list:
            return [self(item) for item in value]
        if type(value) is dict:
            return {key: self(item) for key, item in value.items()}
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = self._fake(tensor.detach())
        if isinstance(tensor, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=False)
            remember_numbers(tensor, fake)
        copy_marks(tensor, fake)
        return fake.requires_grad_(tensor.requires_grad)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor over the fake counterpart of this tensor's storage."""
        key = storage_id(tensor)
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = tensor.is_contiguous() and tensor.numel() == size
        with self.mode:
            if key not in self._storages:
                shape = tensor.shape if whole else [size]
                fake = torch.empty(shape, dtype=tensor.dtype, device=self.device)
                self._storages[key] = fake
                self._keep.append(tensor)
                if whole:
                    return fake
            base = self._storages[key].view(-1).view(tensor.dtype)
            return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _module(self, module: torch.nn.Module) -> torch.nn.Module:
        """A deep copy for which the memo already holds every tensor, so that none is copied."""
        memo: dict[int, Any] = {}
        for part in module.modules():
            for value in tree_leaves(vars(part)):
                if isinstance(value, torch.Tensor):
                    memo[id(value)] = self(value)
        for buffer in module.buffers():
            remember_numbers(buffer, self(buffer))
        return copy.deepcopy(module, memo)

    def _function(self, function: types.FunctionType) -> Callable[..., Any]:
        before = function.__closure__ or ()
        cells = [self._cell(cell) for cell in before]
        if all(one is other for one, other in zip(cells, before, strict=True)):
            return function
        rebuilt = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(cells),
        )
        rebuilt.__kwdefaults__ = function.__kwdefaults__
        return rebuilt

    def _cell(self, cell: types.CellType) -> types.CellType:
        try:
            moved = self(cell.cell_contents)
        except ValueError:  # a name of an enclosing function that is not bound yet
            return cell
        return cell if moved is cell.cell_contents else types.CellType(moved)


def relocate(target: Any, args: tuple[Any, ...], device: str) -> tuple[Any, tuple[Any, ...]]:
    """``target`` and ``args`` over fake tensors on ``device``."""
    move = Relocation(device)
    return move(target), tuple(move(arg) for arg in args)
