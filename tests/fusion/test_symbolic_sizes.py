"""Sizes that are computed, known at run time alone, or bounded by a table: the numbers hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_fusion as mf
from tests import harness
from tests.catalogue import base, prologues
from tests.catalogue.base import Base
from tests.exhaustive import one_in

Call = tuple[Any, ...]


class Calls(nn.Module):
    """A prologue called by ``run(self, *arguments)``."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.prologue, self.run = Base(), run
        self.weights = nn.Parameter(
            torch.randn(3, *self.prologue.q_a_proj.weight.shape).bfloat16() / 32
        )

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


def of_layer(m: Calls, layer: int, *args: Tensor) -> Any:
    m.prologue.down = lambda x: F.linear(x, m.weights[layer])  # type: ignore[method-assign]
    return m.prologue(*args)


def last_tokens(m: Calls, n: int, *args: Tensor) -> Any:
    x, cos, sin, kv, kr, slots = args
    return m.prologue(x[n:], cos[n:], sin[n:], kv, kr, slots[n:])


def all_but_the_last(m: Calls, n: int, *args: Tensor) -> Any:
    x, cos, sin, kv, kr, slots = args
    end = x.shape[0] - n
    return m.prologue(x[:end], cos[:end], sin[:end], kv, kr, slots[:end])


def decode_and_prefill(m: Calls, n: int, *args: Tensor) -> Any:
    x, cos, sin, kv, kr, slots = args
    first = m.prologue(x[:n], cos[:n], sin[:n], kv, kr, slots[:n])
    return *first, *m.prologue(x[n:], cos[n:], sin[n:], kv, kr, slots[n:])


def from_a_start(m: Calls, n: int, *args: Tensor) -> Any:
    x, cos, sin, kv, kr, slots = args
    """Tables of 40 rows: far fewer tokens than verification would like."""
    rows = slice(n, n + x.shape[0])
    return m.prologue(x, cos[rows], sin[rows], kv, kr, slots)


def first_rotations_scaled(m: Calls, n: int, *args: Tensor) -> Any:
    query, rotated = m.prologue(*args)
    return query, torch.slice_scatter(rotated, rotated[:n] * 3, 0, 0, n)


def one_row_of_a_table(m: Calls, n: int, x: Tensor, cos: Tensor, *args: Tensor) -> Any:
    """At the few tokens that verification draws first, there may be no row n."""
    return m.prologue(x, torch.select_scatter(cos, cos[0], 0, n), *args)


def tables_of_40(call: Call) -> Call:
    n, x, _, _, *rest = call
    return n, x, *base.tables(40), *rest


DYNAMIC: dict[str, tuple[Callable[..., Any], list[Call], int]] = {
    "weights of a layer by its number": (
        of_layer,
        [(0, *base.paged_args()), (1, *base.paged_args())],
        1,
    ),
    "all behind the first n": (
        last_tokens,
        [(3, *base.paged_args()), (2, *base.paged_args(12))],
        1,
    ),
    "all but the last n": (
        all_but_the_last,
        [(3, *base.paged_args()), (2, *base.paged_args(12))],
        1,
    ),
    "decode and prefill": (
        decode_and_prefill,
        [(3, *base.paged_args()), (2, *base.paged_args(12))],
        2,
    ),
    "results of the first n": (
        first_rotations_scaled,
        [(3, *base.paged_args()), (2, *base.paged_args(12))],
        1,
    ),
    "rows of a short table": (
        from_a_start,
        [tables_of_40((3, *base.paged_args())), tables_of_40((9, *base.paged_args(12)))],
        1,
    ),
    "one row of a table": (
        one_row_of_a_table,
        [(3, *base.paged_args()), (2, *base.paged_args(12))],
        1,
    ),
}


def compare(model: nn.Module, calls: list[Call], fused: int, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    run = torch.compile(model, backend=mf.backend(), fullgraph=True, dynamic=dynamic)
    for call in calls:
        mine, theirs = ([a.clone() if isinstance(a, Tensor) else a for a in call] for _ in range(2))
        with torch.no_grad():
            found, wanted = [*run(*mine), *mine], [*model(*theirs), *theirs]
        tensors = [(a, b) for a, b in zip(found, wanted, strict=True) if isinstance(a, Tensor)]
        assert all(harness.distance(a, b) < 2e-2 for a, b in tensors)
    report = mf.reports()[-1]
    assert len(report.fused) == fused and not report.rejected, str(report)


class Windows(Base):
    """Reads windows of the caches, with the new rows, as wholes. No size is that of their rests."""

    def forward(self, *args: Tensor) -> Any:
        results = super().forward(*args)
        return *results, *(window.float().mean(0) for window in self.windows)

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        self.windows = []
        for cache, new in ((kv_cache, c_kv), (kr_cache, k_pe)):
            flat, end = cache.view(-1, new.shape[-1]), 5 + new.shape[0]
            window = torch.slice_scatter(flat[: cache.shape[0] * 8], new, 0, 5, end)
            flat[slots] = window[5:end]
            self.windows.append(window)


def test_rows_behind_a_symbolic_end() -> None:
    compare(Windows(), [base.paged_args(), base.paged_args(12)], 1, dynamic=True)


class Numbered(Base):
    def __init__(self, numbers: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.numbers = numbers

    def slots(self, slots: Tensor, query: Tensor) -> Tensor:
        return self.numbers(slots, query.shape[0])


NUMBERS = [
    lambda slots, tokens: torch.tensor([-1, 5]),  # from the end of a cache of any size
    # what the first symbol is bound to
    lambda slots, tokens: slots // 10007 * tokens + slots % 10007,
    lambda slots, tokens: slots // torch.tensor(10007) * tokens + slots % 10007,
]


@pytest.mark.parametrize("numbers", NUMBERS)
def test_literals_beside_symbolic_sizes(numbers: Callable[[Tensor, int], Tensor]) -> None:
    graph = harness.traced_graph(Numbered(numbers), *base.paged_args(2), dynamic=True)
    (fusion,) = mf.explain(graph).fused
    assert fusion.placement.startswith("staged: ")


@pytest.mark.parametrize("name", one_in(3, DYNAMIC))
def test_dynamic_numbers(name: str) -> None:
    run, calls, fused = DYNAMIC[name]
    compare(Calls(run), calls, fused, dynamic=True)


def by_mask(m: Calls, mask: Tensor, *args: Tensor) -> Any:
    x, cos, sin, kv, kr, slots = args
    return m.prologue(x[mask], cos[mask], sin[mask], kv, kr, slots[mask])


def by_index(m: Calls, mask: Tensor, *args: Tensor) -> Any:
    x, cos, sin, kv, kr, slots = args
    rows = mask.nonzero()[:, 0]
    return m.prologue(x[rows], cos[rows], sin[rows], kv, kr, slots[rows])


@pytest.mark.parametrize("run", [by_mask, by_index])
def test_tokens_that_are_counted_at_run_time(run: Callable[..., Any]) -> None:
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1]).bool()
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        compare(
            Calls(run), [(mask, *base.paged_args()), (~mask, *base.paged_args())], 1, dynamic=None
        )


def by_token(m: Calls, *args: Tensor) -> Any:
    x, cos, sin, kv, kr, slots = args
    return m.prologue(*(each.flatten(0, 1) for each in (x, cos, sin)), kv, kr, slots.flatten())


@pytest.mark.parametrize("shapes", [((2, 4), (3, 5), (4, 2)), ((2, 16), (3, 16), (4, 16))])
def test_batches_and_lengths_that_change(shapes: tuple[tuple[int, int], ...]) -> None:
    """Automatic dynamic shapes: a symbol or two for each tensor, which guards make equal."""
    calls, before = [], len(mf.reports())
    for sizes in shapes:
        args = enumerate(base.paged_args(sizes[0] * sizes[1]))
        calls.append(tuple(a if k in (3, 4) else a.unflatten(0, sizes) for k, a in args))
    compare(Calls(by_token), calls, 1, dynamic=None)
    assert len(mf.reports()) == before + 2


def split_behind(m: Calls, n: int, *args: Tensor) -> Any:
    query, query_rope, *caches = m.prologue(*args)
    return torch.cat([query[:n] * 2, query[n:]]), query_rope, *caches


def test_one_token_more_than_a_symbol() -> None:
    """Guards of the second call: T = n + 1, and as many slots; no literal is near that by 1."""
    compare(Calls(split_behind), [(n, *base.paged_args(t)) for n, t in ((2, 5), (6, 7))], 1, None)


def several_of_each(m: Calls, ends: Tensor, table: Tensor, x: Tensor, *args: Tensor) -> Any:
    cos, sin, kv, kr, _ = args
    size = kv.shape[1]
    places = ends[:, None] + torch.arange(len(x) // len(table)) - 1
    slots = table.gather(1, places // size) * size + places % size
    return m.prologue(x, cos, sin, kv, kr, slots.flatten())


@pytest.mark.parametrize("dynamic", [None, True])
def test_as_many_tokens_of_each_sequence_as_a_quotient_says(dynamic: bool | None) -> None:
    """Guards say T = S (T // B): three sequences have a start each, so S is B."""
    calls, more = list[Call](), (9, 1, 1, 1)
    for b, n in ((2, 3), (3, 5), (4, 2)):
        x, cos, sin, kv, kr, slots = base.paged_args(b * n)
        ends, caches = torch.arange(1, b + 1), (kv.repeat(more), kr.repeat(more))
        calls.append((ends, ends[:, None] - 1, x, cos, sin, *caches, slots))
    compare(Calls(several_of_each), calls, 1, dynamic)
    assert mf.reports()[-1].fused[0].placement == "in place"


def first_part(m: Calls, prefix: Tensor, *args: Tensor) -> Any:
    x, cos, sin, slots = (
        each.split([len(prefix), len(each) - len(prefix)])[0] for each in (*args[:3], args[5])
    )
    return m.prologue(x, cos, sin, *args[3:5], slots)


def test_tokens_that_are_split_at_a_symbol() -> None:
    calls = [(torch.ones(n), *base.paged_args(t)) for n, t in ((3, 8), (4, 12))]
    compare(Calls(first_part), calls, 1, dynamic=True)
    assert mf.reports()[-1].fused[0].placement == "in place"


def in_groups(m: Calls, *args: Tensor) -> Any:
    *parts, kv, kr, slots = args
    return m.prologue(*(torch.cat(parts[k : k + 3]) for k in (0, 3, 6)), kv, kr, slots)


def test_groups_with_symbols_of_their_own() -> None:
    torch._dynamo.reset()
    x, cos, sin, *rest = base.paged_args(12)
    parts = [part for each in (x, cos, sin) for part in each.split((3, 4, 5))]
    for part in (*parts, *rest):
        torch._dynamo.mark_dynamic(part, 0)
    with torch.no_grad():
        torch.compile(Calls(in_groups), backend=mf.backend(), fullgraph=True)(*parts, *rest)
    assert len(mf.reports()[-1].fused) == 1, str(mf.reports()[-1])


@pytest.mark.parametrize(
    ("model", "marked", "placement"),
    one_in(
        1,
        [
            (prologues.PagedRotateHalf(), (0, 1, 2, 5), "in place"),
            (prologues.PagedRotateHalf(), (0, 1, 2), "staged"),  # no size says 8 of the tokens
            (prologues.NpuOperators(), (0, 1, 2, 5), "in place"),
        ],
    ),
)
def test_tokens_marked_dynamic(
    model: torch.nn.Module, marked: tuple[int, ...], placement: str
) -> None:
    """Every tensor has a symbol of its own; the operators say what must be as many."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    args = base.paged_args(8)
    for place in marked:
        torch._dynamo.mark_dynamic(args[place], 0)
    with torch.no_grad():
        compiled_model = torch.compile(model, backend="mla_fusion", fullgraph=True)
        compiled_model(*args)
        report = mf.reports()[-1]
        assert [f.placement.partition(":")[0] for f in report.fused] == [placement], str(report)
        if 5 not in marked:  # as many tokens as slots, then; both ways of running it say so
            more = base.paged_args(13)[:5]
            for run in (model, compiled_model):
                with pytest.raises((RuntimeError, mf.meta.ContractError), match="shape"):
                    run(*more, args[5])
        else:
            graphs = len(mf.reports())
            given = base.paged_args(13)
            fused = [compiled_model(*(ours := harness.clones(given))), *ours]
            assert len(mf.reports()) == graphs, "another number of tokens needs no second graph"
            harness.assert_as_exact(model, given, fused)
