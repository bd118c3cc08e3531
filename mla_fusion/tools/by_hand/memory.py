"""The tensors that a function may write: its arguments, and what its modules hold. Named, copied,
put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.compat import tree_leaves, tree_map_only


def copied(inputs: Sequence[Any]) -> list[Any]:
    """Copies, inside lists and dicts too. What shares memory shares it in the copies."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(value: Tensor) -> Tensor:
        if value.layout != torch.strided:
            return value.clone()
        storage = value.untyped_storage()
        held = (
            storages.setdefault(storage.data_ptr(), storage.clone())
            if storage.data_ptr()
            else storage.clone()
        )
        made = torch.empty(0, dtype=value.dtype, device=value.device)
        return made.set_(held, value.storage_offset(), value.shape, value.stride())

    made: list[Any] = tree_map_only(Tensor, copy, list(inputs))
    return made


def named(inputs: Sequence[Any]) -> dict[str, Tensor]:
    """Every tensor among the arguments: "argument 3"; in a list or dict, "argument 3.0"."""
    found: dict[str, Tensor] = {}
    for place, value in enumerate(inputs):
        if isinstance(value, Tensor):
            found[f"argument {place}"] = value
        else:
            leaves = enumerate(tree_leaves(value))
            found |= {
                f"argument {place}.{at}": leaf for at, leaf in leaves if isinstance(leaf, Tensor)
            }
    return _strided(found)


def _strided(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those that have memory which can be written; a sparse tensor has none."""
    return {name: value for name, value in found.items() if value.layout == torch.strided}


def held_by(target: object) -> dict[str, Tensor]:
    """Buffers of a module, and tensors among its plain attributes, in lists and dicts too;
    parameters are not.
    """
    if not isinstance(target, nn.Module):
        return {}
    found = {f"buffer {name}": value for name, value in target.named_buffers()}
    known = {id(value) for value in (*target.parameters(), *target.buffers())}
    for path, module in target.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_"):
                continue
            tensors = [
                leaf
                for leaf in tree_leaves(value)
                if isinstance(leaf, Tensor) and id(leaf) not in known
            ]
            label = f"attribute {path}.{name}" if path else f"attribute {name}"
            found |= {
                f"{label}.{at}" if len(tensors) > 1 else label: leaf
                for at, leaf in enumerate(tensors)
            }
    return _strided(found)


def same(one: Tensor, other: Tensor) -> bool:
    """Do they hold the same bits?"""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    a, b = (value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(a, b)


@contextlib.contextmanager
def kept(target: object) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """What a module holds is as before afterwards. Yields it by name, each with a copy of what it
    was.
    """
    held = {name: (value, value.detach().clone()) for name, value in held_by(target).items()}
    try:
        yield held
    finally:
        with torch.no_grad():
            for value, before in held.values():
                if not same(value, before):  # some tensors cannot be written
                    value.copy_(before)


def paired(fused: object, reference: object) -> dict[str, str]:
    """The reference's name of what ``fused`` holds: the same memory, or the one whose name ends
    alike in that shape.
    """
    theirs, found = held_by(reference), {}
    by_memory = {
        value.untyped_storage().data_ptr(): name for name, value in theirs.items() if value.numel()
    }
    for name, value in held_by(fused).items():
        same = by_memory.get(value.untyped_storage().data_ptr()) if value.numel() else None
        last = name.split(" ")[-1].split(".")[-1]
        alike = [
            other
            for other, their in theirs.items()
            if other.split(" ")[-1].split(".")[-1] == last and their.shape == value.shape
        ]
        if same is not None or name in theirs:
            found[name] = same if same is not None else name
        elif len(alike) == 1:
            found[name] = alike[0]
    return found


def reachable(inputs: Sequence[Any], target: object, names: Mapping[str, str]) -> dict[str, Tensor]:
    """All of them by name; ``names``: the reference's, for what the target holds."""
    return {names.get(name, name): value for name, value in held_by(target).items()} | named(inputs)


def places(held: Mapping[str, Tensor]) -> dict[int, str]:
    """Where each of them lies, with its name."""
    return {
        value.untyped_storage().data_ptr(): name for name, value in held.items() if value.numel()
    }
