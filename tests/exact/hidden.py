"""Functions that no probe of moderate size tells from the identity; and where they can stand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.catalogue.base import DR, HCKV, Base, D, hf_interleave, rotate_half

Function = Callable[[Tensor], Tensor]


def of_size(rng: random.Random) -> tuple[str, Function]:
    """Equal to its argument to 1e-12 up to 1e4, and not beyond (or far below)."""
    far = 10.0 ** rng.uniform(7, 30)
    power = rng.choice([2, 4, 6, 8])
    small = 10.0 ** rng.uniform(-40, -30)
    kinds: dict[str, Function] = {
        "soft cap": lambda v: v / (1 + (v / far) ** power) ** (1 / power),
        "tanh": lambda v: far * torch.tanh(v / far),
        "clamp": lambda v: v.clamp(-far, far),
        "where": lambda v: torch.where(v.abs() < far, v, torch.zeros_like(v)),
        "power": lambda v: v * (1 + (v / far) ** power),
        "square": lambda v: v + small * v * v,
        "sine": lambda v: far * torch.sin(v / far),
        "minimum": lambda v: torch.minimum(v, torch.full_like(v, far)),
        "nan_to_num": lambda v: torch.nan_to_num(v, posinf=far),
        "fmod": lambda v: torch.fmod(v, far),
        "scaled": lambda v: v * (1 + 2.0**-40),
        "quotient": lambda v: v * v / (v + small),
        "one channel": lambda v: torch.cat([v[..., :1].clamp(max=far), v[..., 1:]], -1),
        "asinh": lambda v: far * torch.asinh(v / far),
        "bias": lambda v: v + small,
    }
    name = rng.choice(sorted(kinds))
    return f"{name} at {far:.0e}" if name not in ("square", "bias", "quotient") else name, kinds[
        name
    ]


def of_token(rng: random.Random) -> tuple[str, Function]:
    """1 (or 0) for the first hundreds of tokens, and not behind."""
    first = rng.choice([300, 600, 1000, 4000])

    def place(v: Tensor) -> Tensor:
        count = torch.arange(v.shape[0], device=v.device)
        return count.reshape(-1, *(1,) * (v.dim() - 1)).float()

    kinds: dict[str, Function] = {
        "relu": lambda v: v + torch.relu(place(v) - first),
        "power": lambda v: v * (1 + (place(v) / first) ** 40),
        "floor": lambda v: v + torch.floor(place(v) / first),
        "greater": lambda v: v * (1 + (place(v) >= first).float()),
        "where": lambda v: torch.where(place(v) < first, v, -v),
        "clamp": lambda v: v * place(v).clamp(min=first) / first,
        "maximum": lambda v: v + torch.maximum(place(v), torch.full_like(place(v), first)) - first,
    }
    name = rng.choice(sorted(kinds))
    return f"{name} of tokens from {first} on", kinds[name]


BEFORE = (
    "x", "c_q_raw", "c_q", "q", "q_nope", "q_pe", "kv", "c_kv", "k_pe", "sin of k", "cos of q",
)  # fmt: skip
BEHIND = ("query", "rotated_q")


class Member(NamedTuple):
    """A function of one value of the prologue."""

    place: str
    name: str
    function: Function
    dynamic: bool

    @property
    def commutes(self) -> bool:
        """A number for each token goes through the product with W_uk, and stays in the graph."""
        return self.place == "q_nope" and self.name.startswith(
            ("greater of", "power of", "clamp of")
        )


def member(seed: int, places: tuple[str, ...]) -> Member:
    rng = random.Random(seed)
    of_tokens = rng.random() < 0.5
    name, function = (of_token if of_tokens else of_size)(rng)
    return Member(rng.choice(places), name, function, of_tokens or rng.random() < 0.5)


class At(Base):
    """The base prologue with a function of one of its values."""

    def __init__(self, place: str, function: Function) -> None:
        super().__init__()
        self.place, self.function = place, function

    def at(self, name: str, value: Tensor) -> Tensor:
        if name != self.place:
            return value
        return self.function(value.float()).to(value.dtype)

    def rope(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        x = hf_interleave(x)
        return x * c + rotate_half(x) * s

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Any:
        at = self.at
        raw = at("c_q_raw", self.q_a_proj(at("x", x)))
        q = at("q", self.q_b_proj(at("c_q", self.q_a_layernorm(raw))))
        q_nope, q_pe = self.split(q)
        kv = at("kv", self.kv_a_proj_with_mqa(x))
        c_kv, k_pe = kv.split([HCKV, DR], -1)
        c_kv, k_pe = at("c_kv", c_kv), at("k_pe", k_pe)
        of_q = at("cos of q", cos).unsqueeze(1), sin.unsqueeze(1)
        of_k = cos.unsqueeze(1), at("sin of k", sin).unsqueeze(1)
        rotated_q = at("rotated_q", self.rope(at("q_pe", q_pe), *of_q))
        rotated_k = at("rotated_k", self.rope(k_pe.unsqueeze(1), *of_k).squeeze(1))
        query = at("query", self.absorb(at("q_nope", q_nope)))
        row = at("row", self.kv_a_layernorm(c_kv))
        self.write(kv_cache, kr_cache, slots, row, rotated_k)
        return query, rotated_q, kv_cache.view(-1, HCKV)[slots], kr_cache.view(-1, DR)[slots]


class BiasOfProduct(Base):
    """A product with a bias that is 0 for the first tokens."""

    def __init__(self, which: str, first: int = 600) -> None:
        super().__init__()
        self.which, self.first = which, first

    def late(self, x: Tensor) -> Tensor:
        return torch.relu(torch.arange(x.shape[0], device=x.device) - self.first).to(x.dtype)

    def product(self, which: str, x: Tensor, weight: Tensor) -> Tensor:
        if which != self.which:
            return F.linear(x, weight)
        return torch.addmm(self.late(x)[:, None], x, weight.t())

    def down(self, x: Tensor) -> Tensor:
        return self.product("q_a", x, self.q_a_proj.weight)

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = q.view(-1, self.heads, D + DR).split([D, DR], -1)
        return q_nope, q_pe

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = self.product("kv_a", x, self.kv_a_proj_with_mqa.weight).split([HCKV, DR], -1)
        return self.kv_a_layernorm(c_kv), k_pe

    def absorb(self, q_nope: Tensor) -> Tensor:
        left = q_nope.transpose(0, 1)
        if self.which != "w_uk":
            return torch.bmm(left, self.w_uk()).transpose(0, 1)
        bias = self.late(q_nope)[None, :, None].expand(self.heads, -1, 1)
        return torch.baddbmm(bias, left, self.w_uk()).transpose(0, 1)
