"""The witness accepts what the pass makes of a graph, and refuses the same with one thing wrong."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

import mla_fusion as mf
from mla_fusion.fx import module_path
from mla_fusion.witness.compare import Mismatch, Outcome, Pair, compare
from tests.catalogue import ENTRIES, base, prologues
from tests.harness import traced_graph
from tests.soundness.captures import copied

aten = torch.ops.aten
ACCEPTED = """
    PagedRotateHalf EvenOdd BlockOffset ComplexDense NpuOperatorsV2 FusedQkvA Sequences CombinedPool
    AbsorbByEinsum SlotsFromBlockTable GatheredTables TablesFromTheEnd Full PackedRows OperatorCache
    MxFull
""".split()


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads, level = torch.get_num_threads(), logging.getLogger("mla_fusion").level
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    logging.getLogger("mla_fusion").setLevel(level)


def kernels(graph: Graph) -> list[Node]:
    """The calls: their operator is another object once torch_npu is loaded."""
    v3 = torch.ops.npu.npu_mla_prolog_v3_functional.default
    return list(graph.find_nodes(op="call_function", target=v3))


# -- graphs, roles and pairs


@cache
def graphs(name: str, dynamic: bool = False) -> tuple[GraphModule, GraphModule]:
    """The graph of a catalogue entry, and what the pass makes of it."""
    entry = ENTRIES[name]
    gm = traced_graph(entry.model(), *entry.args(), dynamic=dynamic)
    new = copied(gm)
    assert mf.fuse(new, entry.config(verify="off")).fused
    return gm, new


def role(node: Node) -> str:
    name, value = node.meta[module_path.NAME], node.meta["val"]
    if name in ("x", "slots"):
        return name
    if name in ("table", "position"):
        return {"position": "positions"}.get(name, name)
    if "cache" in name or "pool" in name or name == "rest":
        return "tiles" if value.shape[-1] == 656 else "cache"
    if "scale" in name:
        return "cache_scale" if node.meta[module_path.ARGUMENT] else "scale"
    if "norm" in name:
        return "gamma"
    return "" if node.meta[module_path.ARGUMENT] else "weight"


def writes(graph: Graph) -> list[Node]:
    found = graph.find_nodes(op="call_function", target=aten.copy_.default)
    return sorted(found, key=lambda node: node.args[0].name)


def pairs_of(gm: GraphModule, new: GraphModule) -> list[Pair]:
    """What both graphs give out, and what they write into caches."""
    outputs = (next(iter(g.find_nodes(op="output"))).args[0] for g in (gm.graph, new.graph))
    found = [Pair(f"output {n}", *both) for n, both in enumerate(zip(*outputs, strict=True))]
    for before, after in zip(writes(gm.graph), writes(new.graph), strict=True):
        assert before.args[0].name == after.args[0].name
        tiles = role(before.args[0]) == "tiles"
        found.append(Pair(before.args[0].name, before.args[1], after.args[1], "tiles" * tiles))
    return found


def compared(gm: GraphModule, new: GraphModule, **options: Any) -> Outcome:
    roles = {node: role(node) for node in gm.graph.find_nodes(op="placeholder")}
    caches = [node for node in roles if roles[node] in ("cache", "tiles")]
    rows = caches[0].meta["val"].shape[:-1]
    given = {"rows": math.prod(rows), "block_size": rows[1], "cut": {}, **options}
    pairs = given.pop("pairs", None) or pairs_of(gm, new)
    return compare(gm.graph, new, pairs, given.pop("cut"), roles, **given)


# -- mutants


Mutate = Callable[["Mutant"], None]


class Mutant:
    """A copy of a rewritten graph with other arguments of the kernel, or readers of its results."""

    def __init__(self, new: GraphModule) -> None:
        self.gm = copied(new)
        (self.kernel,) = kernels(self.gm.graph)

    def call(self, before: Node, op: Any, *args: Any, **kwargs: Any) -> Node:
        with self.gm.graph.inserting_before(before):
            node = self.gm.graph.call_function(op, args, kwargs)
        given = torch.fx.node.map_arg((args, kwargs), lambda read: read.meta["val"])
        node.meta["val"] = op(*given[0], **given[1])
        return node

    def argument(self, place: int | str, op: Any, *args: Any) -> None:
        """Give the kernel op(argument) in place of an argument."""
        is_named = isinstance(place, str)
        own = self.kernel.kwargs[place] if is_named else self.kernel.args[place]
        changed = self.call(self.kernel, op, own, *args)
        if is_named:
            self.kernel.update_kwarg(place, changed)
        else:
            self.kernel.update_arg(place, changed)

    def result(self, place: int, op: Any, *args: Any) -> None:
        """Readers of a result read op(result)."""
        node = next(node for node in self.kernel.users if node.args[1] == place)
        changed = self.call(node.next, op, node, *args)
        node.replace_all_uses_with(changed, lambda user: user is not changed)


def exchanged(one: int, other: int) -> Mutate:
    def mutate(mutant: Mutant) -> None:
        args = list(mutant.kernel.args)
        args[one], args[other] = args[other], args[one]
        mutant.kernel.args = tuple(args)

    return mutate


def named(**values: Any) -> Mutate:
    def mutate(mutant: Mutant) -> None:
        mutant.kernel.kwargs = {**mutant.kernel.kwargs, **values}

    return mutate


def argument(place: int | str, op: Any, *args: Any) -> Mutate:
    return lambda mutant: mutant.argument(place, op, *args)


def result(place: int, op: Any, *args: Any) -> Mutate:
    return lambda mutant: mutant.result(place, op, *args)


def chain(*steps: Mutate) -> Mutate:
    def mutate(mutant: Mutant) -> None:
        for step in steps:
            step(mutant)

    return mutate


def transposed_wrongly(mutant: Mutant) -> None:
    weight = mutant.kernel.args[1]
    source = weight.args[0]
    mutant.kernel.update_arg(
        1, mutant.call(mutant.kernel, aten.reshape.default, source, list(weight.meta["val"].shape))
    )


def old_cache(mutant: Mutant) -> None:
    write = writes(mutant.gm.graph)[0]
    write.update_arg(1, write.args[0])


def in_halves(place: int) -> Mutate:
    """A result in pairs where the model has halves."""

    def mutate(mutant: Mutant) -> None:
        shape = next(n for n in mutant.kernel.users if n.args[1] == place).meta["val"].shape
        mutant.result(place, aten.reshape.default, [*shape[:-1], 2, shape[-1] // 2])
        last = next(n for n in mutant.kernel.users if n.args[1] == place)
        (view,) = (n for n in last.users if n.target is aten.reshape.default)
        turned = mutant.call(view.next, aten.transpose.int, view, -1, -2)
        flat = mutant.call(turned.next, aten.reshape.default, turned, list(shape))
        view.replace_all_uses_with(flat, lambda user: user is not turned)

    return mutate


def only_at_zero(mutant: Mutant) -> None:
    """A sine that is exactly 0 is 1."""
    sine = mutant.kernel.args[7]
    is_zero = mutant.call(mutant.kernel, aten.eq.Scalar, sine, 0)
    ones = mutant.call(mutant.kernel, aten.ones_like.default, sine)
    mutant.kernel.update_arg(7, mutant.call(mutant.kernel, aten.where.self, is_zero, ones, sine))


def other_row(mutant: Mutant) -> None:
    """Of the table of sines."""
    (gather,) = (n for n in mutant.gm.graph.nodes if n.target is aten.index_select.default)
    other = mutant.call(gather, aten.bitwise_or.Scalar, gather.args[2], 1)
    gather.update_arg(2, other)


MUTANTS: dict[str, tuple[str, Mutate]] = {
    "sin and cos exchanged": ("PagedRotateHalf", exchanged(7, 8)),
    "sin negated": ("PagedRotateHalf", argument(7, aten.neg.default)),
    "tables of the next token": ("PagedRotateHalf", argument(8, aten.roll.default, [1], [0])),
    "a sine of 0": ("PagedRotateHalf", only_at_zero),
    "W_dq reshaped, not transposed": ("PagedRotateHalf", transposed_wrongly),
    "columns of W_dkv_kr rolled": ("PagedRotateHalf", argument(4, aten.roll.default, [1], [1])),
    "columns of W_uq_qr rolled": ("PagedRotateHalf", argument(2, aten.roll.default, [1], [1])),
    "other order of heads": ("PagedRotateHalf", argument(3, aten.flip.default, [0])),
    "epsilon of the query": ("PagedRotateHalf", named(rmsnorm_epsilon_cq=1e-2)),
    "epsilon of the key": ("PagedRotateHalf", named(rmsnorm_epsilon_ckv=1e-5)),
    "no epsilon": ("PagedRotateHalf", named(rmsnorm_epsilon_ckv=0.0)),
    "no gamma": ("PagedRotateHalf", argument(5, aten.ones_like.default)),
    "gamma and 1": ("PagedRotateHalf", argument(6, aten.add.Tensor, 1)),
    "the next slots": (
        "PagedRotateHalf",
        chain(
            argument("cache_index", aten.add.Tensor, 1),
            argument("cache_index", aten.remainder.Scalar, 64),
        ),
    ),
    "slots of the other tokens": (
        "PagedRotateHalf",
        argument("cache_index", aten.flip.default, [0]),
    ),
    "tokens reversed": ("PagedRotateHalf", argument(0, aten.flip.default, [0])),
    "x bounded": ("PagedRotateHalf", argument(0, aten.clamp.default, -1000, 1000)),
    "numbers below 1e-8 lost": ("PagedRotateHalf", argument(0, aten.hardshrink.default, 1e-8)),
    "a small number added to rows of 0": ("PagedRotateHalf", argument(0, aten.add.Tensor, 1e-9)),
    "query scaled": ("PagedRotateHalf", named(qc_qr_scale=1.1)),
    "key scaled": ("PagedRotateHalf", named(kc_scale=1.1)),
    "nothing written": ("PagedRotateHalf", old_cache),
    "query_rope in halves": ("PagedRotateHalf", in_halves(1)),
    "staged query_rope in halves": ("ComplexDense", in_halves(1)),
    "weight scale doubled": ("Full", argument("dequant_scale_w_dkv_kr", aten.mul.Tensor, 2)),
    "token scale of another token": (
        "Full",
        argument("dequant_scale_x", aten.roll.default, [1], [0]),
    ),
    "int8 weights less one": ("Full", argument(1, aten.bitwise_and.Scalar, -16)),
    "rows of tiles": ("PackedRows", argument(4, aten.roll.default, [1], [1])),
    "an odd row for an even one": ("GatheredTables", other_row),
    "another block of the table": (
        "SlotsFromBlockTable",
        argument("cache_index", aten.bitwise_xor.Scalar, 16),
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_fusion_is_accepted(name: str) -> None:
    outcome = compared(*graphs(name))
    assert outcome.verified == "verified" and " and " not in outcome.compared
    assert outcome.figures and all(figure.elements for figure in outcome.figures)


@pytest.mark.parametrize("name", MUTANTS)
def test_one_thing_wrong_is_refused(name: str) -> None:
    entry, mutate = MUTANTS[name]
    gm, new = graphs(entry)
    mutant = Mutant(new)
    mutate(mutant)
    mutant.gm.graph.lint()
    with pytest.raises(Mismatch, match="relative error"):
        compared(gm, mutant.gm)


def test_errors_of_both_graphs_against_float64() -> None:
    outcome = compared(*graphs("PagedRotateHalf"))
    for figure in outcome.figures:
        assert figure.relative <= figure.row < 5e-2
        new, original = figure.float64
        assert 0 < new < 1.5 * original < 2e-2
    assert all(figure.float64 is None for figure in compared(*graphs("Full")).figures)


def test_few_and_many_tokens_are_compared() -> None:
    gm, new = graphs("PagedRotateHalf", dynamic=True)
    pairs = pairs_of(gm, new)[1:]
    outcome = compared(gm, new, pairs=pairs)
    first, second = map(int, re.findall(r"compared at T = (\d+) and (\d+),", outcome.compared)[0])
    assert first < 20 and second >= 100

    mutant = Mutant(new)  # wrong from the hundredth token on
    slots = mutant.kernel.kwargs["cache_index"]
    counts = mutant.call(mutant.kernel, aten.ones_like.default, slots)
    counts = mutant.call(mutant.kernel, aten.cumsum.default, counts, 0)
    early = mutant.call(mutant.kernel, aten.lt.Scalar, counts, 100)
    other = mutant.call(mutant.kernel, aten.flip.default, slots, [0])
    mutant.kernel.update_kwarg(
        "cache_index", mutant.call(mutant.kernel, aten.where.self, early, slots, other)
    )
    with pytest.raises(Mismatch, match="relative error"):
        compared(gm, mutant.gm, pairs=pairs_of(gm, mutant.gm)[1:])


def test_values_are_drawn_at_a_cut() -> None:
    """The second layer's x."""
    gm, new = graphs("TwoLayersOnePool")
    kernel = kernels(new.graph)[1]
    x = kernel.args[0]
    cut = {next(node for node in gm.graph.nodes if node.name == x.name): x}
    assert compared(gm, new, cut=cut).verified == "verified"
    kernel.kwargs = {**kernel.kwargs, "rmsnorm_epsilon_cq": 1e-2}
    with pytest.raises(Mismatch, match="relative error"):
        compared(gm, new, cut=cut)


def test_caches_of_many_bytes_are_drawn_with_fewer_blocks() -> None:
    """4 GiB of latents, of which nothing is allocated."""
    x, cos, sin, *caches, slots = (value.to("meta") for value in base.paged_args())
    caches = [cache.new_empty(65536, *cache.shape[1:]) for cache in caches]
    gm = traced_graph(prologues.PagedRotateHalf().to("meta"), x, cos, sin, *caches, slots)
    new = copied(gm)
    mf.fuse(new, mf.Config(verify="off"))
    outcome = compared(gm, new, pairs=pairs_of(gm, new)[1:])
    assert outcome.verified == "verified"
    assert all(figure.elements < 1 << 20 for figure in outcome.figures)


def test_what_does_not_run_is_refused() -> None:
    gm, new = graphs("PagedRotateHalf")
    mutant = Mutant(new)
    exchanged(9, 10)(mutant)  # the caches
    with pytest.raises(Mismatch, match="does not run on CPU"):
        compared(gm, mutant.gm)


def test_a_value_of_another_shape_is_refused() -> None:
    gm, new = graphs("PagedRotateHalf")
    pair = pairs_of(gm, new)[1]
    other = Pair("kv_cache", pair.before, pairs_of(gm, new)[2].after)
    with pytest.raises(Mismatch, match="shape"):
        compared(gm, new, pairs=[other])
