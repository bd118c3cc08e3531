"""What is packed of a call's argument: a cache's scale. A
server's buffers of arguments are written for each call, under inference mode without a count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

import mla_fusion as mf
from mla_fusion.serving import vllm_ascend_pass
from tests.catalogue.base import DR, HCKV
from tests.catalogue.int8_caches import PlainCache, int8_cache_args
from tests.exhaustive import pairs
from tests.harness import clones, distance

pytestmark = pytest.mark.usefixtures("fresh")


class Scale(PlainCache):
    def forward(self, *args: Tensor) -> Tensor:  # type: ignore[override]
        *others, self.given = args
        scores, _ = super().forward(*others)
        del self.given
        return scores

    def write(self, kv_cache, kr_cache, slots, c_kv, k_pe) -> None:
        kv_cache.view(-1, HCKV)[slots] = self.quantise(c_kv, self.given)
        kr_cache.view(-1, DR)[slots] = self.quantise(k_pe, self.given)


def in_vllm(graph: GraphModule, _: Any) -> GraphModule:
    vllm_ascend_pass()(graph)
    return graph


BACKENDS = {"backend": mf.backend(), "vllm": aot_autograd(fw_compiler=in_vllm)}


@pytest.mark.parametrize(("way", "mode"), pairs(BACKENDS, [torch.no_grad, torch.inference_mode]))
def test_each_call_computes_with_its_argument(mode: Callable[[], Any], way: str) -> None:
    model, args = Scale(), int8_cache_args()
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
