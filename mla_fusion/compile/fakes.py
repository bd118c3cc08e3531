"""Copies a user's function and arguments to another device, over fake tensors.

A fake tensor has the shape, strides and dtype of its tensor, and takes no memory. Tensors that
share storage share it in the copy, too: a compiler must know whether two caches are views of one
pool. The user's objects do not change. Modules are copied with other tensors, functions get other
closures.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.compat import FakeTensorMode, copy_marks, storage_id, tree_leaves, tree_map
from mla_fusion.compile.dynamo import remember_numbers


class Relocation:
    """Copies objects, with a fake tensor on ``device`` in place of every tensor."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        # copies by the id of the original, which stays alive beside its copy
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._storages: dict[int, Tensor] = {}

    def __call__(self, value: Any) -> Any:
        """Returns the copy of a tensor, module or function, and of such in containers; any other
        object as it is.
        """
        return tree_map(self._copy_once, value)

    def _copy_once(self, value: Any) -> Any:
        """Returns the copy of an object that is no container: the same for the same object."""
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        copied = self._copy(value)
        if copied is not value:
            self._copies[id(value)] = value, copied
        return copied

    def _copy(self, value: Any) -> Any:
        """Returns a new copy of an object."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, partial):
            return partial(self(value.func), *self(value.args), **self(value.keywords))
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self(value.__self__))
        if isinstance(value, FunctionType) and value.__closure__:
            return self._function(value, value.__closure__)
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        """Returns a fake tensor, with the marks of the original and facts about its numbers."""
        fake = self._fake(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=False)
            remember_numbers(tensor, fake)
        copy_marks(tensor, fake)
        return fake.requires_grad_(tensor.requires_grad)

    def _fake(self, tensor: Tensor) -> Tensor:
        """Returns a fake tensor in the fake counterpart of the tensor's storage."""
        key = storage_id(tensor)
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        fills_storage = tensor.is_contiguous() and tensor.numel() == size
        with self.mode:
            if key not in self._storages:
                shape = tensor.shape if fills_storage else [size]
                fake = torch.empty(shape, dtype=tensor.dtype, device=self.device)
                self._storages[key] = fake
                if fills_storage:
                    return fake
            base = self._storages[key].view(-1).view(tensor.dtype)
            return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _module(self, module: nn.Module) -> nn.Module:
        """Returns a deep copy. Its memo has every tensor, so no tensor is copied."""
        memo = {
            id(value): self(value)
            for part in module.modules()
            for value in tree_leaves(vars(part))
            if isinstance(value, Tensor)
        }
        for buffer in module.buffers():
            remember_numbers(buffer, self(buffer))
        return copy.deepcopy(module, memo)

    def _function(
        self, function: FunctionType, closure: tuple[CellType, ...]
    ) -> Callable[..., Any]:
        """Returns the function with a copied closure, or itself if that has nothing to copy."""
        cells = tuple(map(self._cell, closure))
        if all(cell is copied for cell, copied in zip(closure, cells, strict=True)):
            return function
        parts = function.__code__, function.__globals__, function.__name__, function.__defaults__
        copied_function = FunctionType(*parts, cells)
        copied_function.__kwdefaults__ = function.__kwdefaults__
        return copied_function

    def _cell(self, cell: CellType) -> CellType:
        """Returns a cell with a copy of the content, or the cell itself if nothing is to copy."""
        try:
            copied = self(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            return cell
        return cell if copied is cell.cell_contents else CellType(copied)


def relocate(target: Any, args: tuple[Any, ...], device: str) -> tuple[Any, tuple[Any, ...]]:
    """Returns ``target`` and ``args`` over fake tensors on ``device``."""
    return Relocation(device)((target, args))
