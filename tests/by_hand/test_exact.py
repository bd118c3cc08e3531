"""Two functions that call no fused operator: proved equal, different with a witness, or not
decided.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mla_fusion as mf
from mla_fusion.by_hand import exact
from tests.catalogue import base, prologues
from tests.exhaustive import one_in

WIDTH, EPS = 64, 1e-6
Step = Callable[[Tensor, Tensor], Tensor]


class Of(nn.Module):
    """One step with a weight, and a product behind it."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1 + torch.randn(WIDTH) / 8)
        self.out = nn.Linear(WIDTH, 16, bias=False)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.step(x, self.gamma))


def audited(step: Step, reference: Step, *inputs: Any) -> mf.Audit:
    torch.manual_seed(0)
    mine, theirs = Of(step), Of(reference)
    mine.load_state_dict(theirs.state_dict())
    return mf.audit(mine, theirs, *(inputs or (torch.randn(5, WIDTH),)))


def norm(x: Tensor, gamma: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * gamma


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, -1)
    return first, second


def angles(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], dtype=torch.float32)[:, None] / 10 ** torch.linspace(
        0, 1, WIDTH // 2
    )


def complex_rope(x: Tensor, gamma: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(
        torch.ones_like(angles(x)), angles(x)
    )
    return torch.view_as_real(turned).flatten(-2) * gamma


def paired_rope(x: Tensor, gamma: Tensor) -> Tensor:
    even, odd, cos, sin = x[..., 0::2], x[..., 1::2], angles(x).cos(), angles(x).sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2) * gamma


def mixture(x: Tensor, gamma: Tensor) -> Tensor:
    first, second = halves(x)
    return torch.cat([F.silu(first) * second, second], -1) * gamma


EQUAL: dict[str, tuple[Step, Step]] = {
    "itself": (norm, norm),
    "a root and a quotient": (
        lambda x, g: g * (x / torch.sqrt((x * x).sum(-1, keepdim=True) / WIDTH + EPS)),
        norm,
    ),
    "torch's": (lambda x, g: F.rms_norm(x, (WIDTH,), g, EPS), norm),
    "another size": (lambda x, g: F.rms_norm(x * 4, (WIDTH,), g, EPS * 16), norm),
    "in another dtype": (lambda x, g: norm(x.bfloat16().float(), g), norm),
    "complex": (complex_rope, paired_rope),
    "silu": (
        lambda x, g: mixture(x, g),
        lambda x, g: torch.cat([halves(x)[1] * F.silu(halves(x)[0]), halves(x)[1]], -1) * g,
    ),
    "products in another order": (
        lambda x, g: (x @ x.mT @ x) * g,
        lambda x, g: (x @ (x.mT @ x)) * g,
    ),
}

DIFFERENT: dict[str, tuple[Step, Step]] = {
    "epsilon": (lambda x, g: F.rms_norm(x, (WIDTH,), g, 1e-5), norm),
    "epsilon, a little": (lambda x, g: F.rms_norm(x, (WIDTH,), g, 1.001e-6), norm),
    "sign": (lambda x, g: paired_rope(x, g).neg(), paired_rope),
    "a cap at 100": (lambda x, g: norm(x, g) + (x.abs() > 100), norm),
    "halves": (lambda x, g: paired_rope(torch.cat(halves(x)[::-1], -1), g), paired_rope),
    "size, not number": (lambda x, g: (x * x).sqrt() * g, lambda x, g: x * g),
    "one element": (lambda x, g: x * g[:1].square().sqrt(), lambda x, g: x * -g[:1].abs()),
}

UNDECIDED: dict[str, tuple[Step, Step]] = {
    "a term below rounding": (lambda x, g: norm(x, g) + 1e-30 * x, norm),
    "a cap far out": (lambda x, g: norm(x, g).clamp(-1e30, 1e30), norm),
    "silu, spelled": (lambda x, g: x * torch.sigmoid(x) * g, lambda x, g: F.silu(x) * g),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_over_the_reals(name: str) -> None:
    found = audited(*EQUAL[name])
    assert found.equal is True and found.ok and "points of a finite field" in found.proof, str(
        found
    )
    assert "proved equal to the reference" in str(found)
    assert json.loads(found.to_json())["proof"] == found.proof


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_with_a_witness(name: str) -> None:
    found = audited(*DIFFERENT[name])
    assert found.equal is False and not found.ok and found.witness is not None, str(found)
    assert [item.code for item in found.findings] == ["values.differ"] and "NOT equal" in str(found)
    torch.manual_seed(0)
    mine, theirs = (Of(step).double() for step in DIFFERENT[name])
    mine.load_state_dict(theirs.state_dict())
    (x,) = found.witness
    assert not torch.allclose(mine(x.double()), theirs(x.double()), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", UNDECIDED)
def test_not_decided_names_the_steps(name: str) -> None:
    found = audited(*UNDECIDED[name])
    assert found.equal is None and found.ok and not found.proof, str(found)
    (finding,) = found.findings
    assert (
        finding.code == "graphs.part"
        and "test_exact.py" in finding.line
        and "not decided" in str(found)
    )


# -- whole prologues, with caches that are written


def both(mine: nn.Module, theirs: nn.Module, args: tuple[Tensor, ...] | None = None) -> mf.Audit:
    mine.load_state_dict(theirs.state_dict())
    return mf.audit(mine, theirs, *(args or base.paged_args()))


class OfKeys(prologues.PagedRotateHalf):
    """Not absorbed: keys of all heads, of which the scores are the same."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        q_pe, k_pe = base.rotated(q_pe, c, s), base.rotated(k_pe.unsqueeze(1), c, s)
        kv_cache.view(-1, base.HCKV)[slots] = c_kv
        kr_cache.view(-1, base.DR)[slots] = k_pe.squeeze(1)
        keys = torch.einsum(
            "rc,hdc->hrd", kv_cache.view(-1, base.HCKV).float(), self.w_uk().float()
        )
        scores = torch.einsum("thd,hrd->thr", q_nope.float(), keys)
        return scores + q_pe.float() @ kr_cache.view(-1, base.DR).float().T


class OtherSlots(prologues.PagedRotateHalf):
    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        found: Tensor = super().forward(x, cos, sin, kv_cache, kr_cache, slots)
        kv_cache.view(-1, base.HCKV)[slots + 1] = 0
        return found


@pytest.mark.parametrize(
    "mine", [OfKeys, *one_in(2, [prologues.PagedFunctionalNorm, prologues.PagedSqrtNorm])]
)
def test_prologues_in_other_spellings(mine: type[nn.Module]) -> None:
    found = both(mine(), prologues.PagedRotateHalf())
    assert found.equal is True, str(found)


def test_a_cache_that_is_written_elsewhere() -> None:
    found = both(OtherSlots(), prologues.PagedRotateHalf())
    assert found.equal is False and set(found.errors or ()) == {"output 0", "input 3", "input 4"}, (
        str(found)
    )
    assert [name for name, error in (found.errors or {}).items() if error] == ["input 3"]


def test_weights_that_were_joined_are_known_by_their_numbers() -> None:
    torch.manual_seed(0)
    apart = nn.ModuleList([nn.Linear(WIDTH, 8, bias=False), nn.Linear(WIDTH, 24, bias=False)])
    whole = nn.Linear(WIDTH, 32, bias=False)
    with torch.no_grad():
        whole.weight.copy_(torch.cat([each.weight for each in apart]))

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.apart = apart

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([each(x) for each in self.apart], -1)

    assert mf.audit(whole, Apart(), torch.randn(5, WIDTH)).equal is True
    with torch.no_grad():
        whole.weight[[3, 4]] = whole.weight[[4, 3]]
    assert mf.audit(whole, Apart(), torch.randn(5, WIDTH)).equal is False


def test_uniform_weights_are_named() -> None:
    torch.manual_seed(0)
    mine, theirs = Of(norm), Of(lambda x, gamma: norm(x, gamma.flip(0)))
    with torch.no_grad():
        theirs.gamma.fill_(1.0)
    mine.load_state_dict(theirs.state_dict())
    found = mf.audit(mine, theirs, torch.randn(5, WIDTH))
    assert found.equal is True and [item.code for item in found.findings] == ["weight.uniform"], (
        str(found)
    )


def test_what_cannot_be_exported_is_not_decided() -> None:
    def branches(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    found = mf.audit(branches, branches, torch.randn(4))
    assert found.equal is None and [item.code for item in found.findings] == ["export.fails"]


def test_other_results_are_different() -> None:
    found = mf.audit(lambda x: (x, x + 1), lambda x: x + 0, torch.randn(4))
    assert found.equal is False and [item.code for item in found.findings] == ["results.differ"]


# -- what looks equal to the field alone


def drops(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


SQUARE = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
BYTES = torch.arange(100, 116, dtype=torch.uint8).view(4, 4)
NOT_EQUAL: dict[str, tuple[Callable[..., Any], Callable[..., Any], Tensor]] = {
    "random numbers": (lambda x: torch.rand(4) - torch.rand(4) + x, lambda x: x + 0, SQUARE),
    "dropout": (lambda x: drops(x) - drops(x), lambda x: x - x, SQUARE),
    "a number of values": (lambda x: x * x.sum().item(), lambda x: x * x.prod().item(), SQUARE),
    "the root of a negative": (lambda x: x.sqrt().square(), lambda x: x * 1, SQUARE),
    "a quotient by zero": (lambda x: x.relu() / x.relu(), torch.ones_like, SQUARE),
    "integers that wrap": (lambda x: (x + x).float(), lambda x: x.float() + x.float(), BYTES),
    "a floor": (lambda x: x.abs().amax(-1).clamp(min=1e-5), lambda x: x.abs().amax(-1), SQUARE),
    "places of the largest": (
        lambda x: x.max(-1).indices,
        lambda x: x.flip(-1).max(-1).indices,
        SQUARE,
    ),
    "where, swapped": (
        lambda x: torch.where(x > 0, 2.0, x),
        lambda x: torch.where(x > 0, x, 2.0),
        SQUARE,
    ),
    "bytes": (
        lambda x: x.view(torch.uint8).float(),
        lambda x: x.view(torch.int8).float(),
        SQUARE,
    ),
    "modes of padding": (
        lambda x: F.pad(x, (1, 1), mode="reflect"),
        lambda x: F.pad(x, (1, 1), mode="circular"),
        SQUARE,
    ),
    "numbers": (lambda x: (x, 3), lambda x: (x, 4), SQUARE),
    "keys": (lambda x: {"a": x, "b": -x}, lambda x: {"b": x, "a": -x}, SQUARE),
    "conjugates": (
        lambda x: torch.fft.fft(x).conj().resolve_conj(),
        lambda x: torch.fft.fft(x),
        SQUARE,
    ),
}


@pytest.mark.parametrize("name", NOT_EQUAL)
def test_never_proved(name: str) -> None:
    one, other, x = NOT_EQUAL[name]
    found = mf.audit(one, other, x)
    assert found.equal is not True and found.findings, str(found)


@pytest.mark.parametrize("size", range(9, 14))
def test_the_sign_of_one_number(size: int) -> None:
    found = mf.audit(lambda x: x.sum().square().sqrt(), lambda x: x.sum() * 1, torch.randn(size))
    assert found.equal is not True, str(found)


@pytest.mark.parametrize(
    "step", [lambda x: x.sum(-1), lambda x: x.nonzero(), lambda x: x[x > 0], torch.frexp]
)
def test_no_step_ends_it(step: Callable[[Tensor], Any]) -> None:
    assert mf.audit(step, step, torch.tensor(2.0)).equal is not False


def test_two_buffers_are_not_one() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.cache.copy_(x)
            return x * 1

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Writes(), Writes()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(x) + 0 * self.one(x * 3)

    assert mf.audit(Both(), Writes(), torch.randn(4)).equal is False


def test_quotients_of_integers_are_exact_where_a_difference_is_looked_for() -> None:
    found = mf.audit(
        lambda x: F.silu(x) * torch.arange(8) / 3,
        lambda x: x * torch.sigmoid(x) * (torch.arange(8) / 3),
        torch.randn(5, 8),
    )
    assert found.equal is None, str(found)
    assert torch.get_default_dtype() is torch.float32


def written_at(column: bool) -> Callable[..., Tensor]:
    def write(x: Tensor, places: Tensor, values: Tensor) -> Tensor:
        made = x.clone()
        made[(slice(None), places) if column else places] = values
        return made

    return write


def masked(mask: list[bool]) -> Callable[[Tensor], Tensor]:
    def write(x: Tensor) -> Tensor:
        made = x.clone()
        made[torch.tensor(mask)] = 0
        return made

    return write


X, Y, PLACES = torch.randn(4, 4), torch.randn(4, 4), torch.tensor([0, 2, 1, 3])
ROWS = torch.randn(2, 4), torch.randn(2, 4), torch.tensor(0), torch.tensor(1)
# What rules of the field once took for one, and is not.
APART: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "a floor": (lambda x: x.abs().amax(-1).clamp(min=1e-12), lambda x: x.abs().amax(-1), (X,)),
    "ends between whole numbers": (
        lambda x: x.round().clamp(-100.5, 100.5),
        lambda x: x.clamp(-100.5, 100.5).round(),
        (X,),
    ),
    "crossed ends": (lambda x: x.clamp(max=3).clamp(min=5), lambda x: x.clamp(min=5, max=3), (X,)),
    "a cast to int32": (
        lambda x: (x * 1e3).round().to(torch.int32).float(),
        lambda x: (x * 1e3).round(),
        (X,),
    ),
    "numbers of 8 bits": (
        lambda a, b: (a - b).float(),
        lambda a, b: a.float() - b.float(),
        (PLACES.to(torch.uint8), PLACES.flip(0).to(torch.uint8)),
    ),
    "which part is complex": (
        lambda a, b, c: torch.eq(torch.complex(a, b), c),
        lambda a, b, c: torch.eq(a, torch.complex(b, c)),
        (X, Y, X + 1),
    ),
    "a cast of a complex number": (
        lambda z: z.bool(),
        lambda z: z.real.bool(),
        (torch.complex(X, Y),),
    ),
    "unwritten memory": (lambda x: x + torch.empty(4) - torch.empty(4), lambda x: x + 0, (X,)),
    "a number's place": (
        lambda c, x: torch.where(c, 2.0, x),
        lambda c, x: torch.where(c, x, 2.0),
        (X > 0, Y),
    ),
    "an index's place": (written_at(False), written_at(True), (X, PLACES, Y)),
    "a mask": (masked([True, False, False, False]), masked([False, True, False, False]), (X,)),
    "the place of the largest": (
        lambda x: x.max(-1).indices,
        lambda x: x.flip(-1).max(-1).indices,
        (X,),
    ),
    "how it is padded": (
        lambda x: F.pad(x, (1, 1), mode="reflect"),
        lambda x: F.pad(x, (1, 1), mode="circular"),
        (X,),
    ),
    "a copy into integers": (
        lambda x: torch.zeros(4, 4, dtype=torch.int64).copy_(x).float(),
        lambda x: x * 1,
        (X,),
    ),
    "full of integers": (
        lambda x: x * torch.full((4,), 1.5, dtype=torch.int64),
        lambda x: x * 1.5,
        (X,),
    ),
    "bytes": (lambda x: x.view(torch.uint8).float(), lambda x: x.view(torch.int8).float(), (X,)),
    "limits below 0": (
        lambda x, n: torch.minimum(torch.maximum(x, -n), n),
        lambda x, n: torch.maximum(torch.minimum(x, n), -n),
        (X, Y),
    ),
    "rows by places": (
        lambda a, b, i, j: a[i] * b[j],
        lambda a, b, i, j: a[j] * b[i],
        ROWS,
    ),
    "a quotient by 0": (lambda x: x / 0.0, lambda x: x * 0, (X,)),
    "infinity": (lambda x: x + float("inf") - float("inf"), lambda x: x + 0, (X,)),
    "a variance of one": (lambda x: x[:1].var(0), lambda x: x[0] * 0, (X,)),
}


@pytest.mark.parametrize("name", APART)
def test_the_field_alone_takes_them_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the run in float64 that a proof is held against."""
    monkeypatch.setattr(exact, "_witness", lambda *_: (None, "", None))
    mine, theirs, inputs = APART[name]
    assert mf.audit(mine, theirs, *inputs).equal is None
