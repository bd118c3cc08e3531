"""Prologues in float formats with one thing that no weight_quant_mode has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .base import DR, HCKV, HCQ, HE, D, linear, npu
from .entry import IN_PLACE, miss
from .floats import E8M0, Floats, HifLinear, MxGiven, MxIndexed, MxLinear, RowLinear, quantised_args

FULL = "floats, operators"
Layer = Callable[[int, int], nn.Module]
WIDTHS = {
    "q_a_proj": (HE, HCQ),
    "q_b_proj": (HCQ, 2 * (D + DR)),
    "kv_a_proj_with_mqa": (HE, HCKV + DR),
}


def with_layers(name: str, kind: type[nn.Module], layers: dict[str, Layer]) -> type[Floats]:
    """A prologue of layers of one kind, but for some."""

    def make(self: Floats) -> None:
        Floats.__init__(self)
        for place, layer in layers.items():
            setattr(self, place, layer(*WIDTHS[place]))

    return type(name, (Floats,), {"linear": kind, "__init__": make})


# -- layers with another method


def mx(**methods: Any) -> type[MxLinear]:
    return type("Changed", (MxLinear,), methods)


def by_options(**options: Any) -> type[MxLinear]:
    """Other arguments of npu_dynamic_mx_quant."""
    given = {"dst_type": torch.float8_e4m3fn, **options}
    return mx(quantise=lambda self, x: npu.npu_dynamic_mx_quant(x, **given))


def by_scales(change: Callable[[Tensor, Tensor], Tensor]) -> type[MxLinear]:
    """Rows are scaled back by other scales, of theirs and of the rows."""

    def quantise(self: MxLinear, x: Tensor) -> tuple[Tensor, Tensor]:
        values, scale = MxLinear.quantise(self, x)
        return values, change(scale, x)

    return mx(quantise=quantise)


def of_squares(scale: Tensor, x: Tensor) -> Tensor:
    return npu.npu_dynamic_mx_quant(x * x, dst_type=torch.float8_e4m3fn)[1]


OF_BLOCKS = {
    "scale_dtype": E8M0,
    "pertoken_scale_dtype": E8M0,
    "group_sizes": [1, 1, 32],
    "output_dtype": torch.bfloat16,
}


def by_product(**options: Any) -> type[MxLinear]:
    """Other arguments of npu_quant_matmul."""
    given = {**OF_BLOCKS, **options}

    def product(self: MxLinear, x: Tensor, x_scale: Tensor) -> Tensor:
        return npu.npu_quant_matmul(x, self.weight, self.scale, pertoken_scale=x_scale, **given)

    return mx(product=product)


def plain(width_in: int, width_out: int) -> nn.Linear:
    return linear(width_in, width_out)


other_rows = by_scales(lambda scale, x: scale.flip(0))
wider_exponent = by_options(dst_type=torch.float8_e5m2)
other_blocks = by_product(group_sizes=[1, 1, 128])
# the code, and the layers that are others
OF_MX: dict[str, tuple[str, dict[str, Layer]]] = {
    "MxRoundedDown": ("quant.dynamic", {"q_b_proj": by_options(round_mode="floor")}),
    # the scale of a block is not the power of two below its largest
    "MxOtherScale": ("quant.dynamic", {"q_b_proj": by_options(scale_alg=1)}),
    "MxBounded": ("quant.dynamic", {"q_b_proj": by_options(max_low_bound=0.5)}),
    "MxQueryInE5M2": ("quant.dynamic", {"q_b_proj": wider_exponent}),
    "MxQueryInOtherBlocks": ("quant.dynamic", {"q_b_proj": other_blocks}),
    "MxScaleOfAnother": ("proof.differs", {"q_b_proj": by_scales(of_squares)}),
    "MxScaleOfTheNextBlock": (
        "proof.differs",
        {"q_b_proj": by_scales(lambda scale, x: scale.flip(-1))},
    ),
    "MxScaleTurned": (
        "proof.differs",
        {"q_b_proj": by_scales(lambda scale, x: scale.mT.reshape(scale.shape))},
    ),
    "MxScaleOfAnotherRow": ("proof.differs", {"q_b_proj": other_rows}),
    "MxKeyScaleOfAnotherRow": ("quant.tokens_differ", {"kv_a_proj_with_mqa": other_rows}),
    "MxQueryInFp8": ("quant.mixed", {"q_b_proj": RowLinear}),
    "MxKeyInHifloat8": ("quant.mixed", {"kv_a_proj_with_mqa": HifLinear}),
    # only W_uq_qr: int8 has a mode for that, mxfp8 has none
    "MxQueryAlone": ("quant.mixed", {"q_a_proj": plain, "kv_a_proj_with_mqa": plain}),
    "MxInE5M2": ("quant.mixed", {"q_a_proj": wider_exponent, "kv_a_proj_with_mqa": wider_exponent}),
    "MxInOtherBlocks": (
        "linear.hidden",
        {"q_a_proj": other_blocks, "kv_a_proj_with_mqa": other_blocks},
    ),
}
for _name, (_code, _layers) in OF_MX.items():
    miss(_code, tags=FULL, of="MxFull", soc="A5")(with_layers(_name, MxLinear, _layers))


class QueryAs(Floats):
    """W_uq_qr c_q by another layer."""

    other: type[nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = self.other(*WIDTHS["q_b_proj"])  # type: ignore[assignment]


class _Biased(MxLinear):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.bias = nn.Parameter(torch.randn(width_out))

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        given = {"pertoken_scale": x_scale, "bias": self.bias, **OF_BLOCKS}
        return npu.npu_quant_matmul(x, self.weight, self.scale, **given)


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


@miss(IN_PLACE, tags=f"run, {FULL}", of="HifFull", soc="A5", weight_quant_mode=4)
class Fp8OneScale(Floats):
    """One scale for all columns."""

    linear = _OneScale


@miss("reader.latent", tags=f"{FULL}, readers", of="MxIndexed", soc="A5")
class MxLatentReadInBfloat16(MxIndexed):
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
