"""Python numbers that are part of a weight, under dynamic shapes: they become inputs of packing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue import base, prologues
from tests.exhaustive import one_in
from tests.harness import assert_no_worse, clones, eager, exact

pytestmark = pytest.mark.usefixtures("fresh")


class Numbered(prologues.PagedRotateHalf):
    """Subclasses use a number, the caller's last argument, in a weight."""

    def forward(self, x: Tensor, *args: Any) -> Any:  # type: ignore[override]
        *rest, self.number = args
        return super().forward(x, *rest)


class Scaled(Numbered):
    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = F.linear(x, self.kv_a_proj_with_mqa.weight * self.number)
        c_kv, k_pe = rows.split([base.HCKV, base.DR], -1)
        return self.kv_a_layernorm(c_kv), k_pe


class Longer(Numbered):
    """One weight of several layers: the number says where this one's begins."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter((torch.randn(4 * base.HCQ, base.HE) / base.HE**0.5).bfloat16())

    def query(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mine = self.all[self.number * base.HCQ :][: base.HCQ]
        q = self.q_b_proj(self.q_a_layernorm(F.linear(x, mine)))
        q_nope, q_pe = q.view(*x.shape[:-1], self.heads, base.D + base.DR).split(
            [base.D, base.DR], -1
        )
        return q_nope, q_pe


MODELS = {Scaled: 0, Longer: 1}  # fused: a number that is multiplied with is no weight


@pytest.mark.parametrize(("model", "dynamic"), one_in(3, itertools.product(MODELS, (True, None))))
def test_every_number_has_its_own_weight(model: type[Numbered], dynamic: bool | None) -> None:
    module, args = model(), base.paged_args()
    run = torch.compile(module, backend=mf.backend(), fullgraph=True, dynamic=dynamic)
    with torch._dynamo.config.patch(specialize_float=True):
        for number in (2, 3, 2, 3):
            given = clones(args)
            with torch.no_grad():
                fused = [run(*given, number), *given]
                plain = eager(lambda *given, number=number: module(*given, number), clones(args))  # type: ignore
                wide = exact(_With(module, number), args)
            assert_no_worse(wide, plain, fused, slack=1.2)
    report = mf.reports()[-1]  # of a number that is a symbol
    assert len(report.fused) == MODELS[model], str(report)
    assert report.fused == [] or report.bytes_added == 0


class _With(nn.Module):
    def __init__(self, module: nn.Module, number: int) -> None:
        super().__init__()
        self.module, self.number = module, number

    def forward(self, *args: Tensor) -> Any:
        return self.module(*args, self.number)
