"""Weights that are made of a call's argument: an adapter's number, a gate, a cache's scale. A
server's buffers of arguments are written for each call, under inference mode without a count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

import mla_fusion as mf
from mla_fusion.serving import vllm_ascend_pass
from tests.catalogue.base import DR, HCKV, HCQ, Base, D, paged_args
from tests.catalogue.int8_caches import PlainCache, int8_cache_args
from tests.exhaustive import one_in, pairs
from tests.harness import clones, distance

pytestmark = pytest.mark.usefixtures("fresh")


class Adapters(nn.Module):
    """Picks one of its weights."""

    given: Tensor

    def __init__(self) -> None:
        super().__init__()
        weights = torch.randn(3, 2 * (D + DR), HCQ).bfloat16() * 0.03
        self.weights = nn.Parameter(weights, requires_grad=False)

    def weight(self) -> Tensor:
        return self.weights.index_select(0, self.given.long() % 3)[0]

    def forward(self, c_q: Tensor) -> Tensor:
        return nn.functional.linear(c_q, self.weight())


class Gate(Adapters):
    def weight(self) -> Tensor:
        return self.weights[0] * (self.given - 19).bfloat16()


class Argued(Base):
    """The last argument has a part in W_uq_qr."""

    def __init__(self, made: type[Adapters]) -> None:
        super().__init__()
        self.q_b_proj = made()  # type: ignore[assignment]

    def forward(self, *args: Tensor) -> Tensor:  # type: ignore[override]
        *others, self.q_b_proj.given = args
        scores, _ = super().forward(*others)
        del self.q_b_proj.given
        return scores


class Scale(PlainCache):
    def forward(self, *args: Tensor) -> Tensor:  # type: ignore[override]
        *others, self.given = args
        scores, _ = super().forward(*others)
        del self.given
        return scores

    def write(
        self, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor
    ) -> None:
        kv_cache.view(-1, HCKV)[slots] = self.quantise(c_kv, self.given)
        kr_cache.view(-1, DR)[slots] = self.quantise(k_pe, self.given)


def in_vllm(graph: GraphModule, _: Any) -> GraphModule:
    vllm_ascend_pass()(graph)
    return graph


BACKENDS = {"backend": mf.backend(), "vllm": aot_autograd(fw_compiler=in_vllm)}


@pytest.mark.parametrize(("way", "mode"), pairs(BACKENDS, [torch.no_grad, torch.inference_mode]))
@pytest.mark.parametrize("kind", one_in(1, [Gate, Scale]))
def test_each_call_computes_with_its_argument(
    kind: type[nn.Module], mode: Callable[[], Any], way: str
) -> None:
    model, args = (
        (Scale(), int8_cache_args()) if kind is Scale else (Argued(kind), paged_args())  # type: ignore[arg-type]
    )
    with mode():
        given = torch.ones(1)
        run = torch.compile(model, backend=BACKENDS[way], fullgraph=True)
        for number in range(20, 23):
            given.data.fill_(number)
            plain, fused = clones(args), clones(args)
            want, found = model(*plain, given), run(*fused, given)
            pairs = [(want, found), *zip(plain[3:5], fused[3:5], strict=True)]
            assert all(distance(got, wanted) < 0.03 for wanted, got in pairs)
    assert mf.reports()[-1].fused
