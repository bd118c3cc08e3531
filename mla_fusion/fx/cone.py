"""The cone of a matrix product: the plain nodes that depend on it, as one program to run on probes.

Free inputs of the program are the product itself and the *bases*: the tables, gammas and other
tensors that meet the product in the cone, taken as far up as they are merely re-indexed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property

import torch
from torch.fx import Node

from mla_fusion.fx.contraction import Contraction
from mla_fusion.fx.kinds import is_view, word
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.shrink import Shrink
from mla_fusion.fx.sizes import is_size, is_symbolic
from mla_fusion.fx.token_axis import Broken, Crossed
from mla_fusion.fx.tokens import Tokens
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import origin, table_columns
from mla_fusion.operators.known import shape_of, value_of

_LARGEST = 1 << 24  # elements of one probe value; beyond it lies attention, not the prologue
# of one node: a join of more is of a whole model's values, and would be read once for each
_MOST_INPUTS = 128
# elements of all that a probe draws: a gibibyte; no prologue has a table as long
_LARGEST_BASES = 1 << 27


class Cone:
    """Members of ``product``'s cone, ready to run.

    shrink   fewer tokens than the graph's, or None where all of them are probed
    codes    int64, of the product's shape: token * width + column of every element
    tokens   T, as bound for probing (all_tokens: in the graph);  width: columns of the weight
    mixed    the first step that does not keep the tokens apart, where they are probed fewer than
             they are
    is_lost  is an axis probed shorter that is none of the token axes followed, if as long? It has
             no members
    """

    def __init__(
        self,
        view: View,
        product: Contraction,
        weight_is_left: bool,
        shrink: Shrink | None = None,
        token_proof: Tokens | None = None,
        lead: Sequence[object] | None = None,
    ) -> None:
        """``lead``: the sizes of the token axes before any were merged, where they are not the
        product's own.
        """
        self.view = view
        self.token_proof = (
            token_proof if token_proof is not None else Tokens(shrink, view.binding.meaning)
        )
        self.mixed: Broken | None = None
        self.is_lost = False
        self.product = product
        self.shrink = shrink
        self.node = product.node
        self.nodes = [node for node in view.members(self.node) if self._is_probed(node)]
        symbolic = tuple(shape_of(self.node))
        shape = view.binding.shape(symbolic)
        weight = product.left_labels if weight_is_left else product.right_labels
        columns = [axis for axis, label in enumerate(product.out_labels) if label in weight]
        tokens = [axis for axis in range(len(shape)) if axis not in columns]
        self.all_tokens = math.prod(shape[axis] for axis in tokens)
        lead = lead or [symbolic[axis] for axis in tokens]
        self.token_proof.start(self.node, lead, tokens)
        if shrink is not None:
            rows = tuple(shape[axis] for axis in tokens)
            small = shrink.lead(rows)
            if small != rows and shrink.full not in view.binding.shape(lead):
                self.is_lost, self.nodes = True, []
            sizes = iter(small)
            shape = tuple(
                size if axis in columns else next(sizes) for axis, size in enumerate(shape)
            )
        order = tokens + columns
        self.width = math.prod(shape[axis] for axis in columns)
        self.tokens = math.prod(shape[axis] for axis in tokens)
        flat = torch.arange(self.tokens * self.width).reshape([shape[axis] for axis in order])
        self.codes = flat.permute([order.index(axis) for axis in range(len(shape))])
        self._join_bases()
        if sum(math.prod(self.shape(base)) for base in self.bases) > _LARGEST_BASES:
            self.nodes = []
            self._join_bases()

    def _is_probed(self, node: Node) -> bool:
        value = value_of(node)
        if len(node.all_input_nodes) > _MOST_INPUTS:
            return False
        if isinstance(value, torch.Tensor):
            size = value.numel()
            if is_symbolic(size):
                size = math.prod(self.view.binding.shape(value.shape))
            return (size if self.shrink is None else self.shrink.merged(size)) <= _LARGEST
        return not is_symbolic(value)

    def _join_bases(self) -> None:
        """Find what meets the product, peel it to its base, and put the peeled nodes into the
        program.
        """
        inside = {self.node, *self.nodes}
        bases: dict[Node, None] = {}
        aliases: dict[Node, Node] = {}
        canonical: dict[int, Node] = {}
        ordered: list[Node] = []
        placed: set[Node] = set(inside)
        for node in self.nodes:
            for side in node.all_input_nodes:
                if side in placed or is_size(side):
                    continue
                found = [] if self._is_literal(side) else self._bases_of(side)
                chain = nodes_between(found, side)
                for base in found:
                    first = canonical.setdefault(self.view.number(base), base)
                    if first is base and base not in aliases:
                        bases[base] = None
                    elif first is not base:
                        aliases[base] = first
                    placed.add(base)
                for link in chain:
                    if link not in placed and not is_size(link):
                        placed.add(link)
                        ordered.append(link)
            ordered.append(node)
        self.bases = list(bases)
        if self._leave_out_mixed((*self.bases, *aliases), ordered):
            self._join_bases()  # anew: what meets only nodes left out is none of the cone's
            return
        self.program = Program(
            [self.node, *self.bases], ordered, self.view.binding, aliases, shrink=self.shrink
        )
        self.aliases = aliases
        self._slots = {
            node: self.program.slot(node) for node in (self.node, *self.bases, *aliases, *ordered)
        }

    def _leave_out_mixed(self, bases: tuple[Node, ...], ordered: list[Node]) -> bool:
        """Nodes that mix tokens: what fewer tokens show does not hold for all. Is any left out?"""
        if not self.token_proof:
            return False
        self.token_proof.start_outside(bases)
        self.token_proof.follow(ordered)
        broken = {
            node: state
            for node in ordered
            if (state := self.token_proof.broken(node)) is not None
            and not isinstance(state, Crossed)  # run, for its diagonal
        }
        if self.mixed is None:
            self.mixed = next((broken[node] for node in self.nodes if node in broken), None)
        before = len(self.nodes)
        self.nodes = [node for node in self.nodes if node not in broken]
        ordered[:] = [node for node in ordered if node not in broken]
        return len(self.nodes) < before

    def _is_literal(self, side: Node) -> bool:
        """Signs, masks or one number, made of literals: no table. (A table may be made of an
        arange.)
        """
        if not self.view.is_constant(side):
            return False
        base = origin(side, table_columns)
        return not self._has_token_rows(base) or self.view.is_plain_constant(base)

    def _bases_of(self, side: Node) -> list[Node]:
        """What ``side`` is put together from, as tables whose rows can be tokens'. Where columns
        are as many as tokens, [columns, tokens], those before that have a row for each token.
        """
        base = origin(side, table_columns)
        whole = self._has_token_rows(base) and not self._is_padded(base)
        is_turned = self.shape(base)[-1:] == (self.tokens,)
        if whole and (self._rows(base) in (1, self.tokens) or not is_turned):
            return [base]
        parts = list(dict.fromkeys(origin(part, table_columns) for part in self._parts(base)))
        if whole:
            return parts if parts and {*map(self._rows, parts)} == {self.tokens} else [base]
        return parts if parts and all(map(self._has_token_rows, parts)) else [base]

    def _rows(self, base: Node) -> int:
        return math.prod(self.shape(base)[:-1])

    def _has_token_rows(self, base: Node) -> bool:
        rows = self._rows(base)
        return rows > 0 and self.tokens % rows == 0

    def _is_padded(self, base: Node) -> bool:
        """A table padded with ones and zeros: whole heads are rotated, and their q_nope columns do
        not change.
        """
        return word(base) == "cat" and any(
            self.view.is_constant(arg) for arg in base.all_input_nodes
        )

    def _parts(self, base: Node) -> list[Node]:
        """Through rearrangements: tables stacked as [[cos, -sin], [sin, cos]], transposed,
        padded.
        """
        found, stack = [], [base]
        while stack:
            node = stack.pop()
            if _rearranges(node):
                stack.extend(arg for arg in reversed(node.all_input_nodes) if not is_size(arg))
            elif not self.view.is_constant(node):
                found.append(node)
        return found

    def moved(self, product: Contraction, move: Mapping[Node, Node]) -> Cone:
        """The cone of ``product``, which is this one with other nodes; the program is shared."""
        self.token_proof.copy(move)
        other = copy(self)
        other.product, other.node = product, product.node
        other.nodes = [move[node] for node in self.nodes]
        other.bases = [move[base] for base in self.bases]
        other.aliases = {move[alias]: move[base] for alias, base in self.aliases.items()}
        other._slots = {move[node]: slot for node, slot in self._slots.items()}
        return other

    def shape(self, node: Node) -> tuple[int, ...]:
        """The shape that a base has in a probe."""
        shape = self.view.binding.shape(_shape(node))
        return shape if self.shrink is None else self.shrink.rows(shape)

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """Equal for cones that mean the same: same steps, same shapes of what comes in."""
        shapes = tuple((self.shape(base), str(_dtype(base))) for base in self.bases)
        return tuple(self.codes.shape), self.codes.stride(), shapes, self.program.signature

    def draw(self, generator: torch.Generator) -> list[torch.Tensor]:
        """Random values for the bases: normal for floats, permutations for integers, coin tosses
        for masks.
        """
        values = []
        for base in self.bases:
            shape, dtype = self.shape(base), _dtype(base)
            if dtype.is_complex:
                values.append(torch.randn(shape, generator=generator, dtype=torch.complex128))
            elif dtype.is_floating_point:
                values.append(torch.randn(shape, generator=generator, dtype=torch.float64))
            elif dtype == torch.bool:
                values.append(torch.rand(shape, generator=generator, dtype=torch.float32) < 0.5)
            else:
                values.append(
                    torch.randperm(math.prod(shape), generator=generator).reshape(shape).to(dtype)
                )
        return values

    def rows(self, probe: torch.Tensor) -> torch.Tensor:
        """[tokens, width]: a value of the product, whatever its layout in the graph."""
        flat = torch.empty(self.tokens * self.width, dtype=probe.dtype)
        flat[self.codes.reshape(-1)] = probe.reshape(-1)
        return flat.reshape(self.tokens, self.width)

    def run(
        self, probe: torch.Tensor, bases: list[torch.Tensor], wanted: Iterable[Node] | None = None
    ) -> list[object]:
        """Values by slot; of nothing but what is ``wanted`` and what that is made of, where
        anything is.
        """
        return self.program.run([probe, *bases], None if wanted is None else map(self.slot, wanted))

    def bases_of(self, node: Node) -> list[Node]:
        """The bases that have a part in the node."""
        above = self.program.above([self.slot(node)])
        return [base for base in self.bases if self.slot(base) in above]

    def slot(self, node: Node) -> int:
        return self._slots[node]


_REARRANGING = frozenset("stack cat neg".split())


def _rearranges(node: Node) -> bool:
    return is_view(node) or word(node) in _REARRANGING


def _shape(node: Node) -> tuple[object, ...]:
    return tuple(getattr(value_of(node), "shape", ()))


def _dtype(node: Node) -> torch.dtype:
    return getattr(value_of(node), "dtype", torch.float64)
