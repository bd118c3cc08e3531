"""Float arithmetic in which a term is lost is what rounding leaves, and not what it is over the
real numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue import base
from tests.harness import refused, traced_graph

Step = Callable[..., Tensor]

LOST: dict[str, Step] = {
    "x + c - c": lambda x, o: x + 1e9 - 1e9,
    "scaled": lambda x, o: (x * 0.5 + 9e6 - 9e6) * 2,
    "small": lambda x, o: (x / 1e9 + 1 - 1) * 1e9,
    "through casts": lambda x, o: ((x + 300).bfloat16().float()) - 300,
    "leaves little": lambda x, o: x * 1025 - x * 1024,
}


class OfPositions(base.Base):
    """Tables of positions, which each side computes its way."""

    def __init__(self, of_query: Step, of_key: Step) -> None:
        super().__init__()
        self.angles = of_query, of_key

    def forward(self, x: Tensor, positions: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        kv_cache, kr_cache, slots = caches
        tables = []
        for angles in self.angles:
            at = torch.outer(angles(positions.float(), None), 1e4 ** -(torch.arange(32) / 32))
            both = torch.cat([at, at], -1)
            tables.append([both.cos().bfloat16(), both.sin().bfloat16()])
        (c, s), (key_c, key_s) = ([t.unsqueeze(1) for t in pair] for pair in tables)
        q_nope, q_pe = self.split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        c_kv, k_pe = self.latent(x)
        key = self.rotate(k_pe.unsqueeze(1), key_c, key_s).squeeze(1)
        kv_cache.view(-1, base.HCKV)[slots] = c_kv
        kr_cache.view(-1, base.DR)[slots] = key
        return self.absorb(q_nope), self.rotate(q_pe, c, s)


def args_of() -> tuple[Tensor, ...]:
    x, _, _, *caches = base.paged_args()
    return x, torch.randint(0, 1 << 19, (len(x),)), *caches


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("swapped", [False, True], ids=["key", "query"])
def test_tables_that_rounding_tells_apart(name: str, swapped: bool) -> None:
    sides = [lambda x, _: x, LOST[name]]
    model = OfPositions(*(reversed(sides) if swapped else sides))
    rejection = refused(traced_graph(model, *args_of()), mf.Config(verify="off"))
    assert rejection.code == "rope.tables_differ"


@pytest.mark.parametrize("name", ["x + c - c", "scaled"])
def test_one_table_for_both_may_be_computed_so(name: str) -> None:
    model = OfPositions(LOST[name], LOST[name])
    report = mf.fuse(traced_graph(model, *args_of()), mf.Config(verify="off"))
    assert len(report.fused) == 1, str(report)


class OfAnInput(OfPositions):
    """The key's positions are computed with a float of the call."""

    def forward(self, x: Tensor, positions: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        *caches, number = others
        of_query, of_key = self.angles
        self.angles = of_query, lambda x, _: of_key(x, number.expand_as(x))
        try:
            return super().forward(x, positions, *caches)
        finally:
            self.angles = of_query, of_key


@pytest.mark.parametrize(
    "step",
    [
        lambda x, o: torch.stack([x, o, -o]).sum(0),
        lambda x, o: torch.stack([x, o]).sum(0) - o,
        lambda x, o: torch.stack([x, o]).mean(0) * 2 - o,
        lambda x, o: torch.lerp(x, o, 0.5) * 2 - o,
        lambda x, o: torch.addcmul(torch.addcmul(x, o, o), o, o, value=-1),
        lambda x, o: torch.einsum(
            "tn,n->t", torch.stack([x, o, o], -1), x.new_tensor([1, 1, -1.0])
        ),
    ],
    ids="sum sum- mean lerp addcmul einsum".split(),
)
def test_an_input_that_cancels_by_whatever_steps(step: Step) -> None:
    """Which number it is, the call says: one of 1e9 leaves nothing of the positions."""
    model = OfAnInput(lambda x, _: x, step)
    graph = traced_graph(model, *args_of(), torch.tensor(3.7))
    rejection = refused(graph, mf.Config(verify="off"))
    assert rejection.code in ("proof.differs", "rope.tables_differ"), rejection.message


def test_an_input_that_scales_both_tables() -> None:
    class Scaled(OfAnInput):
        def forward(self, x: Tensor, positions: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            *caches, number = others
            return OfPositions.forward(self, x, positions * number, *caches)

    graph = traced_graph(Scaled(*[lambda x, _: x] * 2), *args_of(), torch.tensor(3.7))
    report = mf.fuse(graph, mf.Config(verify="off"))
    assert len(report.fused) == 1, str(report)
