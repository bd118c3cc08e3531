"""HiFloat8 in software, as uint8: torch has no such dtype and torch_npu carries it as uint8 too.

Layout, from the published format ("Ascend HiFloat8 Format for Deep Learning", arXiv 2409.16626): a
sign, a prefix code of 2 to 4 bits for the number D of exponent bits, D exponent bits (a sign and a
magnitude with a hidden leading 1), and mantissa bits. D = 4 has 1 mantissa bit, D
= 3 has 2, D <= 2 has 3: 7 exponents of 3 bits, 8 of 2, 16 of 1. The prefix 0000 holds powers of two
2**-22 .. 2**-16, zero (0x00) and NaN (0x80); there is no negative zero. Largest finite value 2**15,
infinities 0x6F and 0xEF.

Verified: `decode` of all 256 codes, and `encode` of every bfloat16 and float16 value, of every
midpoint and of its two float32 neighbours, against the numpy dtype `hifloat8` of en_dtypes 0.0.4,
whose only difference is that it overflows to infinity where the kernel saturates
(`vf_dynamic_quant.h`, `vf_quant_pertensor.h`: SatMode SAT, CAST_ROUND). `decode` also agrees with
MindSpore's `hifloat8.h`, whose encoder truncates and is no reference. Not verified: the
kernel's cast of infinities (saturated here) and of NaN (kept), since neither has been seen on a
device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fusion.modes import kept_outside_modes

MAXIMUM = 32768.0
_NAN = 0x80
# (prefix, its length, exponent bits D)
_PREFIXES = ((0b11, 2, 4), (0b10, 2, 3), (0b01, 2, 2), (0b001, 3, 1), (0b0001, 4, 0))


def _magnitude(code: int) -> float:
    """Returns the value of the lower seven bits."""
    for prefix, length, d in _PREFIXES:
        if code >> (7 - length) == prefix:
            steps = 1 << (7 - length - d)  # of the mantissa
            field, mantissa = divmod(code % (steps << d), steps)
            leading = (1 << d) >> 1  # the field's highest bit is the sign
            exponent = leading | field & (leading - 1)
            if exponent == 15 and mantissa == 1 and not field & leading:
                return float("inf")
            return 2.0 ** (-exponent if field & leading else exponent) * (1 + mantissa / steps)
    return 2.0 ** (code - 23) if code else 0.0


@kept_outside_modes(1)
def _tables() -> tuple[Tensor, Tensor, Tensor]:
    """Returns the values of the 256 codes, the finite magnitudes in order, and their codes."""
    positive = torch.tensor([_magnitude(code) for code in range(128)], dtype=torch.float32)
    values = torch.cat((positive, -positive))
    values[_NAN] = float("nan")
    magnitudes, codes = positive.sort()
    return values, magnitudes[:-1], codes[:-1].to(torch.uint8)  # the last is infinity


def decode(codes: Tensor) -> Tensor:
    """Returns the float32 values of uint8 HiFloat8 codes."""
    return _tables()[0][codes.long()]


def encode(x: Tensor) -> Tensor:
    """Returns the uint8 codes nearest to ``x``, half-way cases away from zero (CAST_ROUND),
    saturated. NaN stays NaN.
    """
    _, magnitudes, codes = _tables()
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    nearest = codes[torch.bucketize(x.float().abs().contiguous(), midpoints, right=True)]
    signed = torch.where((x < 0) & (nearest != 0), nearest | 0x80, nearest)
    return torch.where(x.isnan(), torch.full_like(signed, _NAN), signed)
