"""Does a rewritten graph give what the original graph gives?"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_fusion.fx.kinds import MODEL_FLOATS, attribute, is_float, tensor_held
from mla_fusion.fx.sizes import Binding, has_symbols, is_symbolic
from mla_fusion.operators.known import shape_of, value_of
from mla_fusion.report.rejection import Refuse
from mla_fusion.report.report import Figure
from mla_fusion.witness import draws, sizes
from mla_fusion.witness.draws import KINDS, WIDE, Draws
from mla_fusion.witness.interpreter import Interpreter, Unrunnable, cone_of, dependent, widened
from mla_fusion.witness.judge import Judge, Pair, squares

_SMALL_CACHE = 1 << 20  # elements up to which a cache is taken as it is
_LARGEST_CACHE = 1 << 28
_COSTLY = 256  # tokens from which one draw holds ordinary rows and rows with outliers side by side
_STEP, _JITTERS = 2.0**-8, 4


@dataclass(frozen=True)
class Outcome:
    """
    verified  "verified", and what was not
    figures   of each pair: how far the new value is from the original one, and both from float64
    compared  what was run, as text
    tokens    counts of tokens that were run
    left_out  parts that were not compared
    """

    verified: str
    figures: tuple[Figure, ...]
    compared: str
    tokens: tuple[int, ...]
    left_out: tuple[str, ...] = ()


def compare(
    original: Graph,
    rewritten: GraphModule,
    pairs: Sequence[Pair],
    cut: Mapping[Node, Node],
    roles: Mapping[Node, str],
    *,
    rows: Any = None,
    block_size: Any = None,
    binding: Binding | None = None,
    seed: int = 0,
) -> Outcome:
    """Run both graphs on drawn values, and compare each pair.

    cut               nodes of ``original`` whose values are drawn, and their copies in
                      ``rewritten``. Nothing of a pair may be computed from what lies above a cut
                      node but through it. Placeholders stand for each other by position, attributes
                      by name
    roles             of cut nodes ("x" where nothing is said), placeholders and attributes:
                      ``draws`` lists them
    rows, block_size  how many rows of caches slots count, and how many of them are a block; by
                      default the rows of the smallest cache, and one block
    binding           numbers for symbolic sizes

    Raises ``Refuse("verify.mismatch")`` where a pair differs by more than rounding explains.
    """
    task = _Task(original, rewritten, pairs, cut, roles, rows, block_size, seed)
    binding = sizes.bound(original) if binding is None else binding
    failed: Unrunnable | None = None
    for step in sizes.STEPS:
        try:
            first = task.at(binding, step)
            break
        except Unrunnable as error:
            failed = failed or error
    else:
        assert failed is not None
        raise Refuse("verify.mismatch", str(failed), (failed.node,)) from failed
    made = [first]
    most = sizes.largest_literal(task.nodes, task.of_x)
    for larger in sizes.larger(first.binding, task.x, task.inputs, most):
        try:
            made.append(task.at(larger, step))
            break
        except Unrunnable:  # the model itself does not take so many tokens
            continue
    return _told(task, made)


def _told(task: _Task, made: Sequence[_Run]) -> Outcome:
    worst: dict[Pair, Figure] = {}
    for run in made:
        for pair, figure in run.figures.items():
            known = worst.setdefault(pair, figure)
            worst[pair] = figure if figure.relative > known.relative else known
    figures = tuple(replace(f, float64=made[0].errors.get(p)) for p, f in worst.items())
    left_out = tuple(dict.fromkeys(pair.part for pair in task.pairs if pair not in worst))
    tokens = tuple(run.tokens for run in made)
    count = sum(run.count for run in made)
    return Outcome(
        "verified" + (f" except {', '.join(left_out)}" if left_out else ""),
        figures,
        f"compared at T = {' and '.join(map(str, tokens))}, {_plural(count, 'draw')}, "
        + _plural(len(worst), "output"),
        tokens,
        left_out,
    )


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


class _Task:
    """Two graphs, at any sizes.

    nodes, new_nodes  what the pairs need, of the original and of the rewritten graph
    leaves            of the original graph, with their roles
    """

    def __init__(
        self,
        original: Graph,
        rewritten: GraphModule,
        pairs: Sequence[Pair],
        cut: Mapping[Node, Node],
        roles: Mapping[Node, str],
        rows: Any,
        block_size: Any,
        seed: int,
    ) -> None:
        self.pairs, self.rows, self.block_size, self.seed = pairs, rows, block_size, seed
        new_inputs = rewritten.graph.find_nodes(op="placeholder")
        stands_for = dict(zip(new_inputs, original.find_nodes(op="placeholder"), strict=False))
        stands_for |= {copy: node for node, copy in cut.items()}
        self.nodes, leaves = cone_of([n for p in pairs for n in p.of_original], cut)
        self.new_nodes, new_leaves = cone_of([n for p in pairs for n in p.of_new], stands_for)
        by_name = {node.target: node for node in leaves if node.op == "get_attr"}
        # of the rewritten graph: which leaf of the original one each is
        self.copies: dict[Node, Node] = {}
        self.constants: dict[Node, Any] = {}
        for node in new_leaves:
            of = stands_for.get(node) or by_name.get(node.target)
            if of is None:
                self.constants[node] = attribute(node)
            else:
                self.copies[node] = of
        self.leaves: dict[Node, str] = {}
        for node in dict.fromkeys([*leaves, *self.copies.values()]):
            role = roles.get(node, "x" if node in cut else "")
            if node.op == "get_attr" and node not in roles:
                held = tensor_held(node)
                self.constants[node] = attribute(node) if held is None else held.detach().cpu()
            else:
                self.leaves[node] = role
        x = [node for node, role in self.leaves.items() if role == "x"]
        self.x = shape_of(x[0])
        tensors = {n: role for n, role in self.leaves.items() if isinstance(value_of(n), Tensor)}
        self.inputs = [
            shape_of(node) for node, role in tensors.items() if role not in ("x", "weight")
        ]
        self.caches = [node for node, role in tensors.items() if role in draws.CACHES]
        self.of_x = dependent(self.nodes, x)

    def at(self, binding: Binding, step: int) -> _Run:
        """Compare at these sizes. Raises ``Unrunnable``."""
        binding = sizes.with_room(binding, self.x, self.inputs, step)
        count = {node: math.prod(binding.shape(shape_of(node))) for node in self.caches}
        large = [node for node in self.caches if count[node] > _SMALL_CACHE]
        if large:
            try:
                return _Run(self, binding, self.pairs, fewer=True)
            except Unrunnable:
                pass
        huge = {node for node in large if count[node] > _LARGEST_CACHE}
        kept = [p for p in self.pairs if huge.isdisjoint(cone_of([p.before], self.leaves)[1])]
        return _Run(self, binding, kept, fewer=False)


class _Run:
    """All draws at one binding of the sizes.

    figures  the largest of each pair
    errors   of each pair in the first draw: of the new and of the original value, against float64
    count    how many draws were compared
    """

    def __init__(
        self, task: _Task, binding: Binding, pairs: Sequence[Pair], fewer: bool
    ) -> None:
        self.task, self.binding, self.pairs = task, binding, pairs
        self.tokens = sizes.tokens_of(task.x, binding)
        self.figures: dict[Pair, Figure] = {}
        self.errors: dict[Pair, tuple[float, float]] = {}
        self.count = 0
        self._draws = self._drawn(fewer)
        leaves = task.leaves
        moving = [node for node, role in leaves.items() if draws.changes(node, role)]
        new_x = [node for node, of in task.copies.items() if leaves.get(of) == "x"]
        new_moving = [node for node, of in task.copies.items() if of in moving]
        self._before = self._graph(cone_of([n for p in pairs for n in p.of_original], leaves)[0], task.of_x, moving)
        self._after = self._graph(cone_of([n for p in pairs for n in p.of_new], task.copies)[0], dependent(task.new_nodes, new_x), new_moving)
        self._judge = Judge(self._is_quantised, set(binding.shape(task.x[:-1])))
        self._all_draws()
