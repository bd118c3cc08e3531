"""The step at which the proof of a prologue ended: a better reason than that a norm or a rotation
was not found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.facts import kv_operator
from mla_fusion.facts.dynamic_quant import quantised_behind
from mla_fusion.facts.projection import Projection
from mla_fusion.facts.reading import ConeFacts, FactReader
from mla_fusion.fx.analytic import Barrier
from mla_fusion.fx.kinds import (
    argument,
    borrows_only,
    called,
    has_effect,
    holds_integers,
    is_cast,
    is_getitem,
    is_view,
    is_writer,
    word,
)
from mla_fusion.fx.program import nodes_between
from mla_fusion.fx.sizes import is_size, same, same_shape, sizes_of
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import reached, users
from mla_fusion.match import epsilon
from mla_fusion.match.near_miss import Facts, NearMiss, behind
from mla_fusion.operators.known import (
    JOINERS,
    SELECTIONS,
    is_collective,
    is_torchs_own,
    shape_of,
    value_of,
)
from mla_fusion.report.rejection import Refuse

# Reasons that say what is absent; the step that hides it says more.
_VAGUE = frozenset(
    "q_lora.absent kv_latent.absent rope.absent absorb.absent norm.absent rope.tables_differ "
    "reader.latent".split()
)
_FARTHEST = 64  # nodes from a step to the product or the write that it leads to


def because_of_a_step(
    view: View, reader: FactReader, facts: Facts, ups: Iterable[Projection], miss: NearMiss
) -> NearMiss:
    """The near miss with the code of the step that ended the proof, where there is one.

    facts   what was read of the projections of x
    ups     projections of what is made of these
    """
    if miss.reason.code == "q_lora.interrupted":
        return _mixed(facts, miss)
    read = list(dict.fromkeys((*facts, *ups)))
    if miss.reason.code in ("linear.hidden", *_VAGUE):
        for node, barrier in _collectives(view, {item.node for item in read}):
            return replace(miss, reason=Refuse(barrier.code, barrier.detail, (node,)))
    if miss.reason.code == "scale.unequal":
        return _cut(view, reader, read, miss) or miss
    if miss.reason.code not in _VAGUE or miss.certain:
        return miss
    quantising = {node for item in read for node in _quantising(item)}
    for product in dict.fromkeys(item.node for item in read):
        for node, barrier in _ends(view, product):
            if node in quantising:
                continue
            code = barrier.code
            if miss.reason.code == "norm.absent" and (
                code == "step.unknown" or _is_statistic(node, product)
            ):
                code = miss.reason.code  # it is no RMSNorm; what it is, the detail says
            detail = miss.reason.detail
            if code.startswith("step."):
                detail = barrier.detail
            elif code != "norm.absent" or not epsilon.is_named(detail):
                detail = f"{barrier.detail}; {detail}"
            nodes = miss.reason.nodes if epsilon.is_named(detail) else (node, *miss.nodes[:1])
            return replace(miss, reason=Refuse(code, detail, nodes))
    if miss.reason.code == "rope.absent":
        for node, detail in _rotations(view, [item.node for item in read]):
            return replace(miss, reason=Refuse("step.unknown", detail, (node, *miss.nodes[:1])))
    mixed = _mixed(facts, miss)
    if mixed is miss and (cut := _cut(view, reader, read, miss)) is not None:
        return cut
    for item in read if mixed is miss else ():
        if _is_concerned(view, miss, item.node, item in facts):
            for step in _next_steps(view, reader.read(item), miss):
                return replace(miss, reason=_because_of(view, step, item.node, miss))
    return mixed


def _is_concerned(view: View, miss: NearMiss, product: Node, is_of_x: bool) -> bool:
    """Could a step behind the product, or behind some of its columns, be the reason?"""
    code = miss.reason.code
    if is_of_x and code in ("kv_latent.absent", "rope.absent"):  # of the key's side
        made = reached([product], lambda node: behind(view, node), _FARTHEST)
        return any(map(_writes, made))
    return product in miss.nodes or code == "rope.absent"


def _next_steps(view: View, cone: ConeFacts, miss: NearMiss) -> Iterator[Node]:
    """Steps by which all of a product goes on, or all of some of its columns, to another product or
    a write: no fact that was read, nor on the way to what the near miss names beside a rotation.
    """
    product = cone.cone.node
    ends = (*(norm.node for norm in cone.norms), *(rope.node for rope in cone.ropes))
    explained = {node for end in ends for node in nodes_between((product,), end)}
    known = miss.nodes if miss.reason.code == "rope.absent" else ()
    parts = [product]
    for part in parts:  # grows as it is walked
        forms = list(reached([part], lambda node: _parts(view, node, whole=True)))
        every = {user for form in forms for user in form.users}
        inside = {piece for form in forms for piece in _parts(view, form)}
        readers = [user for user in every - inside if not (is_size(user) or borrows_only(user))]
        pieces = inside.difference(forms)
        if not readers:
            parts += sorted(pieces)
        if len(readers) != 1 or pieces or not explained.isdisjoint(readers):
            continue
        below = {user for node in reached(readers, users, _FARTHEST) for user in node.users}
        if _is_step(view, readers[0]) and _leads_on(view, readers[0]) and below.isdisjoint(known):
            yield readers[0]


def _parts(view: View, node: Node, whole: bool = False) -> Iterator[Node]:
    """What holds some of the node's numbers as they are; ``whole``: all of them."""
    for user in node.users:
        is_part = is_view(user) or (is_cast(user) and user not in view.barriers)
        if is_part and not (whole and _count(view, user) != _count(view, node)):
            yield user


def _count(view: View, node: Node) -> int:
    held = value_of(node)
    every = held if isinstance(held, (tuple, list)) else (held,)
    return sum(prod(view.binding.shape(one.shape)) for one in every)


def _is_step(view: View, node: Node) -> bool:
    """Does it compute with the numbers, by itself?"""
    ends = node.op != "call_function" or node in view.contractions or kv_operator.is_one(node)
    return not (ends or _writes(node) or word(node) in JOINERS)


def _writes(node: Node) -> bool:
    return is_writer(node) or has_effect(node)


def _because_of(view: View, step: Node, product: Node, miss: NearMiss) -> Refuse:
    given = [arg for arg in step.all_input_nodes if not view.sources(arg) and _is_row(arg)]
    if word(step) in ("add", "sub") and given and not holds_integers(step):
        return Refuse("linear.bias", f"{step.name} adds {given[0].name}", (step, product))
    detail = f"{step.name} ({called(step)}) stands behind {product.name}; {miss.reason.detail}"
    return replace(miss.reason, detail=detail, nodes=(step, *miss.nodes[:1]))


def _is_row(node: Node) -> bool:
    """Is it the same for every token?"""
    return all(same(size, 1) for size in sizes_of(node)[:-1])


def _rotations(view: View, products: Collection[Node]) -> Iterator[tuple[Node, str]]:
    """Operators of the user's own that may rotate query and key together: they read several of
    these products, and a result has the shape of an operand.
    """
    for node, barrier in view.barriers.items():
        operands = [arg for arg in node.all_input_nodes if view.sources(arg) & {*products}]
        made = frozenset[Node]().union(*(view.sources(arg) for arg in operands))
        shapes = {_shape(found) for found in (node, *node.users)} - {""}
        if (
            not is_torchs_own(node.target)
            and barrier.is_opaque
            and len(made & {*products}) > 1
            and shapes & set(map(_shape, operands))
            and any(_leads_on(view, found) for found in (node, *node.users))
        ):
            yield node, barrier.detail


def _shape(node: Node) -> str:
    value = value_of(node)
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else ""


def _quantising(item: Projection) -> list[Node]:
    """The steps of a quantisation that is read as a whole: they hide nothing."""
    how, values = item.quantised, quantised_behind(item.activation)
    source = how.source if how is not None else None
    if how is None or source is None:
        return [] if values is None else [values]
    ends = [end for end in (item.activation, how.token_scale) if end is not None]
    return [node for end in ends for node in nodes_between((source,), end)]


def _ends(view: View, product: Node) -> Iterator[tuple[Node, Barrier]]:
    """Steps that read nothing but this product's values, and lead to a product by a weight or to a
    write.
    """
    inside = {product, *view.members(product)}
    readers = dict.fromkeys(user for node in inside for user in node.users)
    for node in sorted(readers, key=view.position.__getitem__):
        barrier = view.barriers.get(node)
        if (
            barrier is None
            or is_cast(node)
            or is_writer(node)
            or node in view.contractions
            or kv_operator.is_one(node)
        ):
            continue
        read = {source for arg in node.all_input_nodes for source in view.sources(arg)}
        if read == {product} and _leads_on(view, node):
            yield node, barrier


def _cut(
    view: View, reader: FactReader, read: Iterable[Projection], miss: NearMiss
) -> NearMiss | None:
    for item in read if not epsilon.is_named(miss.reason.detail) else ():
        for node in _cuts(view, reader.read(item)):
            detail = f"{node.name} takes some rows of {item.node.name}"
            return replace(miss, reason=Refuse("tokens.cut", detail, (node, *miss.nodes[:1])))
    return None


def _cuts(view: View, cone: ConeFacts) -> Iterator[Node]:
    """Some of a product's tokens, in front of a step or of another product; none of what was
    rotated.
    """
    product = cone.cone.node
    rotated = {*reached([rope.node for rope in cone.ropes], users)}
    for node in view.members(product):
        if node not in rotated and _takes_tokens(node, shape_of(product)[:-1]):
            below = reached([node], lambda read: () if _writes(read) else users(read), _FARTHEST)
            steps = [step for step in below if not (is_view(step) or is_cast(step))]
            ends = [base for step in steps if _writes(step) for base in step.all_input_nodes[:1]]
            if any(view.sources(base) == {product} for base in ends):
                continue  # it is put back
            if any(step in view.contractions or _is_step(view, step) for step in steps):
                yield node


def _takes_tokens(node: Node, tokens: Sequence[Any]) -> bool:
    """Does the node take a part along an axis of tokens? ``tokens``: the sizes of these axes."""
    step = node.args[0] if is_getitem(node) else node
    if not isinstance(step, Node) or word(step) not in SELECTIONS:
        return False
    whole, kept = sizes_of(step.args[0]), sizes_of(node)
    axis = argument(step, "dim", 0)
    if not isinstance(axis, int) or not whole:
        return False
    taken, axis = whole[axis], axis % len(whole)
    if len(kept) == len(whole) and same(kept[axis], taken):
        return False
    for lead in (tokens, (prod(tokens),)):
        if same_shape(whole[: len(lead)], lead):  # there may be as many heads
            return axis < len(lead)
    return any(same(taken, size) for size in (prod(tokens), *tokens))


def _collectives(view: View, products: set[Node]) -> Iterator[tuple[Node, Barrier]]:
    """What takes values made of these products to other devices, and leads on."""
    for node, barrier in view.barriers.items():
        if is_collective(node) and _leads_on(view, node):
            read = (view.sources(arg) for arg in node.all_input_nodes)
            if not all(map(products.isdisjoint, read)):
                yield node, barrier


def _is_statistic(node: Node, product: Node) -> bool:
    """Does the node hold less than a product's rows do?"""
    held, whole = (value_of(found) for found in (node, product))
    if not isinstance(held, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return False
    return str(held.shape) != str(whole.shape)


def _leads_on(view: View, start: Node) -> bool:
    """Does what is made of it come to a product, or to a step that writes?"""
    below = (user for node in reached([start], users, _FARTHEST) for user in node.users)
    return any(_writes(node) or node in view.contractions for node in below)


def _mixed(facts: Facts, miss: NearMiss) -> NearMiss:
    """Tokens that are not kept apart, where that was asked."""
    for found in facts.values():
        mixed = found.cone.mixed
        if mixed is not None:
            return replace(
                miss, reason=Refuse("tokens.mixed", mixed.reason, (mixed.node, *miss.nodes[:1]))
            )
    return miss
