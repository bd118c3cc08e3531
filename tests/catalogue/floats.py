"""Prologues whose weights are in a float format of A5, as the stacks write them: an npu operator
quantises the rows, npu_quant_matmul multiplies.
"""

from __future__ import annotations

from functools import partial

import torch
from mla_fusion.meta import number_formats
from torch import Tensor, nn

from mla_fusion.reference import formats, hifloat8

from . import quantised
from .base import npu, paged_args
from .entry import IN_PLACE, OURS, STAGED, entry

E8M0, HIF8 = number_formats.E8M0_NUMBER, number_formats.HIFLOAT8.number
VLLM = "AscendW8A8MXFP8Dynamic of vllm-ascend, and SGLang"


class FloatLinear(nn.Module):
    """A quantised weight [in, out]; in float64 the same without quantisation of the input."""

    weight: nn.Parameter
    scale: nn.Parameter

    def hold(self, weight: Tensor, scale: Tensor) -> None:
        self.weight, self.scale = (
            nn.Parameter(value, requires_grad=False) for value in (weight, scale)
        )

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        raise NotImplementedError

    def matrix(self) -> Tensor:
        """In float64."""
        raise NotImplementedError

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Of rows, or of what they were quantised to upstream."""
        if isinstance(x, tuple):
            return self.product(*x)
        return x @ self.matrix() if x.dtype == torch.float64 else self.product(*self.quantise(x))


class MxLinear(FloatLinear):
    """mxfp8: the weight held as [out, in], scales as [out, in/64, 2], both turned after loading."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        weight, scale = formats.mx_quant(torch.randn(width_out, width_in) / width_in**0.5)
        self.hold(weight.t(), scale.view(torch.uint8).reshape(width_out, -1, 2).transpose(0, 1))

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return npu.npu_dynamic_mx_quant(x, dst_type=torch.float8_e4m3fn)

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        return npu.npu_quant_matmul(
            x,
            self.weight,
            self.scale,
            scale_dtype=E8M0,
            pertoken_scale=x_scale,
            pertoken_scale_dtype=E8M0,
            output_dtype=torch.bfloat16,
            group_sizes=[1, 1, 32],
        )

    def matrix(self) -> Tensor:
        blocks = self.scale.permute(0, 2, 1).flatten(0, 1).double()
        powers = (blocks - 127).exp2() if self.scale.dtype == torch.uint8 else blocks
        return self.weight.double() * powers.repeat_interleave(32, 0)


class RowLinear(FloatLinear):
    """fp8: a scale for each column and each token."""

    dst_type: torch.dtype | int | None = torch.float8_e4m3fn

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.smooth: nn.Parameter | None = None
        weight, scale = self.encoded(torch.randn(width_out, width_in) / width_in**0.5)
        self.hold(weight.t(), scale.flatten())

    def encoded(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return formats.FP8.dynamic_quant(weight)

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return npu.npu_dynamic_quant(x, smooth_scales=self.smooth, dst_type=self.dst_type)

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        return npu.npu_quant_matmul(
            x,
            self.weight,
            self.scale,
            pertoken_scale=x_scale,
            output_dtype=torch.bfloat16,
            **self.named(),
        )

    def named(self) -> dict[str, int]:
        """What says of the operands which format they are in."""
        return {}

    def matrix(self) -> Tensor:
        matrix = self.numbers() * self.scale.double()
        return matrix if self.smooth is None else self.smooth.double()[:, None] * matrix

    def numbers(self) -> Tensor:
        return self.weight.double()


class HifLinear(RowLinear):
    """hifloat8, which torch holds as uint8."""

    dst_type = HIF8

    def encoded(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return formats.HIFLOAT8.dynamic_quant(weight)

    def named(self) -> dict[str, int]:
        return {"x1_dtype": HIF8, "x2_dtype": HIF8}

    def numbers(self) -> Tensor:
        return hifloat8.decode(self.weight).double()


class Floats(quantised.Full):
    """All three projections, each with its own quantisation of x."""

    linear: type[nn.Module] = MxLinear


of_floats = partial(entry, source=OURS, tags="floats, operators, device", soc="A5", slack=1.1)


@of_floats(IN_PLACE, source=VLLM, tags="floats, operators, device, symbolic", weight_quant_mode=3)
class MxFull(Floats):
    pass


@of_floats(IN_PLACE, weight_quant_mode=4)
class Fp8Full(Floats):
    linear = RowLinear


@of_floats(IN_PLACE, weight_quant_mode=5)
class HifFull(Floats):
    linear = HifLinear


@of_floats(IN_PLACE, weight_quant_mode=4)
class Fp8Smooth(quantised.FullSmooth):
    linear = RowLinear


@of_floats(IN_PLACE, source=VLLM, weight_quant_mode=3)
class MxMerged(quantised.MergedDown):
    linear = MxLinear


@of_floats(IN_PLACE, weight_quant_mode=5)
class HifMerged(quantised.MergedDown):
    linear = HifLinear


@of_floats(IN_PLACE, source=VLLM, tags="floats, operators, weights", weight_quant_mode=3)
class MxChunked(quantised.Chunked):
    linear = MxLinear


@of_floats(IN_PLACE, tags="floats, operators, rope", weight_quant_mode=3)
class MxHalfRope(quantised.HalfRope):
    linear = MxLinear


@of_floats(STAGED, tags="floats, operators, rope", weight_quant_mode=3)
class MxInterleavedRope(quantised.InterleavedRope):
    linear = MxLinear


class _Viewed(MxLinear):
    """The scales as what they are, float8_e8m0fnu."""

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        return super().product(x, x_scale.view(torch.float8_e8m0fnu))


@of_floats(
    IN_PLACE, source="vllm-ascend", tags="floats, operators, device, weights", weight_quant_mode=3
)
class MxViewed(Floats):
    linear = _Viewed

    def __init__(self) -> None:
        super().__init__()
        for module in (self.q_a_proj, self.q_b_proj, self.kv_a_proj_with_mqa):
            scale = module.scale.view(torch.float8_e8m0fnu)  # type: ignore[operator]
            module.scale = nn.Parameter(scale, requires_grad=False)  # type: ignore[assignment]


@of_floats(
    IN_PLACE,
    source="GLM-5",
    tags="floats, operators, device, readers, symbolic",
    weight_quant_mode=3,
)
class MxIndexed(quantised.IndexerReads):
    linear = MxLinear


@of_floats(IN_PLACE, tags="floats, operators, readers", weight_quant_mode=3)
class CodesOfScales(MxIndexed):
    def extra(self, c_q_raw: Tensor, c_q: Tensor, k_pe: Tensor) -> Tensor:
        return self.q_b_proj.quantise(c_q)[1].bfloat16()


@of_floats(IN_PLACE, source="GLM-5", tags="floats, operators, readers", weight_quant_mode=4)
class Fp8Indexed(quantised.IndexerReads):
    linear = RowLinear


@of_floats(IN_PLACE, tags="floats, operators, readers", weight_quant_mode=5)
class HifIndexed(quantised.IndexerReads):
    linear = HifLinear


def quantised_args() -> tuple[Tensor, ...]:
    """x in mxfp8, and its scales."""
    x, *others = paged_args()
    return *npu.npu_dynamic_mx_quant(x, dst_type=torch.float8_e4m3fn), *others


@of_floats(
    IN_PLACE,
    source="AddRMSNormQuant of vllm-ascend, which quantises x upstream",
    tags="floats, operators, device, symbolic",
    weight_quant_mode=3,
    args=quantised_args,
)
class MxGiven(Floats):
    """x arrives quantised."""

    def forward(self, x: Tensor, x_scale: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if x.dtype == torch.float64:
            x = x * (x_scale.flatten(-2).double() - 127).exp2().repeat_interleave(32, -1)
            return super().forward(x, *others)
        return super().forward((x, x_scale), *others)  # type: ignore[arg-type]
