"""A symbolic size loses nothing: what fuses with static sizes fuses with symbolic ones, in place
where in place.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

import mla_fusion as mf
from tests.catalogue import ENTRIES, Entry, prologues
from tests.catalogue.base import BLOCK_SIZE, BLOCKS, paged_args
from tests.exhaustive import one_in
from tests.harness import clones, distance, graph_of

ALL = 0  # dynamic=True: every size that dynamo finds
Places = list[tuple[int, int]]  # (argument, axis)

_LITERAL = (
    "the model counts with a literal that is a block's size at this one size alone: of other blocks"
    " its rows are other ones"
)
_ROWS = "the kernel takes whole blocks; whether so many rows are is known when the graph runs"
_SCATTER = "aten.scatter takes fewer indices than rows: nothing says that every token has a slot"
_APART = "the kernel takes two caches of one BlockNum; mark_dynamic gives each a symbol of its own"
LESS: dict[tuple[str, int], str] = {
    **dict.fromkeys((("SlotsInTwoWays", size) for size in (ALL, BLOCK_SIZE)), _LITERAL),
    ("SglangBuffers", 64): _ROWS,
    **dict.fromkeys((("BlocksOfOneHead", size) for size in (ALL, BLOCK_SIZE)), _ROWS),
    **dict.fromkeys((("RowOfEachRequest", size) for size in (ALL, 32)), _ROWS),
    **dict.fromkeys((("LongRowOfEachRequest", size) for size in (ALL, 2048)), _ROWS),
    **dict.fromkeys((("RowOfEachRequest", 8), ("LongRowOfEachRequest", 8)), _APART),
    **dict.fromkeys((("ScatterRows", 8), ("LayersAsRows", 8)), _SCATTER),
    **dict.fromkeys((("RowsReadToo", size) for size in (BLOCKS, BLOCK_SIZE)), _APART),
}


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
    unabsorbed = {"unabsorbed": "identity"} if "unabsorbed" in entry.tags else {}
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


def test_a_size_that_the_graph_has_no_node_for() -> None:
    """Two prologues, each of half of the tokens: how many the second half has, its x says."""

    class Halves(prologues.PagedRotateHalf):
        def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x, cos, sin, kv_cache, kr_cache, slots = args
            half = len(x) // 2
            caches = kv_cache, kr_cache
            first = x[:half], cos[:half], sin[:half], *caches, slots[:half]
            second = x[half:], cos[half:], sin[half:], *caches, slots[half:]
            return super().forward(*first), super().forward(*second)

    torch.manual_seed(0)
    model, args = Halves().eval(), paged_args()
    for place in (0, 1, 2, 5):
        torch._dynamo.mark_dynamic(args[place], 0)
    run = torch.compile(model, backend=mf.backend(), fullgraph=True)
    for tokens in (8, 7):
        given = [arg[:tokens] if len(arg) == 8 else arg for arg in args]
        with torch.no_grad():
            got, want = run(*clones(given)), model(*clones(given))
        assert all(distance(one, other) < 0.02 for one, other in zip(got, want, strict=True))
    report = mf.reports()[-1]
    assert len(report.fused) == 2 and not report.rejected
