"""Where the values that the kernel produces are read in the graph, and in which arrangement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, permutations

import torch
from torch.fx import Node

from mla_fusion.facts import dynamic_quant
from mla_fusion.facts.dynamic_quant import DynamicQuant
from mla_fusion.fx.kinds import (
    Kind,
    borrows_only,
    has_effect,
    is_cast,
    is_faithful_cast,
    is_getitem,
    is_reshape,
    is_view,
    is_writer,
    kind_of,
    word,
)
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.shrink import Shrink
from mla_fusion.fx.sizes import is_size
from mla_fusion.fx.tokens import Tokens
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import reached
from mla_fusion.operators.known import SELECTIONS, shape_of, value_of
from mla_fusion.plan.weight_modes import scales_of_row
from mla_fusion.report.rejection import Refuse


@dataclass(frozen=True)
class Replacement:
    """``node`` is ``output`` of the kernel, its axes permuted by ``order``, then reshaped and cast
    to fit.
    """

    node: Node
    output: str
    order: tuple[int, ...] | None

    @property
    def is_free(self) -> bool:
        return self.order is None


def live_users(node: Node) -> list[Node]:
    """Users that matter: whoever only asks for a size, keeps no element, or is itself unread, does
    not.
    """
    return [user for user in node.users if is_live(user) and not keeps_nothing(user)]


def is_live(user: Node) -> bool:
    """Does somebody read it, or what it does, and for more than a size?"""
    read = bool(user.users) or user.op == "output" or has_effect(user)
    return read and not is_size(user)


def keeps_nothing(node: Node) -> bool:
    """Is the node a slice without elements?"""
    source = node.args[0] if is_getitem(node) else node
    if not isinstance(source, Node) or word(source) not in SELECTIONS:
        return False
    value = value_of(node)
    return isinstance(value, torch.Tensor) and 0 in [
        size for size in value.shape if isinstance(size, int)
    ]


def leads_only_to(starts: Iterable[Node], targets: Iterable[Node]) -> Node | None:
    """The first node that reads ``starts`` for anything else than ``targets``; None: they lead to
    ``targets`` only.
    """
    stops = set(targets)
    behind = reached(
        (node for node in starts if node not in stops),
        lambda node: (user for user in live_users(node) if user not in stops),
    )
    return next((node for node in behind if node.op == "output" or has_effect(node)), None)


class ValueTree:
    """The views and casts of one value, with the code of every element they hold."""

    def __init__(
        self,
        view: View,
        root: Node,
        codes: torch.Tensor,
        duplicates: Sequence[tuple[Node, torch.Tensor]] = (),
        shrink: Shrink | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        """``duplicates``: other nodes that hold the value, with their codes; ``shrink``,
        ``tokens``: as they were made.

        A node that takes some of many tokens has no codes: it reads the node above it, and stays in
        the graph.
        """
        self._view, self._shrink, self._tokens = view, shrink, tokens
        self.roots = [root]
        self.parent: dict[Node, Node] = {}
        self.codes: dict[Node, object] = {}
        self._grow(root, codes)
        for node, of_node in duplicates:
            if node not in self.codes:
                self.roots.append(node)
                self._grow(node, of_node)
        self.nodes = list(self.codes)

    def _grow(self, root: Node, codes: torch.Tensor) -> None:
        order = [root]
        for node in order:
            for user in node.users:
                if (
                    (is_view(user) or is_faithful_cast(user))
                    and user.args[0] is node
                    and user not in self.parent
                ):
                    self.parent[user] = node
                    order.append(user)
        self.codes |= zip(order, self._held(codes, order), strict=True)
        if self._tokens:
            self._tokens.follow(order[1:])
            for node in order[1:]:
                if not self._tokens.knows(node):
                    self.codes[node] = None

    def _held(self, codes: torch.Tensor, order: Sequence[Node]) -> list[object]:
        """What each of these nodes holds of the codes of the first; equal layers have it in
        common.
        """
        view, place = self._view, {node: -1 - at for at, node in enumerate(order)}
        steps = []
        for node in order[1:]:
            call, inputs = view.call(node)
            steps.append((call, *(place.get(read) or view.number(read) for read in inputs)))

        def run() -> list[object]:
            program = Program(order[:1], order[1:], view.binding, shrink=self._shrink)
            values = program.run([codes])
            return [values[program.slot(node)] for node in order]

        return view.once(codes, (self._shrink, *steps), run)

    def in_order(self, node: Node) -> bool:
        """Does the node hold the whole value, element after element?"""
        codes = self.codes[node]
        how = "in order", self._view.call(node)[0]
        return isinstance(codes, torch.Tensor) and self._view.once(
            codes, how, partial(_count_up, codes)
        )

    def readers(self, ignored: Collection[Node] = ()) -> dict[Node, list[Node]]:
        """Nodes of the tree whose values something outside reads, with who reads them."""
        inside, skip = set(self.nodes), set(ignored)
        found = {}
        for node in self.nodes:
            users = [user for user in live_users(node) if user not in inside and user not in skip]
            users = [
                user
                for user in users
                if not self._feeds_a_duplicate(user) and not borrows_only(user)
            ]
            if users:
                found[node] = users
        return found

    def _feeds_a_duplicate(self, user: Node) -> bool:
        """The write through which a duplicate came to be; it is dead once the duplicates are
        replaced.
        """
        return len(self.roots) > 1 and is_writer(user)

    def replacements(
        self, output: str, shape: tuple[int, ...], ignored: Collection[Node] = ()
    ) -> list[Replacement]:
        """How to make every node that is read outside from ``output`` of the given shape.

        A node that is not the whole value in some order of axes (a slice of it) is made from its
        parent.
        """
        wanted, made = list(self.readers(ignored)), {}
        while wanted:
            node = wanted.pop()
            if node in made:
                continue
            codes = self.codes[node]
            order = None
            if isinstance(codes, torch.Tensor):
                order = self._view.once(codes, shape, partial(_arrange, shape, codes))
            if order is not None:
                made[node] = Replacement(node, output, None if order == () else order)
            elif node in self.roots:
                raise Refuse(
                    "reader.latent",
                    f"{node.name} is not {output}, reshaped or with its axes permuted",
                    (node,),
                )
            else:
                wanted.append(self.parent[node])
        if reader := self.reader_of_rounding():
            what = f"{reader.name} reads what rounding leaves of {output}"
            raise Refuse("reader.latent", what, (reader,))
        return list(made.values())

    def reader_of_rounding(self) -> Node | None:
        """Something that computes with the value and with the same value rounded, as with two
        numbers: the kernel returns one, and what rounding leaves of it is lost.
        """
        readers: dict[object, set[Node]] = {}
        for node in self.nodes:
            for user in node.users.keys() - self.codes.keys():
                readers.setdefault(self._rounded_to(node, user), set()).add(user)
        reached = [_reached(users) for users in readers.values()] if len(readers) > 1 else []
        both = (node for one, other in combinations(reached, 2) for node in one & other)
        return min(both, default=None)

    def _rounded_to(self, node: Node, user: Node) -> object:
        """The narrowest dtype that the value has passed through before the user computes with it;
        a user may cast it itself, to float16 for example.
        """
        path = [user, node] if is_cast(user) else [node]
        while node in self.parent:
            node = self.parent[node]
            path.append(node)
        held = (step.meta["val"] for step in reversed(path))
        dtypes = [value.dtype for value in held if isinstance(value, torch.Tensor)]
        return min(dtypes, key=lambda dtype: dtype.itemsize)


def _reached(nodes: Iterable[Node]) -> set[Node]:
    """What is computed with the values of these nodes; nodes that only move or join them aside."""
    starts = (node for node in nodes if node.op != "output")
    found = reached(starts, lambda node: (user for user in node.users if user.op != "output"))
    return {node for node in found if kind_of(node) is not Kind.MOVEMENT}


def quantised_rows(
    view: View,
    rows: ValueTree,
    width: int,
    dynamic: DynamicQuant,
    shrink: Shrink | None,
    tokens: Tokens | None = None,
) -> tuple[ValueTree, ValueTree | None] | None:
    """The quantised values of ``rows`` and their scales, over all quantisations that equal
    ``dynamic``; None where one is not of whole rows, each ``width`` wide. (A projection and an
    indexer may each have their own.)
    """
    values: dict[Node, torch.Tensor] = {}
    scales: dict[Node, torch.Tensor] = {}
    for node in rows.nodes:
        codes = rows.codes[node]
        for result, holds_values in dynamic_quant.results(view, dynamic, node):
            if not isinstance(codes, torch.Tensor) or not _are_rows(codes, width):
                return None
            if tokens:
                tokens.follow(nodes_between((node,), result))
                if not tokens.knows(result):
                    return None
            number = codes[..., 0] // width
            if dynamic.by_nodes and len(shape_of(result)) == codes.dim():
                number = number.unsqueeze(-1)
            if dynamic.format.in_blocks:  # in pairs, [.., width / 64, 2]
                of_row = torch.arange(scales_of_row(dynamic.format, width)).reshape(-1, 2)
                number = number[..., None, None] * of_row.numel() + of_row
            (values if holds_values else scales)[result] = codes if holds_values else number
    if not values or not (scales or dynamic.by_nodes):
        return None
    of_scales = _tree(view, scales, shrink, tokens) if scales else None
    return _tree(view, values, shrink, tokens), of_scales


def _tree(
    view: View, codes: dict[Node, torch.Tensor], shrink: Shrink | None, tokens: Tokens | None
) -> ValueTree:
    first, *duplicates = codes.items()
    return ValueTree(view, *first, duplicates, shrink, tokens)


def _are_rows(codes: torch.Tensor, width: int) -> bool:
    """Is every line of the last axis one row from its first element to its last?"""
    first = codes[..., :1]
    if codes.shape[-1] != width or bool((first % width).any()):
        return False
    return bool((codes == first + torch.arange(width)).all())


def _count_up(codes: torch.Tensor) -> bool:
    return torch.equal(codes.reshape(-1).long(), torch.arange(codes.numel()))


def _arrange(shape: tuple[int, ...], codes: torch.Tensor) -> tuple[int, ...] | None:
    """The permutation of what the kernel gives out in ``shape`` that, reshaped, is ``codes``; ()
    where it is that shape.
    """
    codes = codes.to(torch.int64)
    kernel = torch.arange(torch.Size(shape).numel())
    if codes.numel() != kernel.numel():
        return None
    kernel = kernel.reshape(shape)
    if codes.shape == kernel.shape and torch.equal(codes, kernel):
        return ()
    for order in permutations(range(kernel.dim())):
        if torch.equal(kernel.permute(order).reshape(codes.shape), codes):
            return order
    return None


def whole_readers(
    root: Node, output: str, shape: tuple[object, ...], same: Callable[..., bool]
) -> list[Replacement]:
    """Replacements for a whole cache: only reshapes are followed, so no codes are needed (caches
    are large).
    """
    found = []
    for node in reached([root], lambda node: filter(is_reshape, node.users)):
        if not all(map(is_reshape, live_users(node))):
            rank = len(shape)
            free = same(shape_of(node), shape)
            found.append(Replacement(node, output, None if free else tuple(range(rank))))
    return found
