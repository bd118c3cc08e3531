"""Static W8A8: steps at the places that npu_mla_preprocess takes in, and only there.

The hidden state's norm, one scale and one offset for all that is quantised, int32 biases, c_q
between its norm and its quantisation: the operator has no counterpart of any other step, and writes
its caches at the model's own slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import mla_fusion as mf
from tests.catalogue import static
from tests.catalogue.base import DR, HCKV, HCQ, D
from tests.catalogue.prologues import NpuNorm

from .. import inputs, modelled
from ..member import Attack, Family, Member, Outcome, tokens_of
from ..program import Named

Step = Callable[[Tensor], Tensor]
REGIMES = ("T8", "T64")


def _number(t: Tensor) -> Tensor:
    """Of the token, as a column."""
    return torch.arange(t.shape[0]).view(-1, *[1] * (t.dim() - 1))


CHOICES: dict[str, Step] = {  # of floats [T, ..]
    "bounded": lambda t: t.clamp(-1, 1),
    "outliers_dropped": lambda t: t * (t.abs() < 1.2),
    "largest_halved": lambda t: torch.where(t.abs() > 1.2, t * 0.5, t),
    "absolute": lambda t: t.abs(),
    "in_steps": lambda t: t.round(),
}
MOVES: dict[str, Step] = {
    "flipped": lambda t: t.flip(0),
    "rolled": lambda t: t.roll(1, 0),
    "first_for_all": lambda t: t[:1].expand(t.shape),
    "columns_rolled": lambda t: t.roll(1, -1),
    "columns_flipped": lambda t: t.flip(-1),
    "plus_one": lambda t: t + 1,
}
SIZES: dict[str, Step] = {  # a norm takes these out again
    "doubled": lambda t: t * 2,
    "by_number": lambda t: t * (1 + _number(t)),
    "tail_halved": lambda t: torch.cat([t[:5], t[5:] / 2]),
}
CODES: dict[str, Step] = {  # of int8 [T, ..]
    "codes_bounded": lambda t: t.clamp(-100, 100),
    "codes_in_steps": lambda t: (t // 32 * 32).to(torch.int8),
    "codes_flipped": lambda t: t.flip(0),
    "codes_rolled": lambda t: t.roll(1, -1),
    "codes_negated": lambda t: -t,
    "codes_plus_one": lambda t: t + 1,
    "first_codes_for_all": lambda t: t[:1].expand(t.shape).clone(),
}
ONES: dict[str, Step] = {  # of a scale, one number or one for each column
    "scale_doubled": lambda t: t * 2,
    "scale_bounded": lambda t: t.clamp(max=0.01),
    "scale_rooted": lambda t: t.sqrt(),
    "scale_rolled": lambda t: t.roll(1) * 1.25,
    "scale_flipped": lambda t: t.flip(0) * 1.25,
}
OFFSETS: dict[str, Step] = {
    "offset_negated": lambda t: -t,
    "offset_plus_nine": lambda t: t + 9,
    "offset_zero": lambda t: t * 0,
}
BIASES: dict[str, Step] = {
    "bias_negated": lambda t: -t,
    "bias_flipped": lambda t: t.flip(0),
    "bias_times_nine": lambda t: t * 9,
    "bias_zero": lambda t: t * 0,
}
SLOTS: dict[str, Step] = {
    "next": lambda t: t + 1,
    "slots_flipped": lambda t: t.flip(0),
    "within": lambda t: t % 64,
    "one_for_all": lambda t: t * 0 + 3,
}
_BEHIND_NORMS = ("normed", "c_q", "q_nope", "q_pe", "latent", "k_pe")
_SCALES = ("x_scale", "q_scale")
PLACES = {
    # at c_kv, where they are staged, roundings decide them
    **dict.fromkeys(CHOICES, (*_BEHIND_NORMS, "c_q_raw")),
    **dict.fromkeys(MOVES, (*_BEHIND_NORMS, "c_q_raw", "c_kv")),
    **dict.fromkeys(SIZES, (*_BEHIND_NORMS, "c_kv")),
    **dict.fromkeys(CODES, ("x_codes", "q_codes")),
    **dict.fromkeys(ONES, (*_SCALES, "kv_descale", "q_b_descale")),
    "scale_bounded": _SCALES,
    **dict.fromkeys(OFFSETS, ("x_offset", "q_offset")),
    **dict.fromkeys(BIASES, ("q_a_bias", "kv_bias", "q_b_bias")),
    **dict.fromkeys(SLOTS, ("slots", "key_slots")),
}
ROWS = CHOICES | MOVES | SIZES
STEPS = ROWS | CODES | ONES | OFFSETS | BIASES | SLOTS
CONTROLS: dict[str, tuple[Step, str]] = {
    "as_it_is": (lambda t: t, "hidden"),
    "hidden_bounded": (lambda t: t.clamp(-60, 60), "hidden"),
    "hidden_rolled": (lambda t: t.roll(1, 0), "hidden"),
    "viewed": (lambda t: t.view(t.shape[0], 2, -1).flatten(1), "normed"),
    "query_bounded": (lambda t: t.clamp(-4, 4), "query"),
    "wide": (lambda t: t.float().to(t.dtype), "c_kv"),
}


class _Linear(static.StaticLinear):
    at: Callable[[str, Tensor], Tensor]
    names: tuple[str, str, str, str, str]  # of its scale, offset, codes, weight's scale, bias

    def quantised(self, x: Tensor) -> Tensor:
        scale, offset, codes, *_ = self.names
        given = self.at(scale, self.input_scale), self.at(offset, self.input_offset)
        return self.at(codes, torch.ops.npu.npu_quantize(x, *given, 1, -1, True))

    def forward(self, x: Tensor) -> Tensor:
        *_, descale, bias = self.names
        given = self.weight, self.at(descale, self.scale)
        made = self.at(bias, self.bias)
        return torch.ops.npu.npu_quant_matmul(
            self.quantised(x), *given, bias=made, output_dtype=torch.bfloat16
        )


class _Static(static.Static):
    """A prologue with a place for a step between any two of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.step = "", _as_it_is
        widths = {"q_a_proj": (static.H, HCQ), "q_b_proj": (HCQ, 2 * (D + DR))}
        widths["kv_a_proj_with_mqa"] = (static.H, HCKV + DR)
        for (name, width), short in zip(widths.items(), ("q_a", "q_b", "kv"), strict=True):
            side = "q" if short == "q_b" else "x"
            module = _Linear(*width)
            module.at = self.at
            module.bias.data = torch.randint_like(module.bias, -20000, 20000)
            module.names = (
                f"{side}_scale",
                f"{side}_offset",
                f"{side}_codes",
                f"{short}_descale",
                f"{short}_bias",
            )
            setattr(self, name, module)
        self.kv_a_proj_with_mqa.input_scale = self.q_a_proj.input_scale
        self.kv_a_proj_with_mqa.input_offset = self.q_a_proj.input_offset

    def at(self, place: str, value: Tensor) -> Tensor:
        return self.step(value) if place == self.place else value

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, *caches: Tensor
    ) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        kv_cache, kr_cache, slots = caches
        x = self.at("normed", self.input_layernorm(self.at("hidden", x)))
        c_q = self.at("c_q", self.q_a_layernorm(self.at("c_q_raw", self.q_a_proj(x))))
        q_nope, q_pe = self.split(self.q_b_proj(c_q))
        raw, k_pe = self.at("latent", self.kv_a_proj_with_mqa(x)).split([HCKV, DR], -1)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        q_pe, k_pe = (
            self.rotate(self.at("q_pe", q_pe), c, s),
            self.rotate(self.at("k_pe", k_pe).unsqueeze(1), c, s),
        )
        query = self.at("query", self.absorb(self.at("q_nope", q_nope)))
        kv_cache.view(-1, HCKV)[self.at("slots", slots)] = self.at("c_kv", self.kv_a_layernorm(raw))
        kr_cache.view(-1, DR)[self.at("key_slots", slots)] = k_pe.squeeze(1)
        return query, q_pe


class _ByOperators(_Static):
    norm = NpuNorm


def _as_it_is(value: Tensor) -> Tensor:
    return value


MODELS: dict[str, type[_Static]] = {"plain": _Static, "operators": _ByOperators}


@lru_cache(maxsize=2)
def _model(style: str) -> _Static:
    torch.manual_seed(5)
    model: _Static = MODELS[style]().requires_grad_(False)
    return model


def _program(style: str, place: str, step: Step) -> Callable[[Named], tuple[Tensor, ...]]:
    model = _model(style)
    names = [name for name, _ in model.named_parameters()]

    def program(i: Named) -> tuple[Tensor, ...]:
        model.place, model.step = place, step
        args = (i["x"], i["cos"], i["sin"], i["kv_cache"], i["kr_cache"], i["slots"])
        found: tuple[Tensor, ...] = functional_call(
            model, {name: i["w." + name] for name in names}, args
        )
        return found

    return program


def _draws(style: str, regime: str) -> Iterator[tuple[str, Named]]:
    parameters = {"w." + name: value for name, value in _model(style).named_parameters()}
    (tokens,) = tokens_of(regime)
    for label, seed in (("as compiled", 0), ("uneven", 31), ("outliers", 32)):
        named = {**inputs.ordinary(tokens, seed), **parameters}
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, static.H, generator=generator)
        if seed:
            x *= 0.2 * 3.0 ** (torch.arange(tokens) % 4)[:, None]
        if seed == 32:
            x[:, ::97] *= 300
        yield label, {**named, "x": x.bfloat16()}


def _judge(member: Member) -> Outcome:
    step, place = (
        CONTROLS[member.attack] if member.control else (STEPS[member.attack], member.place)
    )
    program, usual = (_program(member.style, place, step) for step in (step, _as_it_is))
    config = mf.Config(targets=("preprocess",) if member.target == "v3" else (member.target,))
    return modelled.judge(member, program, usual, list(_draws(member.style, member.regime)), config)


def _nothing(*_: Any) -> None:
    """Members are told by their names alone."""


def _cases(steps: dict[str, Step]) -> tuple[Attack, ...]:
    return tuple(Attack(name, _nothing, PLACES[name], REGIMES, tuple(MODELS)) for name in steps)


def _controls() -> tuple[Attack, ...]:
    return tuple(
        Attack(name, _nothing, (place,), REGIMES[:1], tuple(MODELS))
        for name, (_, place) in CONTROLS.items()
    )


FAMILIES = [
    Family(
        "static.rows",
        "a step on rows between the operator's own",
        _cases(ROWS),
        _controls(),
        judge=_judge,
    ),
    Family(
        "static.quantised",
        "a step on codes, scales, offsets, biases or slots of static W8A8",
        _cases(CODES | ONES | OFFSETS | BIASES | SLOTS),
        judge=_judge,
    ),
]
