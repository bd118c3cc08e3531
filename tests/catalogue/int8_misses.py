"""int8 prologues with one thing that no weight_quant_mode has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mla_fusion import offline

from .base import DR, HCKV, HCQ, HE, D, linear, npu, paged_args
from .entry import IN_PLACE, miss
from .int8 import Full, Partial, QuantLinear
from .int8_caches import OperatorCache, int8_cache_args


class StaticLinear(QuantLinear):
    """A scale of the whole tensor, known ahead of time and folded into the weight's."""

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        return npu.npu_quant_matmul(x, self.weight, self.scale, output_dtype=torch.bfloat16)


class BiasedLinear(QuantLinear):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.bias = nn.Parameter(
            torch.randint(-9, 9, (width_out,), dtype=torch.int32), requires_grad=False
        )

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        return npu.npu_quant_matmul(
            x,
            self.weight,
            self.scale,
            pertoken_scale=x_scale,
            bias=self.bias,
            output_dtype=torch.bfloat16,
        )


class OneScaleLinear(QuantLinear):
    """One scale for all columns."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.scale = nn.Parameter(self.scale[:1], requires_grad=False)


@miss("quant.static", tags="int8, operators", of="Full")
class Static(Full):
    linear = StaticLinear


@miss("linear.bias", tags="int8, operators", of="Full")
class Biased(Full):
    linear = BiasedLinear


class WeightOnlyLinear(QuantLinear):
    """W8A16, as gpt-fast writes it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.to(x.dtype)) * self.scale.to(x.dtype)


class WeightOnlyOperator(QuantLinear):
    """By an operator of torch_npu alone."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        offline.activate()

    def forward(self, x: Tensor) -> Tensor:
        return npu.npu_weight_quant_batchmatmul(x, self.weight, self.scale.to(x.dtype))


@miss("quant.weights_only", tags="int8", of="gpt-fast's weights")
class WeightsOnly(Full):
    linear = WeightOnlyLinear


@miss("quant.weights_only", tags="int8, operators", of="Full")
class WeightsOnlyByOperator(Full):
    linear = WeightOnlyOperator


@miss(IN_PLACE, tags="run, int8, operators", of="Full", weight_quant_mode=2)
class OneScale(Full):
    linear = OneScaleLinear


@miss("quant.mixed", tags="int8, operators", of="Full")
class QueryLatentAlone(Full):
    """W_dkv_kr stays bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_a_proj_with_mqa = linear(HE, HCKV + DR)


@miss("quant.mixed", tags="int8, operators", of="Full")
class DownAlone(Full):
    """W_uq_qr stays bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = linear(HCQ, self.heads * (D + DR))


@miss("quant.tokens_differ", tags="int8, operators", of="Full")
class SmoothedOnce(Full):
    """x is smoothed for W_dq and not for W_dkv_kr."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj.smooth = nn.Parameter(0.5 + torch.rand(HE))  # type: ignore[assignment]


@miss("reader.latent", tags="int8, operators, readers", of="IndexerReads")
class LatentReadInBfloat16(Full):
    """An indexer reads c_q itself, of which the int8 kernel gives out the quantised form only."""

    def __init__(self) -> None:
        super().__init__()
        self.wq_b = linear(HCQ, 128)

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.wq_b(c_q)


@miss("quant.dynamic", tags="int8", of="Partial", name="TruncatedLatent")
class Truncated(Partial):
    """c_q is quantised by plain operators, and truncated where the kernel rounds."""

    def __init__(self) -> None:
        super().__init__()

        class Plain(QuantLinear):
            def forward(self, x: Tensor) -> Tensor:
                scale = x.float().abs().amax(-1, keepdim=True) / 127
                sums = torch._int_mm((x.float() / scale).to(torch.int8), self.matrix())
                return (sums.float() * scale * self.scale).to(torch.bfloat16)

        self.q_b_proj = Plain(HCQ, self.heads * (D + DR))  # type: ignore[assignment]


@miss("quant.scale", tags="int8, operators", of="Partial")
class OtherTokenScale(Partial):
    """c_q is scaled back by the scale of another tensor."""

    def __init__(self) -> None:
        super().__init__()

        class Crossed(QuantLinear):
            def forward(self, x: Tensor) -> Tensor:
                values, _ = npu.npu_dynamic_quant(x)
                _, scale = npu.npu_dynamic_quant(x * x)
                return self.product(values, scale)

        self.q_b_proj = Crossed(HCQ, self.heads * (D + DR))  # type: ignore[assignment]


@miss("reader.latent", tags="int8, cache, operators", of="OperatorCache", args=int8_cache_args)
class FullWithChannelCaches(OperatorCache):
    """Per-channel caches go with partial quantisation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj = QuantLinear(HE, HCQ)  # type: ignore[assignment]
        self.kv_a_proj_with_mqa = QuantLinear(HE, HCKV + DR)  # type: ignore[assignment]


def one_int8_cache_args() -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, _, slots = int8_cache_args()
    return x, cos, sin, kv_cache, paged_args()[4], slots


@miss("reader.latent", tags="int8, cache, operators", of="OperatorCache", args=one_int8_cache_args)
class OneScaledCache(OperatorCache):
    """Only the latent cache is int8."""

    def __init__(self) -> None:
        super().__init__()
        self.kr_scale = None  # type: ignore[assignment]
