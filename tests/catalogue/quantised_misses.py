"""int8 prologues with one thing that no weight_quant_mode has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .quantised import Full, OperatorCache, Partial, QuantLinear, int8_cache_args, npu
from .spellings import DR, HCKV, HCQ, HE, D, linear, paged_args


class StaticLinear(QuantLinear):
    """A scale of the whole tensor, known ahead of time and folded into the weight's."""

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        return npu.npu_quant_matmul(x, self.weight, self.scale, output_dtype=torch.bfloat16)


class BiasedLinear(QuantLinear):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.bias = nn.Parameter(torch.randint(-9, 9, (width_out,), dtype=torch.int32), requires_grad=False)

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        return npu.npu_quant_matmul(
            x, self.weight, self.scale, pertoken_scale=x_scale, bias=self.bias, output_dtype=torch.bfloat16
        )


class OneScaleLinear(QuantLinear):
    """One scale for all columns."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.scale = nn.Parameter(self.scale[:1], requires_grad=False)


class Static(Full):
    linear = StaticLinear


class Biased(Full):
    linear = BiasedLinear


class WeightOnlyLinear(QuantLinear):
    """W8A16, as gpt-fast writes it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.to(x.dtype)) * self.scale.to(x.dtype)


class WeightOnlyOperator(QuantLinear):
    def forward(self, x: Tensor) -> Tensor:
        return npu.npu_weight_quant_batchmatmul(x, self.weight, self.scale.to(x.dtype))


class WeightsOnly(Full):
    linear = WeightOnlyLinear


class WeightsOnlyByOperator(Full):
    linear = WeightOnlyOperator


class OneScale(Full):
    linear = OneScaleLinear


class QueryLatentAlone(Full):
    """W_dkv_kr stays bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_a_proj_with_mqa = linear(HE, HCKV + DR)


class DownAlone(Full):
    """W_uq_qr stays bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = linear(HCQ, self.heads * (D + DR))


class SmoothedOnce(Full):
    """x is smoothed for W_dq and not for W_dkv_kr."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj.smooth = nn.Parameter(0.5 + torch.rand(HE))  # type: ignore[assignment]


class LatentReadInBfloat16(Full):
    """An indexer reads c_q itself, of which the int8 kernel gives out the quantised form only."""

    def __init__(self) -> None:
        super().__init__()
        self.wq_b = linear(HCQ, 128)

    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.wq_b(c_q)


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


class FullWithChannelCaches(OperatorCache):
    """Per-channel caches go with partial quantisation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj = QuantLinear(HE, HCQ)  # type: ignore[assignment]
        self.kv_a_proj_with_mqa = QuantLinear(HE, HCKV + DR)  # type: ignore[assignment]


class OneScaledCache(OperatorCache):
    """Only the latent cache is int8."""

    def __init__(self) -> None:
        super().__init__()
        self.kr_scale = None  # type: ignore[assignment]


def one_int8_cache_args() -> tuple[Tensor, ...]:
    x, cos, sin, kv_cache, _, slots = int8_cache_args()
    return x, cos, sin, kv_cache, paged_args()[4], slots


# name: (code, model, arguments)
REFUSED: dict[str, tuple[str, Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "static": ("quant.static", Static, paged_args),
    "weights_only": ("quant.weights_only", WeightsOnly, paged_args),
    "weights_only_by_operator": ("quant.weights_only", WeightsOnlyByOperator, paged_args),
    "biased": ("linear.bias", Biased, paged_args),
    "one_scale": ("quant.scale", OneScale, paged_args),
    "query_latent_alone": ("quant.mixed", QueryLatentAlone, paged_args),
    "down_alone": ("quant.mixed", DownAlone, paged_args),
    "smoothed_once": ("quant.tokens_differ", SmoothedOnce, paged_args),
    "latent_read_in_bfloat16": ("reader.latent", LatentReadInBfloat16, paged_args),
    "truncated": ("quant.dynamic", Truncated, paged_args),
    "other_token_scale": ("quant.scale", OtherTokenScale, paged_args),
    "full_with_channel_caches": ("quant.cache", FullWithChannelCaches, int8_cache_args),
    "one_scaled_cache": ("quant.cache", OneScaledCache, one_int8_cache_args),
}
