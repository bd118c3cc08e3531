"""The tensors that a function may write: its arguments, and what its modules hold. Named, copied,
put back.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.compat import tree_leaves, tree_map_only
from mla_fusion.prove.field import Undecided

Inputs = Sequence[Any]  # what a function is called with
Tensors = dict[str, Tensor]  # by name


def place(value: Tensor) -> int:
    """Where its memory lies; 0 for none."""
    return value.untyped_storage().data_ptr()


def copied(inputs: Inputs) -> list[Any]:
    """Copies, inside lists and dicts too. What shares memory shares it in the copies."""
    known: dict[int, Any] = {}
    return list(tree_map_only(Tensor, lambda v: copy.deepcopy(v.detach(), known), list(inputs)))


def tensors_in(item: Any) -> list[Tensor]:
    """Inside lists and dicts too."""
    return [leaf for leaf in tree_leaves(item) if isinstance(leaf, Tensor)]


def named(inputs: Inputs) -> Tensors:
    """Every tensor among the arguments: "argument 3"; in a list or dict, "argument 3.0"."""
    return _tensors({f"argument {position}": value for position, value in enumerate(inputs)})


def _tensors(values: Mapping[str, Any]) -> Tensors:
    """The tensors that have memory which can be written (a sparse one has none); one in a list or
    dict has its place there behind the name.
    """
    return {
        name if leaf is value else f"{name}.{at}": leaf
        for name, value in values.items()
        for at, leaf in enumerate(tree_leaves(value))
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    }


def held_by(target: object) -> Tensors:
    """Buffers of a module, and tensors among its plain attributes, in lists and dicts too;
    parameters are not.
    """
    if not isinstance(target, nn.Module):
        return {}
    attributes = {
        f"attribute {path}.{name}".replace(" .", " "): value
        for path, module in target.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_")
    }
    known = {id(value) for value in (*target.parameters(), *target.buffers())}
    found = _tensors({f"buffer {name}": value for name, value in target.named_buffers()})
    others = _tensors(attributes).items()
    return found | {name: value for name, value in others if id(value) not in known}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal shape, dtype and bits; NaNs with the same bits are the same."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    a, b = (value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(a, b)


@contextlib.contextmanager
def restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """These tensors hold what they did before, afterwards."""
    copies = [(value, value.detach().clone()) for value in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for value, before in copies:
                if not same_bits(value, before):  # some tensors cannot be written
                    value.copy_(before)


@contextlib.contextmanager
def kept(target: object, may_rebind: bool = True) -> Iterator[None]:
    """What a module holds is as before afterwards: the same tensors under the same names, with the
    same content.

    Raises Undecided, at the end, where another tensor had one of their names, unless it
    ``may_rebind`` them.
    """
    before, containers = held_by(target), [(each, copy.copy(each)) for each in _containers(target)]
    rebound = list[str]()
    with restored(before.values()):
        try:
            yield
        finally:
            after = held_by(target)
            names = before.keys() | after.keys()
            rebound += sorted(name for name in names if before.get(name) is not after.get(name))
            for container, contents in containers:
                if isinstance(container, dict):
                    container.clear()
                    container.update(contents)
                else:
                    container[:] = contents
    if rebound and not may_rebind:
        raise Undecided(f"{', '.join(rebound)} is another tensor after a run")


def _containers(target: object) -> Iterator[Any]:
    """What holds the attributes of a module and of those inside, its buffers, and the lists and
    dicts among them.
    """
    for module in target.modules() if isinstance(target, nn.Module) else ():
        yield from (vars(module), module._buffers)
        inside = [value for name, value in vars(module).items() if not name.startswith("_")]
        while inside:
            value = inside.pop()
            if isinstance(value, (list, dict)):
                yield value
                inside += value.values() if isinstance(value, dict) else value


def paired(fused: object, reference: object) -> dict[str, str]:
    """The reference's name of what ``fused`` holds: the same memory, or the one whose name ends
    alike in that shape.
    """
    theirs, found = held_by(reference), {}
    by_memory = places(theirs)
    for name, value in held_by(fused).items():
        alike = [
            other
            for other, their in theirs.items()
            if _last(other) == _last(name) and their.shape == value.shape
        ]
        if value.numel() and place(value) in by_memory:
            found[name] = by_memory[place(value)]
        elif name in theirs:
            found[name] = name
        elif len(alike) == 1:
            found[name] = alike[0]
    return found


def _last(name: str) -> str:
    return name.split(" ")[-1].split(".")[-1]


def reachable(inputs: Inputs, target: object, names: Mapping[str, str]) -> Tensors:
    """All of them by name; ``names``: the reference's, for what the target holds."""
    held = {names.get(name, name): value for name, value in held_by(target).items()}
    return named(inputs) | held


def places(held: Tensors) -> dict[int, str]:
    """Where each of them lies, with its name."""
    return {place(value): name for name, value in held.items() if value.numel()}
