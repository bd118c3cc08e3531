"""What exchanges values with other devices inside a prologue is named as that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import DR, HCKV, D, paged_args
from tests.catalogue.prologues import PagedRotateHalf
from tests.harness import refused, traced_graph

collective = torch.ops._c10d_functional
Exchange = Callable[[Tensor], Tensor]


def _summed(part: Tensor) -> Tensor:
    return collective.wait_tensor(collective.all_reduce(part, "sum", "0"))


def _gathered(part: Tensor) -> Tensor:
    """Of two devices that have half of the columns each."""
    rows = collective.wait_tensor(collective.all_gather_into_tensor(part, 2, "0"))
    return torch.cat(rows.chunk(2), -1)[..., : part.shape[-1]]


class Sharded(PagedRotateHalf):
    """Tensor parallel where the kernel has no place for it: ``at`` says behind which product."""

    def __init__(self, at: str, exchange: Exchange) -> None:
        super().__init__()
        self.at, self.exchange = at, exchange

    def _at(self, at: str, value: Tensor) -> Tensor:
        return self.exchange(value) if at == self.at else value

    def query(self, x: Tensor) -> list[Tensor]:
        c_q = self.q_a_layernorm(self._at("q_a", self.q_a_proj(x)))
        q = self._at("q_b", self.q_b_proj(c_q))
        return q.view(*x.shape[:-1], self.heads, D + DR).split([D, DR], -1)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self._at("kv_a", self.kv_a_proj_with_mqa(x)).split([HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv), k_pe


@pytest.mark.parametrize("exchange", [_summed, _gathered])
@pytest.mark.parametrize("at", ["q_a", "q_b", "kv_a"])
def test_inside(at: str, exchange: Exchange) -> None:
    rejection = refused(traced_graph(Sharded(at, exchange), *paged_args()))
    assert rejection.code == "step.unknown" and "_c10d_functional" in rejection.message
    assert "give each device W_dq and W_dkv whole" in rejection.remedy


def _of_both_devices(rows: Tensor) -> Tensor:
    return collective.wait_tensor(collective.all_gather_into_tensor(rows, 2, "0"))


def test_rows_of_all_devices_are_written() -> None:
    class Rows(PagedRotateHalf):
        def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
            c_kv, k_pe = super().latent(x)
            return _of_both_devices(c_kv)[: len(x)], k_pe

    (fusion,) = mf.fuse(traced_graph(Rows(), *paged_args())).fused
    staged = next(one for one in fusion.staged_by if "other devices" in one.message)
    assert staged.code == "cache.rows_changed" and "all_gather" in staged.message


def test_a_gathered_weight_is_verified_without_other_processes() -> None:
    class Gathered(Sharded):
        def query(self, x: Tensor) -> list[Tensor]:
            weight = _of_both_devices(self.q_b_proj.weight.chunk(2)[0])
            q = F.linear(self.q_a_layernorm(self.q_a_proj(x)), weight)
            return q.unflatten(-1, (self.heads, -1)).split([D, DR], -1)

    (fusion,) = mf.fuse(traced_graph(Gathered("", _summed), *paged_args())).fused
    assert fusion.verified == "verified"


def test_in_front_and_behind() -> None:
    """x and the attention's result may be exchanged: the prologue fuses."""

    class Around(PagedRotateHalf):
        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            return _summed(super().forward(_summed(x), *others))

    (fusion,) = mf.fuse(traced_graph(Around(), *paged_args())).fused
    assert fusion.placement == "in place"
