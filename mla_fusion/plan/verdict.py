"""Is a candidate what the kernel computes? Each rule raises ``Refuse`` with its code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch.fx import Node

from mla_fusion.facts.absorb import AbsorbFact
from mla_fusion.facts.projection import Projection
from mla_fusion.fx.held import numbers
from mla_fusion.fx.program import nodes_between
from mla_fusion.fx.sizes import is_symbolic
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import origin, peel, upward, views_and_exact_casts, views_and_model_casts
from mla_fusion.match.candidate import Candidate, KeyHalf, KeySide
from mla_fusion.match.finder import rotation_ratio
from mla_fusion.meta.number_formats import BLOCK, INT8, NumberFormat
from mla_fusion.operators.known import dtype_of, shape_of, value_of
from mla_fusion.prove import evaluate
from mla_fusion.prove.operators import real
from mla_fusion.report.rejection import Refuse


def judge(view: View, candidate: Candidate) -> None:
    """Apply every rule that the facts alone decide, in the order of the table below."""
    for rule in RULES:
        rule(view, candidate)


def judge_static(view: View, candidate: Candidate) -> None:
    """The same for an operator whose products are int8 by fixed scales, each with an int32 bias or
    none.
    """
    for rule in (_norms, _int8_products, _rotation, _dtypes, _streams):
        rule(view, candidate)


def judge_half(view: View, half: KeyHalf) -> None:
    """The same for the key's side alone."""
    for rule in RULES_OF_HALF:
        rule(view, half)


def _model(view: View, candidate: Candidate) -> None:
    """A model in another precision hears that first: its norms and products are wrong for the same
    reason.
    """
    for node in (candidate.query.down.weight, candidate.key.down.weight):
        dtype = dtype_of(node)
        if dtype in (torch.float16, torch.float64) or (
            dtype == torch.float32 and not _holds_bfloat16(node)
        ):
            name = str(dtype).removeprefix("torch.")
            raise Refuse(
                "dtype.region",
                f"weight {peel(node).name} is {name}, the kernel takes bfloat16",
                (node,),
            )


def _norms(view: View, candidate: KeyHalf) -> None:
    k, sides = candidate.key, []
    if isinstance(candidate, Candidate):
        q = candidate.query.norm
        sides.append(("c_q", q.node, q.gamma, q.runtime_eps, q.low_precision))
    if k.norm is not None:
        sides.append(("c_kv", k.norm.node, k.gamma, k.norm.runtime_eps, k.norm.low_precision))
    elif k.operator is not None:
        sides.append(("c_kv", k.operator.node, k.gamma, None, None))
    for name, node, gamma, runtime_eps, low_precision in sides:
        if runtime_eps is not None:
            raise Refuse(
                "norm.runtime_eps", f"epsilon of {name} is {runtime_eps.name}", (node, runtime_eps)
            )
        if low_precision is not None:
            dtype = str(dtype_of(low_precision)).removeprefix("torch.")
            raise Refuse(
                "norm.low_precision",
                f"{low_precision.name}, in the norm of {name}, is {dtype}",
                (node, low_precision),
            )
        if gamma is None:
            raise Refuse("norm.gamma_absent", f"{node.name} is the normed {name}", (node,))
        judge_gamma(name, node, gamma, candidate.dtype)


def judge_gamma(name: str, node: Node, gamma: Node, dtype: torch.dtype) -> None:
    """Can the weight of this norm be given in ``dtype``, the model's, with every number as it
    is?
    """
    known = numbers(origin(gamma, views_and_exact_casts))
    if dtype == torch.bfloat16 and (
        _holds_bfloat16(gamma) or (known is not None and known.bfloat16)
    ):
        return  # looked at again whenever it is packed
    if dtype != torch.bfloat16 and dtype_of(gamma) == dtype:
        return
    held = str(dtype_of(gamma)).removeprefix("torch.")
    why = (
        "its numbers cannot be looked at here"
        if known is None
        else "some of its numbers are no bfloat16 numbers"
    )
    raise Refuse("norm.gamma_dtype", f"{gamma.name} of {name} is {held}, and {why}", (node, gamma))


def _projections(view: View, candidate: Candidate) -> None:
    for item in candidate.projections:
        out = zip(item.product.out_labels, shape_of(item.node), strict=True)
        if any(is_symbolic(size) for label, size in out if label in item.column_labels):
            sizes = list(shape_of(item.node))
            raise Refuse(
                "linear.symbolic", f"{item.node.name} has shape {sizes}", (item.node, item.weight)
            )
        bias = item.product.bias
        if bias is not None and item.product.factors[1] != 0.0 and not _is_zero(view, bias):
            raise Refuse("linear.bias", f"{item.node.name} adds {bias.name}", (item.node, bias))
        if item.product.factors[0] != 1.0:
            raise Refuse(
                "linear.scaled",
                f"{item.node.name} has alpha {item.product.factors[0]}",
                (item.node,),
            )


def _is_zero(view: View, bias: Node) -> bool:
    """Is it, for every number of tokens?"""
    return view.is_constant(bias) and evaluate.holds(
        view, {}, lambda run: not bool(real(run.value(bias)).re.any())
    )


def _int8_products(view: View, candidate: Candidate) -> None:
    """One scale for each column, and nothing beside it but an int32 bias."""
    absorbed = candidate.query.absorb.projection.node
    for item in (item for item in candidate.projections if item.node is not absorbed):
        how, bias = item.quantised, item.product.bias
        by_scale = how is not None and how.token_scale is None and how.format is INT8
        if how is None or not by_scale or dtype_of(item.activation) != torch.int8:
            raise Refuse(
                "quant.not_static",
                f"{item.node.name} multiplies by {item.weight.name}",
                (item.node, item.weight),
            )
        columns = item.width
        scale = how.weight_scale.meta["val"]
        if (
            scale.dtype != torch.float32
            or how.offset is not None
            or item.product.factors != (1.0, 1.0)
        ):
            raise Refuse(
                "quant.scale",
                f"{how.weight_scale.name} of {item.node.name}",
                (item.node, how.weight_scale),
            )
        for vector in (scale, *([bias.meta["val"]] if bias is not None else [])):
            if prod(view.binding.shape(vector.shape)) != view.binding.size(columns):
                raise Refuse(
                    "quant.scale",
                    f"{item.node.name} has {columns} columns, a vector {list(vector.shape)}",
                    (item.node,),
                )
        if bias is not None and dtype_of(bias) != torch.int32:
            raise Refuse(
                "linear.bias",
                f"{item.node.name} adds {bias.name}, which is no int32",
                (item.node, bias),
            )


def _quantisation(view: View, candidate: Candidate) -> None:
    """One of the weight_quant_modes, each quantised value and its scales used by all that share
    it.
    """
    q, k = candidate.query, candidate.key
    down = [part for item in (q.down, k.down, k.down_rope) for part in item.by_weight]
    up = [part for item in (q.up_nope, q.up_rope) for part in item.by_weight]
    quantised = [item for item in (*down, *up) if item.quantised is not None]
    if not quantised:
        return
    for item in quantised:
        if _format(item) is not None:
            _scales(view, item)
    of_down, of_up = ({_format(item) for item in items} for items in (down, up))
    form = _format(up[0])
    whole = of_down == of_up == {form}
    if not whole and (of_up != {form} or of_down != {None} or form is None or form.partial is None):
        names = ", ".join(f"{item.node.name} {_name_of(item)}" for item in (*down, *up))
        raise Refuse("quant.mixed", names, (quantised[0].node,))
    for items in (down, up) if whole else (up,):
        first, *others = (_quantised_input(view, item) for item in items)
        if any(other != first for other in others):
            names = ", ".join(dict.fromkeys(item.activation.name for item in items))
            raise Refuse(
                "quant.tokens_differ",
                f"the quantised activations are {names}",
                tuple(item.node for item in items),
            )


def _format(item: Projection) -> NumberFormat | None:
    return item.quantised.format if item.quantised is not None else None


def _name_of(item: Projection) -> str:
    """The format as messages have it."""
    form = _format(item)
    return (
        form.name
        if form is not None
        else "in bfloat16"
        if item.quantised is None
        else "in another format"
    )


def _quantised_input(view: View, item: Projection) -> tuple[object, ...]:
    """What is equal for projections that read one quantised tensor with the same scales."""
    quantised = item.quantised
    assert quantised is not None and quantised.token_scale is not None
    numbers = _value(view, item.activation), _value(view, quantised.token_scale)
    return *numbers, quantised.token_factor, quantised.token_inverse


def _value(view: View, node: Node) -> tuple[str, int]:
    """Equal for values that are the same, element by element, whatever views lead to them."""
    base = peel(node)
    in_order = view.in_order(base, node)
    return ("base", view.number(base)) if in_order else ("term", view.terms.number(node))


def _scales(view: View, item: Projection) -> None:
    quantised = item.quantised
    assert quantised is not None
    if quantised.format is INT8 and dtype_of(item.activation) != torch.int8:
        detail = f"{item.node.name} multiplies {item.activation.name} by {item.weight.name}"
        raise Refuse("quant.weights_only", detail, (item.node, item.weight))
    if quantised.token_scale is None:
        raise Refuse("quant.static", f"{item.node.name} has no pertoken_scale", (item.node,))
    if quantised.offset is not None:
        raise Refuse(
            "quant.scale",
            f"{item.node.name} adds {quantised.offset.name}",
            (item.node, quantised.offset),
        )
    for scale, wanted in zip(
        (quantised.weight_scale, quantised.token_scale), _scale_shapes(item), strict=True
    ):
        value, of_blocks = (
            scale.meta["val"],
            quantised.format is not None and quantised.format.in_blocks,
        )
        shape, whole = view.binding.shape(value.shape), view.binding.shape(wanted)
        fits = shape == whole if of_blocks else prod(shape) == prod(whole)
        dtypes = _CODES if of_blocks else _FACTORS
        if value.dtype not in dtypes or not fits:
            held, *taken = (str(dtype).removeprefix("torch.") for dtype in (value.dtype, *dtypes))
            detail = f"{scale.name} of {item.node.name} is {held} {list(value.shape)}"
            needed = f"{' or '.join(taken)} {list(wanted)} is needed"
            raise Refuse("quant.scale", f"{detail}, {needed}", (item.node, scale))


def _scale_shapes(item: Projection) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of the weight's scales and of the tokens', as npu_quant_matmul has them."""
    form, lead = _format(item), shape_of(item.activation)[:-1]
    if form is None or not form.in_blocks:
        return (item.width,), tuple(lead)
    depth = shape_of(item.weight)[item.weight_labels.index(item.summed[0])]
    pairs = depth // (2 * BLOCK)
    return (pairs, item.width, 2), (*lead, pairs, 2)


_FACTORS = (torch.float32, torch.bfloat16)
_CODES = (torch.uint8, torch.float8_e8m0fnu)


def _rotation(view: View, candidate: Candidate) -> None:
    q, k = candidate.query, candidate.key
    nodes = tuple(
        node for node in (q.rope.node, k.rope.node if k.rope else None) if node is not None
    )
    if q.rope.rope_dim != k.rope_dim:
        raise Refuse(
            "rope.tables_differ",
            f"Dr is {q.rope.rope_dim} in the query, {k.rope_dim} in the key",
            nodes,
        )
    if q.rope.layout != k.layout:
        raise Refuse(
            "rope.layouts_differ",
            f"the query leaves RoPE {q.rope.layout}, the key {k.layout}",
            nodes,
        )
    ratio = rotation_ratio(view, q, k)
    if ratio is None:
        of_query, of_key = (
            " and ".join(dict.fromkeys(_named(run.base) for run in (*side.cos, *side.sin)))
            for side in (q.rope, k)
        )
        detail = f"the query's are taken from {of_query}, the key's from {of_key}"
        raise Refuse("rope.tables_differ", detail, nodes)
    if abs(ratio - q.absorb.factor) > 1e-6 * abs(ratio):
        factors = f"q_nope by the factor {q.absorb.factor:g}, q_pe by {ratio:g}, relative to k_pe"
        raise Refuse("scale.unequal", factors, (q.absorb.node, *nodes))


def _dtypes(view: View, candidate: Candidate) -> None:
    for item in candidate.projections:
        form = _format(item)
        operand = form.element if form is not None else torch.bfloat16
        roles = (("activation", item.activation, operand), ("weight", item.weight, operand))
        for role, node, wanted in (*roles, ("product", item.node, torch.bfloat16)):
            dtype = dtype_of(node)
            if dtype == torch.float32 and (role == "product" or _holds_bfloat16(node)):
                # the kernel adds up in float32 too; a product of float32 operands has those refused
                continue
            if dtype != wanted:
                names = [str(kind).removeprefix("torch.") for kind in (dtype, wanted)]
                detail = f"{role} {peel(node).name} is {names[0]}, the kernel takes {names[1]}"
                raise Refuse("dtype.region", detail, (node,))
    _between(_region(candidate), candidate.dtype)


def _between(region: Iterable[Node], dtype: torch.dtype) -> None:
    """Are the floats between products ``dtype``, or no narrower than the kernel's float32?"""
    for node in region:
        value = value_of(node)
        if (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype not in (dtype, *_WIDE)
        ):
            found = str(value.dtype).removeprefix("torch.")
            raise Refuse("dtype.region", f"{node.name} is {found}", (node,))


_WIDE = (torch.float32, torch.float64)


def _half_dtypes(view: View, half: KeyHalf) -> None:
    """The products are read as they are: both of one dtype, of 16 bits, with which norm and
    rotation begin.
    """
    for product in half.taken:
        dtype = dtype_of(product)
        if dtype not in _OF_16_BITS or dtype != half.dtype:
            found = f"product {product.name} is {str(dtype).removeprefix('torch.')}"
            raise Refuse(
                "dtype.region", f"{found}, the operator takes bfloat16 or float16", (product,)
            )
    _between(_region_of_key(half.key), half.dtype)


_OF_16_BITS = (torch.bfloat16, torch.float16)


def _half_scale(view: View, half: KeyHalf) -> None:
    """A multiple of the norm is none of what the operator computes; it has no argument for the
    factor.
    """
    k = half.key
    if k.norm is not None and k.scale != 1.0:
        raise Refuse(
            "norm.scaled", f"{k.norm.node.name} is {k.scale:g} times the norm", (k.norm.node,)
        )


def _holds_bfloat16(node: Node) -> bool:
    """Are the numbers, though in a wider dtype, bfloat16's by a cast?"""
    dtypes = (dtype_of(above) for above in upward(node, views_and_model_casts))
    return (
        next((dtype for dtype in dtypes if dtype not in (torch.float32, torch.float64)), None)
        == torch.bfloat16
    )


def _region(candidate: Candidate) -> Iterator[Node]:
    """Plain nodes between the projections and the norms and rotations."""
    q, k = candidate.query, candidate.key
    for item in candidate.projections:
        yield from (
            node
            for node in upward(item.activation, views_and_model_casts)
            if item.quantised is None
        )
        dynamic = item.quantised.dynamic if item.quantised is not None else None
        if dynamic is not None:
            yield from upward(dynamic.source, views_and_model_casts)
            if dynamic.by_nodes:
                yield from nodes_between((dynamic.source,), dynamic.node)
        yield from item.product.inside
    yield from nodes_between((q.down.node,), q.norm.node)
    yield from nodes_between((q.up_rope.node,), q.rope.node)
    absorbed = isinstance(q.absorb, AbsorbFact)
    for end in (
        [p.activation for p in q.absorb.projection.by_weight] if absorbed else [q.absorb.node]
    ):
        yield from nodes_between((q.up_nope.node,), end)
    yield from _region_of_key(k)


def _region_of_key(k: KeySide) -> Iterator[Node]:
    if k.norm is not None:
        yield from nodes_between((k.down.node,), k.norm.node)
    if k.rope is not None:
        yield from nodes_between((k.down_rope.node,), k.rope.node)


def _streams(view: View, candidate: KeyHalf) -> None:
    labels = {node.meta.get("stream_label") for node in candidate.nodes}
    if len(labels) > 1:
        found = ", ".join(sorted(str(label) for label in labels))
        raise Refuse("stream.mixed", f"the labels are {found}", candidate.nodes)


RULES = (_model, _norms, _quantisation, _projections, _rotation, _dtypes, _streams)
RULES_OF_HALF = (_half_dtypes, _norms, _half_scale, _streams)


def _named(node: Node) -> str:
    """With its operator: some names of nodes are words, too."""
    return f"{node.name} ({node.target})" if node.op == "call_function" else node.name
