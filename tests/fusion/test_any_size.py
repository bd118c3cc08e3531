"""A symbolic size loses nothing: what fuses with static sizes fuses with symbolic ones, in place
where in place.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

import mla_fusion as mf
from tests.catalogue import ENTRIES, Entry
from tests.exhaustive import one_in
from tests.fusion.loses import ALL, LESS
from tests.harness import graph_of

Places = list[tuple[int, int]]  # (argument, axis)


def sizes(entry: Entry) -> dict[int, Places]:
    """Tokens, sequences, blocks and the like: every size of the arguments but widths, and where it
    stands.
    """
    found: dict[int, Places] = {}
    for number, argument in enumerate(entry.args()):
        for axis, size in enumerate(argument.shape[:-1] if argument.dim() > 1 else argument.shape):
            if size > 1:
                found.setdefault(size, []).append((number, axis))
    return found


def placements(entry: Entry, dynamic: bool | None = None, marked: Places = []) -> list[str]:  # noqa: B006
    torch._dynamo.reset()
    torch.manual_seed(0)
    args = entry.args()
    for number, axis in marked:
        torch._dynamo.mark_dynamic(args[number], axis)
    unabsorbed = {"targets": ("v3", "identity")} if "unabsorbed" in entry.tags else {}
    config = entry.config(verify="off", **unabsorbed)
    report = mf.explain(graph_of(entry.model(), *args, dynamic=dynamic), config, boundary=True)
    return [fusion.placement.partition(":")[0] for fusion in report.fused]


def of_any_size(entry: Entry) -> Iterator[tuple[int, list[str]]]:
    yield ALL, placements(entry, dynamic=True)
    for size, marked in sizes(entry).items():
        try:
            yield size, placements(entry, marked=marked)
        except ConstraintViolationError:  # the model itself runs for no other size
            continue


def known(entry: Entry) -> set[int]:
    """The sizes that lose something, by the table above."""
    # takes at most 1,024 tokens, which a symbolic number may be more than
    if entry.targets[-1] == "preprocess":
        return {ALL, *entry.args()[0].shape[:-1]}
    return {size for name, size in LESS if name == entry.name}


@pytest.mark.parametrize("entry", one_in(60, ENTRIES.values()), ids=str)
def test_a_symbolic_size_loses_nothing(entry: Entry) -> None:
    static, found = placements(entry), dict(of_any_size(entry))
    less = {size for size, placed in found.items() if placed != static}
    assert less == (known(entry) if static else set()), f"{static}, but {found}"
