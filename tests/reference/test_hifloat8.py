"""HiFloat8 code by code: the published format read a second time, and every rounding."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from mla_fusion.reference import hifloat8

CODES = torch.arange(256).to(torch.uint8)
# first bits after the sign -> exponent bits that follow
DOT = {"11": 4, "10": 3, "01": 2, "001": 1, "0001": 0}


def read(code: int) -> float:
    """The value of a code, from its bits as text."""
    bits = f"{code:08b}"
    sign, rest = (-1.0 if bits[0] == "1" else 1.0), bits[1:]
    if rest == "0000000":
        return math.nan if sign < 0 else 0.0
    if rest.startswith("0000"):
        return sign * 2.0 ** (int(rest[4:], 2) - 23)
    dot = next(prefix for prefix in DOT if rest.startswith(prefix))
    field, mantissa = rest[len(dot) :][: DOT[dot]], rest[len(dot) + DOT[dot] :]
    exponent = 0
    if field:
        exponent = int("1" + field[1:], 2) * (-1 if field[0] == "1" else 1)
    if exponent == 15 and mantissa == "1":
        return sign * math.inf
    return sign * 2.0**exponent * (1 + int(mantissa, 2) / 2 ** len(mantissa))


VALUES = [read(code) for code in range(256)]
FINITE = sorted(value for value in VALUES if math.isfinite(value))


def test_every_code_has_the_value_of_its_bits() -> None:
    assert torch.equal(
        hifloat8.decode(CODES)[1:].nan_to_num(0.25), torch.tensor(VALUES[1:]).nan_to_num(0.25)
    )
    assert hifloat8.decode(CODES[:1]).view(torch.int32).item() == 0, "one zero, and it is positive"


def test_the_table_is_that_of_the_published_numpy_dtype() -> None:
    """Digest of all 256 values as little-endian float32, NaN 0x7FC00000, of en_dtypes 0.0.4."""
    values = hifloat8.decode(CODES).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    words = torch.where(CODES == 0x80, 0x7FC00000, values.view(torch.int32))
    digest = hashlib.sha256(words.to(torch.int32).numpy().astype("<i4").tobytes()).hexdigest()
    assert digest == "2ac829ee895e0e5e803c4484a3953db8d598c6c8131b98ca32f75502a7a2fb4c"


def test_all_values_are_distinct_and_survive_a_round_trip() -> None:
    values = hifloat8.decode(CODES)
    finite = values.isfinite()
    assert (
        len(FINITE) == 253
        and FINITE == sorted(set(FINITE)) == values[finite].sort().values.tolist()
    )
    assert torch.equal(hifloat8.encode(values[finite]), CODES[finite])


def test_encoding_is_monotone_and_nearest_with_ties_away_from_zero() -> None:
    table = torch.tensor(FINITE, dtype=torch.float64)
    middle = ((table[1:] + table[:-1]) / 2).float()
    infinity = torch.tensor(math.inf)
    bfloat16 = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    beside = (torch.nextafter(middle, infinity), torch.nextafter(middle, -infinity))
    grid = torch.cat((table.float(), middle, *beside, bfloat16))
    grid = grid[grid.isfinite()].sort().values
    found = hifloat8.decode(hifloat8.encode(grid)).double()
    assert (found.diff() >= 0).all()
    exact = grid.double().clamp(FINITE[0], FINITE[-1])
    error, best = (found - exact).abs(), (table - exact.unsqueeze(-1)).abs().amin(-1)
    assert torch.equal(error, best)
    tied = ((table - exact.unsqueeze(-1)).abs() == best.unsqueeze(-1)).sum(-1) == 2
    assert int(tied.sum()) >= 2 * 252 - 2 and (found.abs() > exact.abs())[tied].all()


def test_what_is_below_above_and_beside_the_range() -> None:
    half_of_smallest = 2.0**-23
    pairs = [
        (half_of_smallest, 2.0**-22),  # a tie, away from zero
        (math.nextafter(half_of_smallest, 0.0) * (1 - 2**-20), 0.0),
        (-(2.0**-24), 0.0),
        (1e-45, 0.0),
        (-0.0, 0.0),
        (40000.0, 32768.0),
        (3e38, 32768.0),
        (math.inf, 32768.0),
        (-math.inf, -32768.0),
    ]
    codes = hifloat8.encode(torch.tensor([x for x, _ in pairs]))
    assert hifloat8.decode(codes).tolist() == [wanted for _, wanted in pairs]
    assert codes[[1, 2, 3, 4]].tolist() == [0, 0, 0, 0], (
        "what rounds to zero has the one code of zero"
    )
    assert hifloat8.encode(torch.tensor([math.nan, -math.nan])).tolist() == [0x80, 0x80]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_and_shapes(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0625, -3.0], [17.0, 0.0]], dtype=dtype)
    assert hifloat8.decode(hifloat8.encode(x)).tolist() == [[1.125, -3.0], [16.0, 0.0]]
    assert hifloat8.encode(x.t()).tolist() == hifloat8.encode(x).t().tolist()
    assert hifloat8.encode(x[:0]).shape == (0, 2)
