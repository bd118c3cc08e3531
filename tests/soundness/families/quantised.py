"""The path of a per-token scale: permuted, sliced or expanded on its way, it belongs to other
tokens, or other blocks.

Full and partial W8A8 by npu_dynamic_quant and npu_quant_matmul, or by plain operators; fp8 and
mxfp8 by operators. The scale of one projection takes a detour. A detour that comes back is a
control; every other is another model, however much alike two scales are. The scale of W_dq x alone
is no place: the norm behind it takes every factor of a token out again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import mla_fusion as mf
from tests.catalogue import base, floats, int8, int8_plain

from .. import inputs, modelled
from ..member import Attack, Family, Member, Outcome, tokens_of
from ..program import Named

Detour = Callable[[Tensor], Tensor]
REGIMES = ("T8", "T64", "sym")

ATTACKS: dict[str, Detour] = {
    "turned_in_two": lambda s: s.view(2, -1).t().reshape(s.shape),
    "first_for_all": lambda s: s[:1].expand(s.shape),
    "last_for_all": lambda s: s[-1:].expand_as(s),
    "flipped": lambda s: s.flip(0),
    "rolled": lambda s: s.roll(1, 0),
    "largest_for_all": lambda s: s.max().expand(s.shape),
    "mean_for_all": lambda s: s.mean(0, keepdim=True).expand(s.shape),
    "sorted": lambda s: s.sort(0).values,
    "halves_swapped": lambda s: torch.cat([s[s.shape[0] // 2 :], s[: s.shape[0] // 2]]),
    "running_largest": lambda s: s.cummax(0).values,
    "bounded": lambda s: s.clamp(max=0.026),
    "bounded_below": lambda s: s.clamp(min=0.032),
    "in_bfloat16_steps": lambda s: (s * 64).round() / 64,
    "doubled_late": lambda s: torch.where(s > 0.028, s * 2, s),
    "by_number": lambda s: s * (1 + torch.arange(s.shape[0]).view(-1, *[1] * (s.dim() - 1))),
    "one_before": lambda s: torch.cat([s[:1], s[:-1]]),
    "indexed": lambda s: s[torch.arange(s.shape[0] - 1, -1, -1)],
    "tail_halved": lambda s: torch.cat([s[:1], s[1:] / 2]),
    "doubled": lambda s: s * 2,
    "squared": lambda s: s * s * 50,
    "through_half": lambda s: (s * 1e-5).half().float() * 1e5,
}
# Of scales for blocks, [T, k/64, 2], which are codes of powers of two.
OF_BLOCKS: dict[str, Detour] = {
    **{
        name: ATTACKS[name]
        for name in ("first_for_all", "flipped", "rolled", "halves_swapped", "one_before")
    },
    "pairs_swapped": lambda s: s.flip(-1),
    "blocks_flipped": lambda s: s.flip(-2),
    "pairs_turned": lambda s: s.transpose(-1, -2).reshape(s.shape),
    "first_block_for_all": lambda s: s[:, :1, :1].expand(s.shape),
    "largest_block_for_all": lambda s: s.amax((-1, -2), keepdim=True).expand(s.shape),
    "twice_as_large": lambda s: s + 1,
    "bounded_codes": lambda s: s.clamp(min=119),
    "through_another_power": lambda s: (s // 2) * 2,
    "rows_as_blocks": lambda s: s.flatten(0, 1).roll(1, 0).view(s.shape),
}
CONTROLS: dict[str, Detour] = {
    "as_it_is": lambda s: s,
    "viewed_and_back": lambda s: s.reshape(-1, 1).view(s.shape),
    "unsqueezed": lambda s: s.unsqueeze(0).squeeze(0),
    "float": lambda s: s.float(),
    "turned_and_back": lambda s: s.reshape(1, -1).t().reshape(s.shape),
}
SIDES = {"q_a": ("q_a_proj",), "q_b": ("q_b_proj",), "kv_a": ("kv_a_proj_with_mqa",)}
SIDES["all"] = tuple(name for side in ("q_a", "q_b", "kv_a") for name in SIDES[side])


class _Operators(int8.QuantLinear):
    """npu_dynamic_quant, the detour, npu_quant_matmul."""

    detour: Detour | None = None

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        return super().product(x, x_scale if self.detour is None else self.detour(x_scale))


class _Plain(int8_plain.PlainLinear):
    detour: Detour | None = None

    def bring_back(self, sums: Tensor, scale: Tensor) -> Tensor:
        return super().bring_back(sums, scale if self.detour is None else self.detour(scale))


class _Mx(floats.MxLinear):
    detour: Detour | None = None

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        return super().product(x, x_scale if self.detour is None else self.detour(x_scale))


class _Fp8(floats.RowLinear):
    detour: Detour | None = None

    def product(self, x: Tensor, x_scale: Tensor) -> Tensor:
        return super().product(x, x_scale if self.detour is None else self.detour(x_scale))


class _FullMx(floats.Floats):
    linear = _Mx


class _FullFp8(floats.Floats):
    linear = _Fp8


class _FullOperators(int8.Full):
    linear = _Operators


class _FullPlain(int8.Full):
    linear = _Plain


class _Partial(base.Base):
    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = _Operators(base.HCQ, self.heads * (base.D + base.DR))  # type: ignore[assignment]


# "twice": two layers, of which the second alone takes the detour; the first may stand for it where
# both look alike.
MODELS: dict[str, type[nn.Module]] = {
    "operators": _FullOperators,
    "plain": _FullPlain,
    "partial": _Partial,
}
MODELS |= {f"{name} twice": model for name, model in list(MODELS.items())[:2]}


FLOATS: dict[str, type[nn.Module]] = {"fp8": _FullFp8, "mxfp8": _FullMx}
MODELS |= FLOATS


@lru_cache(maxsize=7)
def _model(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().requires_grad_(False)


def _program(
    style: str, place: str, detour: Detour | None
) -> Callable[[Named], tuple[Tensor, ...]]:
    model = _model(style)
    names = [name for name, _ in model.named_parameters()]

    def set_out(detour: Detour | None) -> None:
        for side in SIDES["all"]:
            module = getattr(model, side)
            if isinstance(module, (_Operators, _Plain, _Mx, _Fp8)):
                module.detour = detour if side in SIDES[place] else None

    def scores(i: Named, number: str) -> Tensor:
        x = i["x"].flip(-1) if number else i["x"]
        args = (x, i["cos"], i["sin"], i[f"kv_cache{number}"], i[f"kr_cache{number}"], i["slots"])
        found, _ = functional_call(model, {name: i["w." + name] for name in names}, args)
        return found

    def program(i: Named) -> tuple[Tensor, ...]:
        set_out(None if style.endswith("twice") else detour)
        first = scores(i, "")
        if not style.endswith("twice"):
            return (first,)
        set_out(detour)
        return first, scores(i, "_2")

    return program


def _draws(style: str, regime: str) -> Iterator[tuple[str, Named]]:
    parameters = {"w." + name: value for name, value in _model(style).named_parameters()}
    tokens = tokens_of(regime)
    for label, count, seed in (
        ("as compiled", tokens[0], 0),
        ("uneven", tokens[0], 21),
        ("longest", tokens[-1], 22),
    ):
        named = {**inputs.ordinary(count, seed), **parameters}
        if seed:
            step = torch.arange(count) % 4
            named["x"] = (named["x"].float() * (0.2 * 3.0**step)[:, None]).bfloat16()
            named["x"][:, ::97] *= 7
        yield label, named


def _judge(member: Member) -> Outcome:
    detour = {**ATTACKS, **OF_BLOCKS, **CONTROLS}[member.attack]
    program, usual = (_program(member.style, member.place, step) for step in (detour, None))
    config = mf.Config(soc="A5" if member.style in FLOATS else "A3")
    return modelled.judge(member, program, usual, list(_draws(member.style, member.regime)), config)


def _nothing(*_: Any) -> None:
    """Members are told by their names alone."""


def _cases(steps: dict[str, Detour], regimes: tuple[str, ...]) -> tuple[Attack, ...]:
    styles = tuple(name for name in MODELS if name not in ("partial", *FLOATS))
    return tuple(Attack(name, _nothing, ("q_b", "kv_a", "all"), regimes, styles) for name in steps)


_HALF = tuple(Attack(f"{name}", _nothing, ("q_b",), REGIMES, ("partial",)) for name in ATTACKS)
# Without those whose numbers are int8's, and one that five tokens cannot take.
_OF_TOKENS = [
    name
    for name in ATTACKS
    if name not in ("bounded", "bounded_below", "doubled_late", "turned_in_two")
]


def _of_floats(
    style: str, steps: Iterable[str], regimes: tuple[str, ...] = REGIMES
) -> tuple[Attack, ...]:
    return tuple(
        Attack(name, _nothing, ("q_b", "kv_a", "all"), regimes, (style,)) for name in steps
    )


_MX_CONTROLS = ("as_it_is", "unsqueezed")
FAMILIES = [
    Family(
        "quantised.scales",
        "the per-token scale of an int8 product takes a detour",
        _cases(ATTACKS, REGIMES),
        _cases(CONTROLS, ("T8",)),
        judge=_judge,
    ),
    Family("quantised.partial", "the same where only W_uq_qr is int8", _HALF, judge=_judge),
    Family(
        "quantised.fp8",
        "the per-token scale of an fp8 product takes a detour",
        _of_floats("fp8", _OF_TOKENS),
        _of_floats("fp8", CONTROLS, ("T8",)),
        judge=_judge,
    ),
    Family(
        "quantised.mxfp8",
        "the scales of the blocks of an mxfp8 product take a detour",
        _of_floats("mxfp8", OF_BLOCKS),
        _of_floats("mxfp8", _MX_CONTROLS, ("T8",)),
        judge=_judge,
    ),
]
