"""When two plans are one and the same but for the layer: then one is verified, and drawn, for both.

The key holds every node of the region and of what the plan reads, up to the inputs of the graph:
the operator, its literals, and its inputs by the order in which they are met. Of inputs it holds
shape, dtype and part, of constants their values. What the plan adds (columns, tables, attributes,
outputs) is in it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.commit.region import Region
from mla_fusion.compat import expression_of
from mla_fusion.emit.targets import target_of
from mla_fusion.fx.kinds import tensor_held
from mla_fusion.fx.sizes import is_symbolic
from mla_fusion.fx.view import View
from mla_fusion.operators.known import value_of
from mla_fusion.plan.plan import InPlace, Plan
from mla_fusion.prove.evaluate import same_attribute

# elements of a constant up to which its values are compared; a larger one is like itself alone
_FEW = 4096


def key(view: View, region: Region, plan: Plan) -> object:
    """Equal for plans that differ only in which layer they are."""
    numbers: dict[Node, int] = {}
    attributes: dict[object, int] = {}
    for leaf in region.leaves:
        numbers[leaf] = attributes.setdefault(same_attribute(leaf), len(numbers))
    for twin in region.twins:
        numbers[twin] = len(numbers)
    parts: list[object] = [
        (numbers[leaf], role, _described(leaf, role)) for leaf, role in region.leaves.items()
    ]
    for node in region.nodes:
        numbers[node] = len(numbers)
        done, inputs = view.call(node)
        parts.append((done, *[_read(read, numbers) for read in inputs]))
    twins = tuple((numbers[twin], numbers[node]) for twin, node in region.twins.items())
    ends = tuple(numbers.get(node, -1) for node in (*region.targets, *region.reads))
    return tuple(parts), twins, ends, _of_plan(plan, numbers)


def _of_plan(plan: Plan, numbers: dict[Node, int]) -> object:
    """What the call does with the nodes that it reads."""
    tables = tuple(
        tuple(
            (
                numbers.get(run.base, -1),
                run.field,
                run.start,
                run.step,
                run.count,
                run.factor,
                run.rows,
            )
            for run in table
        )
        for table in (plan.cos, plan.sin)
    )
    outputs = tuple(
        (numbers.get(item.node, -1), item.output, item.order) for item in plan.replacements
    )
    caches: object = None
    if isinstance(plan.caches, InPlace):
        held = tuple(
            (name, numbers.get(node, -1), _sizes(shape)) for name, node, shape in plan.caches.held
        )
        scales = tuple(
            scale
            and (
                scale.node is not None and numbers.get(scale.node, -1),
                scale.inverse,
                scale.factor,
            )
            for scale in (plan.caches.kv_scale, plan.caches.kr_scale)
        )
        where = plan.caches.slots
        slots = tuple(
            node and numbers.get(node, -1) for node in (where.index, where.block, where.offset)
        )
        places = slots, str(where.block_size), str(where.every), where.span
        caches = held, scales, places, plan.caches.mode, plan.caches.copies
    given = target_of(plan).attributes(plan).items()
    call = plan.target, _sizes(plan.lead), plan.heads_of_call, *given
    return tables, plan.candidate.columns, outputs, caches, plan.interleave, call


def _described(leaf: Node, role: str) -> object:
    value = leaf.meta["val"]
    if isinstance(value, (tuple, list)):
        return tuple(map(_tensor, value))
    if role == "constant":
        constant = tensor_held(leaf)
        assert constant is not None
        if constant.numel() > _FEW:
            return id(constant)
        bits = constant.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return constant.dtype, tuple(constant.shape), bytes(bits.tolist())
    return _tensor(value)


def _tensor(value: Any) -> object:
    return (value.dtype, _sizes(value.shape)) if isinstance(value, torch.Tensor) else value


def _sizes(shape: Sequence[Any]) -> tuple[object, ...]:
    return tuple([expression_of(size) if is_symbolic(size) else size for size in shape])


def _read(node: Node, numbers: dict[Node, int]) -> object:
    """An input by its number; one from outside, a size say, by what it is."""
    number = numbers.get(node)
    if number is not None:
        return number
    meaning = value_of(node)
    return str(expression_of(meaning)) if is_symbolic(meaning) else _tensor(meaning)
