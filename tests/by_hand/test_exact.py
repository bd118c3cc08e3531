"""Two functions without a fused operator: proved equal, different with a witness, or undecided."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mla_fusion as mf
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


ANGLES_OF_ROWS = torch.arange(5.0)[:, None] / 10 ** torch.linspace(0, 1, WIDTH // 2)


def angles(x: Tensor) -> Tensor:
    return ANGLES_OF_ROWS[: len(x)]


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
    "gelu, spelled": (
        lambda x, g: x / 2 * (1 + torch.erf(x / 2**0.5)) * g,
        lambda x, g: F.gelu(x) * g,
    ),
}


SLOTS, POOL, MASK = torch.tensor([3, 1, 6, 0]), torch.randn(8, 8), torch.rand(4, 8) > 0.5
ROWS_OF_8 = torch.randn(4, 8)


def put(c: Tensor, s: Tensor, x: Tensor) -> Tensor:
    return c.index_put((s,), x)


Whole = Callable[..., Any]
SPELLINGS: dict[str, tuple[Whole, Whole, tuple[Any, ...]]] = {
    "a mask": (
        lambda x, m: x.masked_fill(m, float("-inf")),
        lambda x, m: torch.where(m, float("-inf"), x),
        (ROWS_OF_8, MASK),
    ),
    "layer norm": (
        lambda x: F.layer_norm(x, (8,)),
        lambda x: (
            (x - x.mean(-1, keepdim=True))
            * (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        ),
        (ROWS_OF_8,),
    ),
    "the largest": (lambda x: x.max(-1).values, lambda x: x.flip(-1).amax(-1), (ROWS_OF_8,)),
    "rows by index_copy": (lambda c, s, x: c.index_copy(0, s, x), put, (POOL, SLOTS, ROWS_OF_8)),
    "rows by scatter": (
        lambda c, s, x: c.scatter(0, s[:, None].expand(4, 8), x),
        put,
        (POOL, SLOTS, ROWS_OF_8),
    ),
    "rows by gather": (
        lambda c, s: c.gather(0, s[:, None].expand(4, 8)),
        lambda c, s: c[s],
        (POOL, SLOTS),
    ),
}


@pytest.mark.parametrize("name", one_in(2, SPELLINGS))
def test_spellings_of_one_function(name: str) -> None:
    mine, theirs, inputs = SPELLINGS[name]
    found = mf.audit(mine, theirs, *inputs)
    assert found.equal is True and not found.findings, str(found)


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
        finding.code == "not.decided"
        and "they part at function" in finding.message
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
        rows = kv_cache.view(-1, base.HCKV)
        rows[(slots + 1) % len(rows)] = 0
        return found


@pytest.mark.parametrize(
    "mine", one_in(1, [OfKeys, prologues.PagedFunctionalNorm, prologues.PagedSqrtNorm])
)
def test_prologues_in_other_spellings(mine: type[nn.Module]) -> None:
    found = both(mine(), prologues.PagedRotateHalf())
    assert found.equal is True, str(found)


def test_a_cache_that_is_written_elsewhere() -> None:
    found = both(OtherSlots(), prologues.PagedRotateHalf())
    errors = found.errors or {}
    assert found.equal is False and errors.keys() >= {"output 0", "argument 3", "argument 4"}
    assert [name for name, error in errors.items() if error] == ["argument 3"], str(found)


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


def test_what_cannot_be_exported_is_not_decided() -> None:
    def branches(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    found = mf.audit(branches, branches, torch.randn(4))
    assert found.equal is None and [item.code for item in found.findings] == ["not.decided"]


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
    "the root of a negative": (lambda x: x.sqrt().square(), lambda x: x * 1, SQUARE),
    "a quotient by zero": (lambda x: x.relu() / x.relu(), torch.ones_like, SQUARE),
    "integers that wrap": (lambda x: (x + x).float(), lambda x: x.float() + x.float(), BYTES),
    "a floor": (lambda x: x.abs().amax(-1).clamp(min=1e-12), lambda x: x.abs().amax(-1), SQUARE),
    "places of the largest": (
        lambda x: x.max(-1).indices,
        lambda x: x.flip(-1).max(-1).indices,
        SQUARE,
    ),
    "bytes": (lambda x: x.view(torch.uint8).float(), lambda x: x.view(torch.int8).float(), SQUARE),
    "modes of padding": (
        lambda x: F.pad(x, (1, 1), mode="reflect"),
        lambda x: F.pad(x, (1, 1), mode="circular"),
        SQUARE,
    ),
    "conjugates": (
        lambda x: torch.fft.fft(x).conj().resolve_conj(),
        lambda x: torch.fft.fft(x),
        SQUARE,
    ),
}


NOT_EQUAL |= {
    "a hole at 0": (lambda x: x * x / x, lambda x: x * 1, SQUARE),
    "rows of which all are masked": (
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=x > 0),
        lambda x: (x @ x.mT / 2).masked_fill(~(x > 0), float("-inf")).softmax(-1) @ x,
        SQUARE,
    ),
    "what is only done when it is traced": (
        lambda x: x * (2 if torch.compiler.is_compiling() else 3),
        lambda x: x * 2,
        SQUARE,
    ),
}


# That the two are one over the real numbers, float64 hides.
HIDDEN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "an overflow": (
        lambda x: x.exp() / x.exp().sum(-1).unsqueeze(-1),
        lambda x: x.log_softmax(-1).exp(),
    ),
    "a cancellation": (torch.tanh, lambda x: 2 * torch.sigmoid(2 * x) - 1),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_rounding_and_overflow_are_no_difference(name: str) -> None:
    assert mf.audit(*HIDDEN[name], SQUARE).equal is None


class State(nn.Module):
    """Writes a buffer: of zeros, as it is at the first call."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 4))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.cache.copy_(self.write(self.cache, x))
        return x * 2


@pytest.mark.parametrize("name", one_in(2, NOT_EQUAL))
def test_never_proved(name: str) -> None:
    one, other, x = NOT_EQUAL[name]
    found = mf.audit(one, other, x)
    assert found.equal is not True and found.findings, str(found)


def test_a_buffer_that_is_written_is_not_decided() -> None:
    for other in (State(torch.add), lambda x: x * 2):
        found = mf.audit(State(torch.add), other, SQUARE)
        assert found.equal is None and "give what it writes as an argument" in str(found)


def test_the_first_output_that_differs_is_named_with_its_own_error() -> None:
    (found,) = mf.audit(lambda x: (x * 1.1, x * 3), lambda x: (x, x), SQUARE).findings
    assert found.message.startswith("output 0 differs by 0.1 on") and not found.line


class Embedded(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


def test_tables_that_differ_in_a_row_that_is_not_read() -> None:
    weight = torch.randn(4096, 4)
    other = weight.clone()
    other[3000] = 7
    ids = torch.tensor([1, 2, 3])
    assert mf.audit(Embedded(weight), Embedded(weight.clone()), ids).equal
    assert not mf.audit(Embedded(weight), Embedded(other), ids).equal


ANGLES: dict[str, Callable[[Tensor], Tensor]] = {
    "positions": lambda p: (p.bfloat16().unsqueeze(1) * FREQUENCIES).cos(),
    "angles": lambda p: (p.float().unsqueeze(1) * FREQUENCIES).bfloat16().float().cos(),
}
FREQUENCIES = 10000.0 ** -(torch.arange(0, 64, 2) / 64)


@pytest.mark.parametrize("name", ANGLES)
def test_a_table_of_what_is_rounded(name: str) -> None:
    positions = torch.tensor([100, 1001, 20003])
    found = mf.audit(
        ANGLES[name], lambda p: (p.float().unsqueeze(1) * FREQUENCIES).cos(), positions
    )
    assert not found.equal


def test_a_branch_is_not_decided() -> None:
    def branches(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    assert mf.audit(branches, lambda x: x + 1, torch.randn(4, 8)).equal is None
