"""What is drawn tells apart what ordinary numbers do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_fusion.fx.sizes import Binding
from mla_fusion.witness.draws import WIDE, Draws
from mla_fusion.witness.side import Side

aten = torch.ops.aten
ROWS, BLOCK = 64, 16


class Drawn:
    """Draws of leaves by role, with the shape and the dtype of each."""

    def __init__(self, nodes: tuple[Node, ...] = (), **leaves: Tensor) -> None:
        graph = Graph()
        self.leaves: dict[Node, str] = {}
        for role, value in leaves.items():
            node = graph.placeholder(role)
            node.meta["val"] = value
            self.leaves[node] = "" if role.startswith("any") else role
        self.draws = Draws(self.leaves, nodes, Binding(), ROWS, BLOCK, 0)

    def values(self, kind: str) -> dict[str, Any]:
        return {node.name: value for node, value in self.draws.values(kind).items()}


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def test_integers_reach_ends_and_residues_and_flags_both_values() -> None:
    graph = Graph()
    number = graph.placeholder("number")
    remainder = graph.call_function(aten.remainder.Scalar, (number, 4096))
    for node in (number, remainder):
        node.meta["val"] = integers(200)
    drawn = Drawn((remainder,), any_number=integers(200), any_flag=torch.ones(3) > 0)
    edges = drawn.values("edges")
    assert {4095, 4096, 4097, 100_000, 257} <= set(edges["any_number"].tolist())
    assert not edges["any_flag"].any() and drawn.values("outliers")["any_flag"].all()
    assert drawn.values("outliers")["any_number"][0] == 0
    one = Drawn((remainder,), any_number=integers())
    assert {int(one.values(kind)["any_number"]) for kind in ("normal", *WIDE)} == {1, 4096}


def test_rows_lie_near_roots_of_epsilons_have_outliers_and_span_decades() -> None:
    drawn = Drawn(x=torch.zeros(8, 1024, dtype=torch.bfloat16), any_table=torch.zeros(64, 64))
    normal = drawn.values("normal")["x"].float().square().mean(1).sqrt()
    assert normal.min() < 5e-4 and normal.max() > 5
    outliers = drawn.values("outliers")["x"].float()
    assert outliers.abs().max() > 1e4 and (outliers == 0).all(1).sum() == 1
    wide = drawn.values("small")["x"]
    assert wide.dtype == torch.float64 and wide.abs().max() / wide.abs().amax(1).min() > 1e38
    assert all((drawn.values(kind)["any_table"] == 0).any() for kind in WIDE)


def test_what_nodes_write_is_drawn_anew_and_unwritten_memory_is_not_a_number() -> None:
    graph = Graph()
    cache = graph.placeholder("cache")
    written = graph.call_function(aten.fill_.Scalar, (cache, 3.0))
    empty = graph.call_function(aten.empty.memory_format, ([2],))
    noise = graph.call_function(aten.rand_like.default, (cache,))
    for node in (cache, written, empty, noise):
        node.meta["val"] = torch.zeros(2)
    side, drawn = Side([written, empty, noise], {cache: cache}), torch.ones(2)
    one, other = (
        side.run(Binding(), {cache: drawn}, False, [written, empty, noise]) for _ in range(2)
    )
    assert torch.equal(drawn, torch.ones(2)) and torch.equal(one[written], torch.full((2,), 3.0))
    assert one[empty].isnan().all()
    assert torch.equal(one[noise], other[noise])
