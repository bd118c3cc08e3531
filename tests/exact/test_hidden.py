"""Functions that no probe tells from the identity are refused, at default settings and without
verification.

Behind the kernel's results they stay in the graph, and the fused model is as exact as before.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import Base, paged_args
from tests.exhaustive import one_in
from tests.harness import assert_as_exact, clones, compiled, traced_graph

from .hidden import BEFORE, BEHIND, At, BiasOfProduct, Function, member

UNVERIFIED = mf.Config(verify="off")


@pytest.mark.parametrize("seed", one_in(3, range(96)))
def test_before_a_result_it_is_refused(seed: int) -> None:
    torch.manual_seed(0)
    one = member(seed, BEFORE)
    gm = traced_graph(At(one.place, one.function), *paged_args(), dynamic=one.dynamic)
    report = mf.explain(gm, UNVERIFIED, boundary=True)
    assert one.commutes or (not report.fused and report.rejected), (one, str(report))


@pytest.mark.parametrize("seed", one_in(2, range(12)))
def test_behind_a_result_it_stays(seed: int) -> None:
    torch.manual_seed(0)
    one = member(seed, BEHIND)
    model, args = At(one.place, one.function), paged_args()
    fused = compiled(model, clones(args), mf.backend(UNVERIFIED), dynamic=one.dynamic)
    assert mf.reports()[-1].fused
    assert_as_exact(model, args, fused)


@pytest.mark.parametrize(
    "which", ["q_a", pytest.param("kv_a", marks=pytest.mark.exhaustive), "w_uk"]
)
def test_a_bias_of_later_tokens_is_one(which: str) -> None:
    gm = traced_graph(BiasOfProduct(which), *paged_args(), dynamic=True)
    assert [item.code for item in mf.explain(gm, UNVERIFIED, boundary=True).rejected] == [
        "linear.bias"
    ]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_fusion_says_what_was_proved(dynamic: bool) -> None:
    gm = traced_graph(At("", torch.clone), *paged_args(), dynamic=dynamic)
    (fusion,) = mf.explain(gm, UNVERIFIED, boundary=True).fused
    assert any(
        "in exact arithmetic" in line and "chance below 1e-15" in line for line in fusion.proof
    )


class AlongBoth(Base):
    """Batches as long as their sequences, with a number for each batch or place in a sequence."""

    def __init__(self, along: int) -> None:
        super().__init__()
        self.along = along

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:
        late = 1 + torch.relu(torch.arange(x.shape[self.along], device=x.device).float() - 600)
        late = late[:, None, None] if self.along == 0 else late[None, :, None]
        c_q = (self.q_a_layernorm(self.q_a_proj(x)) * late).to(x.dtype)
        q_nope, q_pe = self.split(self.q_b_proj(c_q).flatten(0, 1))
        c_kv, k_pe = (part.flatten(0, 1) for part in self.latent(x))
        c, s = cos.flatten(0, 1).unsqueeze(1), sin.flatten(0, 1).unsqueeze(1)
        self.write(kv_cache, kr_cache, slots, c_kv, self.rotate(k_pe.unsqueeze(1), c, s).squeeze(1))
        return self.absorb(q_nope), self.rotate(q_pe, c, s)


@pytest.mark.parametrize("along", [0, 1])
def test_batches_as_long_as_their_sequences(along: int) -> None:
    x, cos, sin, kv_cache, kr_cache, slots = paged_args()
    few = [value[:4].unflatten(0, (2, 2)) for value in (x, cos, sin)]
    gm = traced_graph(AlongBoth(along), *few, kv_cache, kr_cache, slots[:4], dynamic=True)
    assert not mf.explain(gm, UNVERIFIED, boundary=True).fused


class MovedBySize(Base):
    """Columns are rolled, or padded, by a number that is 0 for the first thousand tokens."""

    def __init__(self, move: Function) -> None:
        super().__init__()
        self.move = move

    def rotate_q(self, q_pe: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotate(self.move(q_pe), c, s)


MOVES: dict[str, Function] = {
    "roll": lambda v: torch.roll(v, v.shape[0] // 1000, -1),
    "select_scatter": lambda v: torch.select_scatter(v, v[..., 0], -1, v.shape[0] // 1000),
}


@pytest.mark.parametrize("move", ["roll", "select_scatter"])
def test_a_place_is_no_number_of_one_run(move: str) -> None:
    gm = traced_graph(MovedBySize(MOVES[move]), *paged_args(), dynamic=True)
    assert not mf.explain(gm, UNVERIFIED, boundary=True).fused
