"""A rotation that ``torch.library.Library`` defines, called on an attention of the user's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mla_fusion.examples.fuse_your_model import DR, HCKV, Attention, D, N, example
from torch import Tensor

import mla_fusion as mf
from tests import harness

LIBRARY = torch.library.Library("mylib", "DEF")
LIBRARY.define("rope(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)")


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * c + rotate_half(q) * s, k * cos + rotate_half(k) * sin


LIBRARY.impl("rope", rope, "CPU")


@torch.library.register_fake("mylib::rope", lib=LIBRARY)
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


class Mine(Attention):
    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv_cache: Tensor, kr_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        q = self.q_b(self.q_norm(self.q_a(x))).view(-1, N, D + DR)
        q_nope, q_pe = q.split([D, DR], dim=-1)
        query = torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)
        c_kv, k_pe = self.kv_a(x).split([HCKV, DR], dim=-1)
        query_rope, k_pe = torch.ops.mylib.rope(q_pe, k_pe, cos, sin)
        kv_cache.view(-1, HCKV)[slots] = self.kv_norm(c_kv)
        kr_cache.view(-1, DR)[slots] = k_pe
        return query, query_rope


@pytest.fixture
def registered() -> Iterator[None]:
    q, k, table = torch.randn(4, N, DR), torch.randn(4, DR), torch.randn(4, DR)
    mf.register_operator(torch.ops.mylib.rope, rope, q, k, table, table)
    yield
    mf.register_operator(torch.ops.mylib.rope, None)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_it_fuses(registered: None, dynamic: bool) -> None:
    _, args = example()
    model = Mine().to(torch.bfloat16).eval().requires_grad_(False)
    wanted = harness.eager(model, harness.clones(args))
    found = harness.compiled(model, harness.clones(args), "mla_fusion", dynamic)
    assert harness.outcome(mf.reports()[-1]) == ("in place",), str(mf.reports()[-1])
    assert all(harness.distance(a, b) < 2e-2 for a, b in zip(found, wanted, strict=True))


def test_another_rotation_is_refused_on_the_example() -> None:
    q, k, table = torch.randn(4, N, DR), torch.randn(4, DR), torch.randn(4, DR)
    with pytest.raises(ValueError, match=r"mylib\.rope\.default, result 0"):
        mf.register_operator(
            torch.ops.mylib.rope, lambda q, k, c, s: rope(q, k, c, -s), q, k, table, table
        )
