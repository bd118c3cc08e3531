"""RoPE: which columns are turned by which, read off values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.facts.reading import ropes
from tests.fx.tracing import TOKENS, floats

DR, N = 8, 2
H = DR // 2
Step = Callable[[Tensor, Tensor, Tensor], Tensor]


def heads(v: Tensor) -> Tensor:
    return v.view(v.shape[0], N, DR)


def half(v: Tensor) -> Tensor:
    return torch.cat([-v[..., H:], v[..., :H]], -1)


def rotate(v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return v * cos[:, None] + half(v) * sin[:, None]


def by_halves(v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = v.chunk(2, -1)
    ca, cb, sa, sb = (t[:, None] for t in (*cos.chunk(2, -1), *sin.chunk(2, -1)))
    return torch.cat([a * ca - b * sa, b * cb + a * sb], -1)


def regrouped(v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    grouped = v.view(*v.shape[:-1], H, 2).transpose(-1, -2).reshape(v.shape)
    return rotate(grouped, cos, sin)


HALF: dict[str, Step] = {
    "rotate half": lambda v, c, s: rotate(heads(v), c, s),
    "by halves": lambda v, c, s: by_halves(heads(v), c, s),
    "heads first": lambda v, c, s: (
        heads(v).transpose(0, 1) * c + half(heads(v).transpose(0, 1)) * s
    ),
    "negated sine": lambda v, c, s: heads(v) * c[:, None] - half(heads(v)) * -s[:, None],
    "in float64": lambda v, c, s: rotate(heads(v).double(), c.double(), s.double()).float(),
}
INTERLEAVED: dict[str, Step] = {
    "regrouped": lambda v, c, s: regrouped(heads(v), c, s),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", [*HALF, *INTERLEAVED])
def test_spelling(name: str, symbolic: bool) -> None:
    step = HALF.get(name) or INTERLEAVED[name]
    found = ropes(
        step, N * DR, floats(TOKENS, DR), floats(TOKENS, DR), tokens=TOKENS, symbolic=symbolic
    )
    assert len(found) == 1
    (fact,) = found
    assert (fact.heads, fact.rope_dim, fact.layout) == (N, DR, "half")
    assert fact.input_layout == ("half" if name in HALF else "interleaved")
    # in one piece or in two; of what was negated, with the other sign
    for table in (fact.cos, fact.sin):
        assert sum(run.count for run in table) == DR
        assert {(run.step, abs(run.factor), run.rows) for run in table} == {(1, 1.0, "token")}
    assert not {run.base for run in fact.cos} & {run.base for run in fact.sin}


def test_complex_tables_are_read_as_their_parts() -> None:
    def step(v: Tensor, table: Tensor) -> Tensor:
        turned = torch.view_as_complex(heads(v).reshape(v.shape[0], N, H, 2)) * table[:, None]
        return torch.view_as_real(turned).flatten(-2)

    (fact,) = ropes(step, N * DR, torch.zeros(5, H, dtype=torch.complex64))
    assert fact.layout == fact.input_layout == "interleaved"
    assert {run.field for run in fact.cos} == {"real"} and {run.field for run in fact.sin} == {
        "imag"
    }


def test_the_factor_of_a_table_is_read_off() -> None:
    (fact,) = ropes(
        lambda v, c, s: rotate(heads(v) * 0.5, c, s), N * DR, floats(5, DR), floats(5, DR)
    )
    assert {run.factor for run in (*fact.cos, *fact.sin)} == {0.5}


def test_some_columns_alone_are_rotated() -> None:
    step = lambda v, c, s: rotate(v[:, None, 4:12], c, s)  # noqa: E731
    (fact,) = ropes(step, 16, floats(5, DR), floats(5, DR))
    assert fact.heads == 1 and fact.first == ((4, 5, 6, 7),) and fact.second == ((8, 9, 10, 11),)


MISSES: dict[str, Step] = {
    "one table for another token": lambda v, c, s: rotate(heads(v), c.flip(0), s),
    "tokens flipped": lambda v, c, s: rotate(heads(v.flip(0)), c, s),
    "clamped before": lambda v, c, s: rotate(heads(v).clamp(-8, 8), c, s),
    "clamped behind": lambda v, c, s: rotate(heads(v), c, s).clamp(-8, 8),
    "sizes": lambda v, c, s: rotate(heads(v).abs(), c, s),
    "squared": lambda v, c, s: rotate(heads(v).square(), c, s),
    "three columns each": lambda v, c, s: rotate(heads(v), c, s) + heads(v).roll(1, -1),
    "an offset": lambda v, c, s: rotate(heads(v), c, s) + c[:, None],
    "the sum of tables": lambda v, c, s: rotate(heads(v), c + s, s),
    "squares of a table": lambda v, c, s: rotate(heads(v), c * c, s),
    "noise": lambda v, c, s: rotate(heads(v), c, s) + torch.randn_like(heads(v)),
    "heads by tables of their own": lambda v, c, s: (
        heads(v) * c[:, None] * torch.arange(1, 3)[:, None] + half(heads(v)) * s[:, None]
    ),
    "some tokens alone": lambda v, c, s: torch.cat([rotate(heads(v), c, s)[:3], heads(v)[3:]]),
    "where a table is large": lambda v, c, s: torch.where(
        c[:, None] > 0.5, rotate(heads(v), c, s), heads(v)
    ),
    "through float8": lambda v, c, s: rotate(heads(v).to(torch.float8_e4m3fn).float(), c, s),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", MISSES)
def test_miss(name: str, symbolic: bool) -> None:
    """Nothing that is returned holds a rotation of the two tables as they come in."""
    tables = floats(TOKENS, DR), floats(TOKENS, DR)
    found = ropes(MISSES[name], N * DR, *tables, tokens=TOKENS, symbolic=symbolic)
    for fact in found:
        ends = all(user.op == "output" for user in fact.node.users)
        whole = all(run.base.op == "placeholder" for run in (*fact.cos, *fact.sin))
        assert not (ends and whole)
