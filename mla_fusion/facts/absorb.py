"""The absorbed product: q_nope W_uk, one matrix per head, whatever operator carries it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

import torch
from torch.fx import Node

from mla_fusion.facts.decode import LARGE, Reading
from mla_fusion.facts.projection import Projection
from mla_fusion.fx.cone import Cone
from mla_fusion.fx.kinds import is_faithful_cast, is_view, is_writer, word
from mla_fusion.fx.program import Program, nodes_between
from mla_fusion.fx.shrink import Shrink
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import (
    expands,
    peel,
    reshapes_and_exact_casts,
    upward,
    views_and_exact_casts,
)
from mla_fusion.operators.known import EXPANDS, shape_of, value_of


@dataclass(frozen=True, kw_only=True)
class AbsorbFact:
    """``node[t, n, c] = sum_d q[t, columns[n][d]] * weight[n, d, c]``.

    weight      the node that holds W_uk (the operand, or what was expanded into it)
    columns     [N][D] columns of the product below (W_uq_qr's output)
    factor      what q_nope is multiplied by on the way (LongCat's scale), 1.0 where nothing is
    to_ndc      permutation of ``weight`` after which a reshape gives [N, D, Hckv]
    codes       of the node's shape: (token * N + n) * Hckv + c
    times       what else each token of q_nope is multiplied by, a node with one number for each;
                the same of the result
    pieces      products of some heads each, in the order of the heads, where W_uk is held in as
                many pieces; weight and to_ndc are then the first one's
    """

    projection: Projection
    weight: Node
    columns: tuple[tuple[int, ...], ...]
    factor: float
    to_ndc: tuple[int, ...]
    codes: torch.Tensor
    times: Node | None = None
    pieces: tuple[AbsorbFact, ...] = ()

    @property
    def by_weight(self) -> tuple[AbsorbFact, ...]:
        """The products with a weight each: this one, or its pieces."""
        return self.pieces or (self,)

    @property
    def weights(self) -> list[Node]:
        return [part.weight for part in self.by_weight]

    @property
    def node(self) -> Node:
        return self.projection.node

    @property
    def heads(self) -> int:
        return len(self.columns)

    @property
    def latent_dim(self) -> int:
        """Hckv, the columns of the product."""
        label = self.projection.column_labels[0]
        return int(shape_of(self.projection.weight)[self.projection.weight_labels.index(label)])

    @property
    def nope_dim(self) -> int:
        return len(self.columns[0])


def find(
    cone: Cone, probe: torch.Tensor, readings: dict[Node, Reading], projection: Projection
) -> AbsorbFact | None:
    """The projection as an absorb of columns of ``cone``'s product, or None."""
    reading = readings.get(projection.activation)
    if reading is None or not reading.single or reading.degree != 1:
        return None
    labels = projection.activation_labels
    summed, tokens, columns = projection.summed, projection.token_labels, projection.column_labels
    batch = projection.batch
    if len(summed) != 1 or len(columns) != 1:
        return None
    sizes = dict(zip(labels, reading.first.shape, strict=True))
    order = [labels.index(label) for label in (*batch, *tokens, *summed)]
    products = math.prod(sizes[label] for label in batch)
    count = math.prod(sizes[label] for label in tokens)
    grid = reading.first.permute(order).reshape(products, count, -1)  # [product, t, d] codes of q
    token, column = grid // cone.width, grid % cone.width
    weight, weight_node = projection.weight_labels, projection.weight
    # axes of size 1
    broadcast = [label for label in weight if label not in (*batch, *summed, *columns)]
    to_ndc = tuple(weight.index(label) for label in (*broadcast, *batch, *summed, *columns))
    width = cone.view.binding.size(shape_of(projection.weight)[weight.index(columns[0])])
    head, heads = torch.arange(products), products
    # the weight was repeated along sequences, which are merged with the heads
    if count != cone.tokens:
        repeated = _before_expand(cone, projection, to_ndc, (products, grid.shape[-1], width))
        if repeated is None:
            return None
        weight_node, head = repeated
        heads, to_ndc = int(head.max()) + 1, tuple(range(len(shape_of(weight_node))))
    by_head = head.argsort(stable=True)
    rows = products * count
    if rows != heads * cone.tokens or not torch.equal(
        head[by_head], torch.arange(products) * heads // products
    ):
        return None
    held = cone.view.binding.count_of(weight_node)
    if held != heads * grid.shape[-1] * width:
        return None  # one matrix for several heads
    codes = (token[..., :1] * heads + head.reshape(-1, 1, 1)) * width + torch.arange(width)
    token, column = (x[by_head].reshape(heads, cone.tokens, -1) for x in (token, column))
    expected = torch.arange(cone.tokens).reshape(1, -1, 1)
    if not bool((token == expected).all()) or not bool((column == column[:, :1]).all()):
        return None
    factor, times = uniform_factor(cone, probe, reading), None
    if factor is None:
        ratio = _ratio(cone, probe, reading).permute(order).reshape(products, count, -1)[by_head]
        of_tokens = ratio.reshape(token.shape)
        times = factor_of_tokens(cone.view, projection, heads * grid.shape[-1])
        if times is None or not torch.allclose(
            of_tokens, of_tokens[:1, :, :1].expand_as(of_tokens), rtol=1e-9
        ):
            return None
        factor = 1.0
    out = projection.product.out_labels
    by_axis = codes.reshape(
        [sizes[label] for label in batch] + [sizes[label] for label in tokens] + [width]
    )
    axes = (*batch, *tokens, *columns)
    codes = by_axis.permute([axes.index(label) for label in out])
    return AbsorbFact(
        projection=projection,
        weight=weight_node,
        columns=tuple(map(tuple, column[:, 0].tolist())),
        factor=factor,
        to_ndc=to_ndc,
        codes=codes,
        times=times,
    )


def factor_of_tokens(view: View, projection: Projection, width: int) -> Node | None:
    """Of an activation ``q * s``, ``width`` numbers a token, the ``s`` that holds one number for
    each.

    A product with a matrix for each head leaves it where it is: ``(q * s) W = (q W) * s``.
    """
    product = peel(projection.activation)
    operands = product.args[:2] if word(product) == "mul" else ()
    for operand in operands:
        if isinstance(operand, Node):
            sizes = (view.binding.shape_of(node) for node in (operand, projection.activation))
            if math.prod(next(sizes)) * width == math.prod(next(sizes)):
                return operand
    return None


def join_heads(
    view: View, pieces: Sequence[AbsorbFact], shrink: Shrink | None
) -> AbsorbFact | None:
    """Products of some heads each (a loop over heads, or over groups of them), put side by side, as
    one product.

    W_uk is one node of the graph of which the pieces' weights are parts, or is held in pieces.
    """
    if (
        len(pieces) < 2
        or len({(fact.factor, fact.latent_dim, fact.nope_dim) for fact in pieces}) > 1
    ):
        return None
    if any(fact.times is not None for fact in pieces):
        return None
    pieces = sorted(pieces, key=lambda fact: fact.columns)  # heads as the rotation has them
    weight, to_ndc = _whole_weight(view, pieces) or (pieces[0].weight, None)
    heads = sum(fact.heads for fact in pieces)
    codes, start = [], 0
    for fact in pieces:
        row = fact.heads * fact.latent_dim
        token, place = fact.codes // row, fact.codes % row
        codes.append(((token * heads + start) * fact.latent_dim + place).double())
        start += fact.heads
    roots = [fact.node for fact in pieces]
    side_by_side = _side_by_side(view, roots, codes, shrink)
    if side_by_side is None:
        return None
    node, held = side_by_side
    first = pieces[0].projection
    whole = replace(
        first, product=replace(first.product, node=node), pieces=tuple(f.projection for f in pieces)
    )
    columns = tuple(head for fact in pieces for head in fact.columns)
    if to_ndc is None:
        return AbsorbFact(
            projection=whole,
            weight=weight,
            columns=columns,
            factor=pieces[0].factor,
            to_ndc=pieces[0].to_ndc,
            codes=held,
            pieces=tuple(pieces),
        )
    return AbsorbFact(
        projection=whole,
        weight=weight,
        columns=columns,
        factor=pieces[0].factor,
        to_ndc=to_ndc,
        codes=held,
    )


def _whole_weight(view: View, pieces: Sequence[AbsorbFact]) -> tuple[Node, tuple[int, ...]] | None:
    """The nearest node that holds the pieces' weights in their order and nothing else, and how it
    is [N, D, Hckv].
    """
    size = sum(view.binding.count_of(fact.weight) for fact in pieces)
    lines = [
        {view.number(node): node for node in upward(fact.weight, views_and_exact_casts)}
        for fact in pieces
    ]
    for number, weight in lines[0].items():
        shape = view.binding.shape_of(weight)
        if math.prod(shape) != size or not all(number in line for line in lines):
            continue
        held = torch.arange(size, dtype=torch.float64).reshape(shape)
        parts = []
        for fact, line in zip(pieces, lines, strict=True):
            program = Program(
                [line[number]], nodes_between((line[number],), fact.weight), view.binding
            )
            value = program.run([held])[program.slot(fact.weight)]
            if not isinstance(value, torch.Tensor):
                return None
            parts.append(
                value.permute(fact.to_ndc).reshape(fact.heads, fact.nope_dim, fact.latent_dim)
            )
        whole = torch.cat(parts)
        for axes in permutations(range(len(shape))):
            if torch.equal(held.permute(axes).reshape(whole.shape), whole):
                return weight, axes
    return None


def _moves(node: Node) -> bool:
    return (
        is_view(node) or is_faithful_cast(node) or is_writer(node) or word(node) in ("cat", "stack")
    )


_FARTHEST = 64  # nodes walked from the last piece to where all stand side by side


def _side_by_side(
    view: View, roots: list[Node], codes: list[torch.Tensor], shrink: Shrink | None
) -> tuple[Node, torch.Tensor] | None:
    """The first node that holds every element of all the roots once, and which."""
    total = sum(part.numel() for part in codes)
    stack = [max(roots, key=view.position.__getitem__)]
    for node in stack:
        if len(stack) > _FARTHEST:
            return None
        stack.extend(user for user in node.users if _moves(user) and user not in stack)
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or node in roots:
            continue
        program = Program(roots, nodes_between(roots, node), view.binding, shrink=shrink)
        held = program.run(codes)[program.slot(node)]
        if isinstance(held, torch.Tensor) and held.numel() == total:
            flat = held.reshape(-1).sort().values
            if torch.equal(flat, torch.arange(total, dtype=flat.dtype)):
                return node, held.long()
    return None


def _before_expand(
    cone: Cone, projection: Projection, to_ndc: tuple[int, ...], sizes: tuple[int, int, int]
) -> tuple[Node, torch.Tensor] | None:
    """The weight before it was repeated, [.., N, D, Hckv], and which of its matrices each of the
    products is with.

    sizes  of the products' weight, [products, D, Hckv]
    """
    if to_ndc != tuple(range(len(to_ndc))):
        return None
    products, nope, width = sizes
    steps = upward(projection.weight, lambda step: expands(step) or reshapes_and_exact_casts(step))
    for step, source in pairwise(steps):
        before, whole = (cone.view.binding.shape_of(node) for node in (source, step))
        if word(step) not in EXPANDS or whole == before:
            continue
        before = (1,) * (len(whole) - len(before)) + before
        if cone.shrink is not None:
            whole = tuple(
                cone.shrink.merged(new) if old == 1 else new
                for old, new in zip(before, whole, strict=True)
            )
        rows = torch.arange(math.prod(before[:-1])).reshape(before[:-1]).expand(whole[:-1])
        if before[-1] != width or whole[-1] != width or rows.numel() != products * nope:
            return None
        rows = rows.reshape(products, nope)
        matrix = rows[:, 0] // nope
        return (
            (source, matrix)
            if torch.equal(rows, matrix[:, None] * nope + torch.arange(nope))
            else None
        )
    return None


def uniform_factor(cone: Cone, probe: torch.Tensor, reading: Reading) -> float | None:
    """What every element is multiplied by on its way from the product: a literal, never the value
    of a tensor.
    """
    if not reading.steady:
        return None
    ratio = _ratio(cone, probe, reading)
    factor = float(ratio.reshape(-1)[0])
    if not torch.allclose(ratio, torch.full_like(ratio, factor), rtol=1e-9, atol=0.0):
        return None
    return 1.0 if abs(factor - 1) < 1e-9 else float(f"{factor:.10g}")


def _ratio(cone: Cone, probe: torch.Tensor, reading: Reading) -> torch.Tensor:
    """What each element is multiplied by on its way from the product; no number where it is not
    known to be made of one of its elements (a factor of 0 hides which).
    """
    rows = cone.rows(probe).reshape(-1)
    if reading.first.numel() and int(reading.first.max()) >= rows.numel():
        return torch.full_like(reading.total, math.nan)
    return reading.total / (rows[reading.first] * LARGE)
