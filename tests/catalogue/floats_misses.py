"""Prologues in float formats with one thing that no weight_quant_mode has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .base import DR, HCQ, HE, D, linear, npu
from .entry import IN_PLACE, miss
from .floats import E8M0, Floats, HifLinear, Indexed, MxGiven, MxLinear, RowLinear, quantised_args

FULL = "floats, operators"


class Options(MxLinear):
    """Another argument of npu_dynamic_mx_quant."""

    option: tuple[str, Any]

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        name, value = self.option
        return npu.npu_dynamic_mx_quant(x, dst_type=torch.float8_e4m3fn, **{name: value})


class _Floor(Options):
    option = "round_mode", "floor"


class _OtherScale(Options):
    option = "scale_alg", 1


class _Bounded(Options):
    option = "max_low_bound", 0.5


class QueryAs(Floats):
    """W_uq_qr c_q by another layer."""

    other: type[nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = self.other(HCQ, self.heads * (D + DR))  # type: ignore[assignment]


@miss("quant.dynamic", tags=FULL, of="MxFull", soc="A5")
class MxRoundedDown(QueryAs):
    other = _Floor


@miss("quant.dynamic", tags=FULL, of="MxFull", soc="A5")
class MxOtherScale(QueryAs):
    """The scale of a block is not the power of two below its largest."""

    other = _OtherScale


@miss("quant.dynamic", tags=FULL, of="MxFull", soc="A5")
class MxBounded(QueryAs):
    other = _Bounded


class _Crossed(MxLinear):
    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, _ = super().quantise(x)
        _, scale = super().quantise(x * x)
        return values, scale


@miss("quant.scale", tags=FULL, of="MxFull", soc="A5")
class MxScaleOfAnother(QueryAs):
    """c_q is scaled back by the scales of another tensor."""

    other = _Crossed


class _Swapped(MxLinear):
    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, scale = super().quantise(x)
        return values, scale.flip(-1)


@miss("quant.scale", tags=FULL, of="MxFull", soc="A5")
class MxScaleOfTheNextBlock(QueryAs):
    """Every block is scaled back by its neighbour's scale."""

    other = _Swapped


class _Turned(MxLinear):
    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, scale = super().quantise(x)
        return values, scale.transpose(-1, -2).reshape(scale.shape)


@miss("quant.scale", tags=FULL, of="MxFull", soc="A5")
class MxScaleTurned(QueryAs):
    other = _Turned


class _FlippedRows(MxLinear):
    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, scale = super().quantise(x)
        return values, scale.flip(0)


@miss("quant.scale", tags=FULL, of="MxFull", soc="A5")
class MxScaleOfAnotherRow(QueryAs):
    other = _FlippedRows


@miss("quant.tokens_differ", tags=FULL, of="MxFull", soc="A5")
class MxKeyScaleOfAnotherRow(Floats):
    """W_dkv_kr x by the scales of other rows than W_dq x."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_a_proj_with_mqa = _FlippedRows(HE, 512 + DR)  # type: ignore[assignment]


@miss("quant.mixed", tags=FULL, of="MxFull", soc="A5")
class MxQueryInFp8(QueryAs):
    other = RowLinear


@miss("quant.mixed", tags=FULL, of="MxFull", soc="A5")
class MxKeyInHifloat8(Floats):
    def __init__(self) -> None:
        super().__init__()
        self.kv_a_proj_with_mqa = HifLinear(HE, 512 + DR)  # type: ignore[assignment]


@miss("quant.mixed", tags=FULL, of="MxFull", soc="A5")
class MxQueryAlone(Floats):
    """Only W_uq_qr: int8 has a mode for that, mxfp8 has none."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.kv_a_proj_with_mqa = linear(HE, HCQ), linear(HE, 512 + DR)


class _E5M2(MxLinear):
    """A wider exponent for the rows."""

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return npu.npu_dynamic_mx_quant(x, dst_type=torch.float8_e5m2)


@miss("quant.mixed", tags=FULL, of="MxFull", soc="A5")
class MxInE5M2(Floats):
    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.kv_a_proj_with_mqa = _E5M2(HE, HCQ), _E5M2(HE, 512 + DR)  # type: ignore[assignment]


@miss("quant.dynamic", tags=FULL, of="MxFull", soc="A5")
class MxQueryInE5M2(QueryAs):
    other = _E5M2


class _Groups(MxLinear):
    """group_sizes of another block."""

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        scales = {"scale_dtype": E8M0, "pertoken_scale_dtype": E8M0, "group_sizes": [1, 1, 128]}
        return npu.npu_quant_matmul(
            x,
            self.weight,
            self.scale,
            pertoken_scale=x_scale,
            output_dtype=torch.bfloat16,
            **scales,
        )


@miss("quant.dynamic", tags=FULL, of="MxFull", soc="A5")
class MxQueryInOtherBlocks(QueryAs):
    other = _Groups


@miss("linear.hidden", tags=FULL, of="MxFull", soc="A5")
class MxInOtherBlocks(Floats):
    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.kv_a_proj_with_mqa = _Groups(HE, HCQ), _Groups(HE, 512 + DR)  # type: ignore[assignment]


class _Biased(MxLinear):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.bias = nn.Parameter(torch.randn(width_out))

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        scales = {
            "scale_dtype": E8M0,
            "pertoken_scale_dtype": E8M0,
            "group_sizes": [1, 1, 32],
            "bias": self.bias,
        }
        return npu.npu_quant_matmul(
            x,
            self.weight,
            self.scale,
            pertoken_scale=x_scale,
            output_dtype=torch.bfloat16,
            **scales,
        )


@miss("linear.bias", tags=FULL, of="MxFull", soc="A5")
class MxBiased(QueryAs):
    other = _Biased


class _Static(RowLinear):
    """A scale of the whole tensor, known ahead of time and folded into the weight's."""

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        return npu.npu_quant_matmul(x, self.weight, self.scale, output_dtype=torch.bfloat16)


@miss("quant.static", tags=FULL, of="Fp8Full", soc="A5")
class Fp8Static(Floats):
    linear = _Static


class _PerTensor(RowLinear):
    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, scale = npu.npu_dynamic_quant(
            x, dst_type=torch.float8_e4m3fn, quant_mode="pertensor"
        )
        return values, scale.expand(len(x))


@miss("quant.dynamic", tags=FULL, of="Fp8Full", soc="A5")
class Fp8PerTensor(QueryAs):
    """One scale for all tokens."""

    linear, other = RowLinear, _PerTensor


class _OneScale(RowLinear):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.scale = nn.Parameter(self.scale[:1], requires_grad=False)


@miss(IN_PLACE, tags=f"run, {FULL}", of="HifFull", soc="A5")
class Fp8OneScale(Floats):
    """One scale for all columns."""

    linear = _OneScale


@miss("reader.latent", tags=f"{FULL}, readers", of="MxIndexed", soc="A5")
class MxLatentReadInBfloat16(Indexed):
    def __init__(self) -> None:
        super().__init__()
        self.wq_b = linear(HCQ, 128)  # type: ignore[assignment]


class _Smoothed(MxLinear):
    """Smooth scales before the blocks are quantised; no mode of mxfp8 has them."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.smooth = nn.Parameter((0.5 + torch.rand(width_in)).bfloat16())

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().quantise(x * self.smooth)


@miss("contract:forbidden.smooth_scales_cq", tags=FULL, of="MxFull", soc="A5")
class MxSmoothed(QueryAs):
    other = _Smoothed


@miss("contract:quant.weight_quant_mode", tags=FULL, of="MxFull")
class MxOnA3(Floats):
    """A chip whose kernel has no float formats."""


@miss("contract:quant.weight_quant_mode", tags=FULL, of="HifFull", soc="A2")
class HifOnA2(Floats):
    linear = HifLinear


@miss("linear.hidden", tags=FULL, of="MxGiven", args=quantised_args, soc="A5")
class MxGivenInRows(MxGiven):
    """The scales of x have an axis more than x."""

    def forward(self, x: Tensor, x_scale: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x, x_scale.unsqueeze(0), *others)
