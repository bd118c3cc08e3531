"""Each rule of the verdict by itself: it takes a candidate as it is, and refuses it with one fact
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from mla_fusion.fx.view import View
from mla_fusion.match.candidate import Candidate
from mla_fusion.match.finder import search
from mla_fusion.plan import verdict
from mla_fusion.report.rejection import CODES, Refuse
from tests.catalogue import ENTRIES
from tests.harness import traced_graph

Change = Callable[[Candidate], Candidate]
PLAIN, INT8 = "PagedRotateHalf", "Full"


@cache
def found(name: str) -> tuple[View, Candidate]:
    torch.manual_seed(0)
    entry = ENTRIES[name]
    view = View(traced_graph(entry.model(), *entry.args()))
    (candidate,) = search(view)[1]
    assert isinstance(candidate, Candidate)
    return view, candidate


def changed(whole: Any, path: str, **fields: Any) -> Any:
    """A copy of frozen facts in which the one at ``path`` has other fields."""
    if not path:
        return replace(whole, **fields)
    first, _, rest = path.partition(".")
    return replace(whole, **{first: changed(getattr(whole, first), rest, **fields)})


def at(path: str, **fields: Any) -> Change:
    return lambda candidate: changed(candidate, path, **fields)


def like(node: Node, **other: Any) -> Node:
    """A node whose value has another dtype or shape."""
    value, made = node.meta["val"], Graph().placeholder(f"like_{node.name}")
    dtype, shape = other.get("dtype", value.dtype), other.get("shape", value.shape)
    made.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    return made


def down(candidate: Candidate, **fields: Any) -> Candidate:
    """The product with W_dq, with other fields."""
    return changed(candidate, "query", down=replace(candidate.query.down, **fields))


def product(candidate: Candidate, **fields: Any) -> Candidate:
    return down(candidate, product=replace(candidate.query.down.product, **fields))


def quantised(candidate: Candidate, **fields: Any) -> Candidate:
    """Its scales, with other fields."""
    assert candidate.query.down.quantised is not None
    return down(candidate, quantised=replace(candidate.query.down.quantised, **fields))


# rule: (code, name of the prologue, what is changed)
REFUSED: dict[str, tuple[str, str, Change]] = {
    "_norms: epsilon at run time": (
        "norm.runtime_eps",
        PLAIN,
        lambda c: changed(c, "query.norm", runtime_eps=c.query.norm.node),
    ),
    "_norms: low precision": (
        "norm.low_precision",
        PLAIN,
        lambda c: changed(c, "query.norm", low_precision=c.query.norm.node),
    ),
    "_norms: of the key": (
        "norm.low_precision",
        PLAIN,
        lambda c: changed(c, "key.norm", low_precision=c.query.norm.node),
    ),
    "_norms: no gamma": ("norm.gamma_absent", PLAIN, at("query.norm", gamma=None)),
    "_norms: no gamma of the key": ("norm.gamma_absent", PLAIN, at("key", gamma=None)),
    "_norms: gamma in float32": (
        "norm.gamma_dtype",
        PLAIN,
        lambda c: changed(c, "query.norm", gamma=like(c.query.norm.gamma, dtype=torch.float32)),  # type: ignore[arg-type]
    ),
    "_projections: bias": ("linear.bias", PLAIN, lambda c: product(c, bias=c.query.norm.gamma)),
    "_projections: scaled": ("linear.scaled", PLAIN, lambda c: product(c, factors=(2.0, 1.0))),
    "_quantisation: one of three is not": (
        "quant.mixed",
        INT8,
        lambda c: down(c, quantised=None),
    ),
    "_quantisation: W_uq_qr is not": (
        "quant.mixed",
        INT8,
        lambda c: changed(
            c,
            "query",
            up_nope=replace(c.query.up_nope, quantised=None),
            up_rope=replace(c.query.up_rope, quantised=None),
        ),
    ),
    "_quantisation: static": ("quant.static", INT8, lambda c: quantised(c, token_scale=None)),
    "_quantisation: offset": (
        "quant.scale",
        INT8,
        lambda c: quantised(c, offset=c.query.norm.gamma),
    ),
    "_quantisation: weights only": (
        "quant.weights_only",
        INT8,
        lambda c: down(c, activation=like(c.query.down.activation, dtype=torch.bfloat16)),
    ),
    "_quantisation: one scale for all columns": (
        "quant.scale",
        INT8,
        lambda c: quantised(c, weight_scale=like(c.query.down.quantised.weight_scale, shape=(1,))),  # type: ignore[union-attr]
    ),
    "_quantisation: scales in float16": (
        "quant.scale",
        INT8,
        lambda c: quantised(
            c, weight_scale=like(c.query.down.quantised.weight_scale, dtype=torch.float16)
        ),  # type: ignore[union-attr]
    ),
    "_quantisation: two factors of one x": (
        "quant.tokens_differ",
        INT8,
        lambda c: quantised(c, token_factor=0.5),
    ),
    "_quantisation: a scale and its inverse": (
        "quant.tokens_differ",
        INT8,
        lambda c: quantised(c, token_inverse=True),
    ),
    "_rotation: other columns": (
        "rope.tables_differ",
        PLAIN,
        lambda c: changed(c, "key", first=c.key.first[:-1]),
    ),
    "_rotation: layout": (
        "rope.layouts_differ",
        PLAIN,
        lambda c: changed(c, "key", layout="half" if c.key.layout != "half" else "interleaved"),
    ),
    "_rotation: tables exchanged": (
        "rope.tables_differ",
        PLAIN,
        lambda c: changed(c, "key", cos=c.key.sin, sin=c.key.cos),
    ),
    "_rotation: cos alone": (
        "rope.tables_differ",
        PLAIN,
        lambda c: changed(c, "key", cos=c.key.sin),
    ),
    "_rotation: scaled": (
        "scale.unequal",
        PLAIN,
        lambda c: changed(c, "query.absorb", factor=2 * c.query.absorb.factor),
    ),
    "_model: a weight in float16": (
        "dtype.region",
        PLAIN,
        lambda c: down(c, weight=like(c.query.down.weight, dtype=torch.float16)),
    ),
    "_dtypes: x in float16": (
        "dtype.region",
        PLAIN,
        lambda c: down(c, activation=like(c.query.down.activation, dtype=torch.float16)),
    ),
    "_dtypes: weight in float32": (
        "dtype.region",
        PLAIN,
        lambda c: down(c, weight=like(c.query.down.weight, dtype=torch.float32)),
    ),
}


@pytest.mark.parametrize("rule", verdict.RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", [PLAIN, INT8])
def test_a_rule_takes_what_the_kernel_computes(
    name: str, rule: Callable[[View, Candidate], None]
) -> None:
    rule(*found(name))


@pytest.mark.parametrize("name", REFUSED)
def test_a_rule_refuses_one_changed_fact(name: str) -> None:
    code, model, change = REFUSED[name]
    view, candidate = found(model)
    rule = getattr(verdict, name.partition(":")[0])
    with pytest.raises(Refuse) as refusal:
        rule(view, change(candidate))
    assert refusal.value.code == code and code in CODES
    assert refusal.value.nodes, "which nodes are at fault"


@pytest.mark.parametrize("name", REFUSED)
def test_the_verdict_is_that_of_the_rule(name: str) -> None:
    code, model, change = REFUSED[name]
    view, candidate = found(model)
    with pytest.raises(Refuse) as refusal:
        verdict.judge(view, change(candidate))
    assert refusal.value.code == code


def test_streams() -> None:
    view, candidate = found(PLAIN)
    node = candidate.query.norm.node
    node.meta["stream_label"] = "11"
    try:
        with pytest.raises(Refuse) as refusal:
            verdict._streams(view, candidate)
    finally:
        del node.meta["stream_label"]
    assert refusal.value.code == "stream.mixed"


def test_a_symbolic_number_of_columns() -> None:
    view, candidate = found(PLAIN)
    down = candidate.query.down
    size = traced_graph(ENTRIES[PLAIN].model(), *ENTRIES[PLAIN].args(), dynamic=True).graph
    symbol = next(
        s
        for n in size.nodes
        for s in getattr(n.meta.get("val"), "shape", ())
        if isinstance(s, torch.SymInt)
    )
    kept, node = down.node.meta["val"], down.node

    class Symbolic:
        shape = (*kept.shape[:-1], symbol)

    node.meta["val"] = Symbolic()
    try:
        with pytest.raises(Refuse) as refusal:
            verdict._projections(view, candidate)
    finally:
        node.meta["val"] = kept
    assert refusal.value.code == "linear.symbolic"


def test_every_rule_of_the_table_is_tested_here() -> None:
    tested = {name.partition(":")[0] for name in REFUSED} | {"_streams"}
    assert {rule.__name__ for rule in verdict.RULES} == tested
