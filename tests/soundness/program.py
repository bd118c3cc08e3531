"""One prologue with a name at every value, so that an attack can stand at any of them.

A place is a name: ``x``, ``c_q``, ``slots``, ``w_dq`` and so on (``PLACES``). ``prologue`` hands
the value of every place to the change, and goes on with what it gives back. The token axis is the
first of every value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.catalogue.base import BLOCK_SIZE, DR, HCKV, D, hf_interleave, rotate_half

Named = dict[str, Any]  # tensors, and the odd int
# (value, inputs) -> value; at "write" and "outputs" as those functions below
Step = Callable[..., Any]
HEADS, EPS = 2, 1e-6

FLOATS = ("x", "q_raw", "c_q", "q_nope", "q_pe_raw", "q_pe", "kv_raw", "c_kv", "k_raw", "k_pe")
TABLES = ("cos", "sin")
WEIGHTS = ("w_dq", "w_uq", "w_uk", "w_dkv_kr", "gamma_q", "gamma_kv")
OUTPUTS = ("query", "query_rope")
INSIDE = ("q_square", "kv_square", "q_var", "kv_var")  # of the norms: squares, and their means
INTEGERS = ("positions", "slots")
# The two reads of x, the tables of the two rotations; and whole functions: how caches are written,
# what is given out, and "program", all of it: (inputs, style) -> outputs.
SIDES = ("x_q", "x_kv", "q_cos", "q_sin", "k_cos", "k_sin", "q_positions", "k_positions")
WHOLE = ("write", "outputs", "program")
PLACES = (*FLOATS, *TABLES, *WEIGHTS, *OUTPUTS, *INSIDE, *INTEGERS, *SIDES, *WHOLE)


@dataclass(frozen=True)
class Change:
    """A step at some places; at every other place the value stays."""

    places: tuple[str, ...]
    step: Step

    def __post_init__(self) -> None:
        unknown = set(self.places) - set(PLACES)
        assert not unknown, unknown


@dataclass(frozen=True)
class Style:
    """How the prologue is spelled where no attack stands: none of it is new to the pass."""

    norm: str = "hf"
    rotation: str = "interleaved"
    # by position; "given", one row per token; "angles", computed of positions
    tables: str = "gathered"
    write: str = "index_put"


STYLES = {
    "paged": Style(),
    "neox": Style(norm="functional", rotation="half", tables="given"),
    "blocks": Style(norm="sqrt", write="block_and_offset"),
    "copied": Style(norm="functional", write="index_copy"),
    "angles": Style(rotation="half", tables="angles"),
    "complex": Style(norm="functional", rotation="complex", tables="given"),
}


def prologue(i: Named, style: Style, change: Change | None = None) -> tuple[Tensor, ...]:
    """Query and rotated query; caches among ``i`` are written in place."""

    def at(place: str, value: Any) -> Any:
        return change.step(value, i) if change is not None and place in change.places else value

    x = at("x", i["x"])
    q_raw = at("q_raw", F.linear(at("x_q", x), at("w_dq", i["w_dq"])))
    c_q = at("c_q", _norm(style, q_raw, at("gamma_q", i["gamma_q"]), "q", at))
    q = F.linear(c_q, at("w_uq", i["w_uq"])).view(c_q.shape[0], HEADS, D + DR)
    q_nope, q_pe = at("q_nope", q[..., :D]), at("q_pe_raw", q[..., D:])
    latent = F.linear(at("x_kv", x), at("w_dkv_kr", i["w_dkv_kr"]))
    kv_raw, k_raw = at("kv_raw", latent[..., :HCKV]), at("k_raw", latent[..., HCKV:])
    c_kv = at("c_kv", _norm(style, kv_raw, at("gamma_kv", i["gamma_kv"]), "kv", at))
    (q_cos, q_sin), (k_cos, k_sin) = _tables(i, style, at)
    q_pe = at("q_pe", _rotate(style, q_pe, q_cos, q_sin))
    k_pe = at("k_pe", _rotate(style, k_raw.unsqueeze(1), k_cos, k_sin).squeeze(1))
    query = torch.bmm(q_nope.transpose(0, 1), at("w_uk", i["w_uk"])).transpose(0, 1)
    slots = at("slots", i["slots"])
    if change is not None and "write" in change.places:
        change.step(i, slots, c_kv, k_pe)
    else:
        write(style, i, slots, c_kv, k_pe)
    query, q_pe = at("query", query), at("query_rope", q_pe)
    if change is not None and "outputs" in change.places:
        return tuple(change.step(i, query, q_pe, c_q, c_kv, k_pe))
    return query, q_pe


def _norm(
    style: Style, value: Tensor, gamma: Tensor, side: str, at: Callable[[str, Any], Any]
) -> Tensor:
    if style.norm == "functional":
        return F.rms_norm(value, (value.shape[-1],), gamma, EPS)
    wide = value.float()
    square = at(f"{side}_square", wide * wide)
    mean = at(f"{side}_var", square.mean(-1, keepdim=True))
    if style.norm == "sqrt":
        return (wide / torch.sqrt(mean + EPS) * gamma.float()).to(value.dtype)
    return gamma * (wide * torch.rsqrt(mean + EPS)).to(value.dtype)


def _tables(i: Named, style: Style, at: Callable[[str, Any], Any]) -> list[tuple[Tensor, Tensor]]:
    def of(side: str) -> tuple[Tensor, Tensor]:
        return at(f"{side}_cos", cos).unsqueeze(1), at(f"{side}_sin", sin).unsqueeze(1)

    if style.tables == "given":
        cos, sin = at("cos", i["cos"]), at("sin", i["sin"])
        return [of("q"), of("k")]
    positions = at("positions", i["positions"])
    found = []
    for side in ("q", "k"):
        own = at(f"{side}_positions", positions)
        if style.tables == "angles":
            angles = own.float()[:, None] * i["inv_freq"]
            both = torch.cat([angles, angles], -1)
            cos, sin = (
                at("cos", both.cos().to(i["x"].dtype)),
                at("sin", both.sin().to(i["x"].dtype)),
            )
        else:
            cos, sin = at("cos", i["all_cos"][own]), at("sin", i["all_sin"][own])
        found.append(of(side))
    return found


def _rotate(style: Style, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if style.rotation == "complex":
        width = value.shape[-1] // 2
        turns = torch.complex(cos[..., :width].float(), sin[..., :width].float())
        pairs = torch.view_as_complex(value.float().reshape(*value.shape[:-1], width, 2))
        return torch.view_as_real(pairs * turns).flatten(-2).to(value.dtype)
    if style.rotation == "interleaved":
        value = hf_interleave(value)
    return value * cos + rotate_half(value) * sin


def write(style: Style, i: Named, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
    """The new rows into both caches."""
    kv, kr = i["kv_cache"], i["kr_cache"]
    if style.write == "block_and_offset":
        kv.squeeze(2)[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = c_kv
        kr.squeeze(2)[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = k_pe
    elif style.write == "index_copy":
        kv.view(-1, HCKV).index_copy_(0, slots, c_kv)
        kr.view(-1, DR).index_copy_(0, slots, k_pe)
    else:
        kv.view(-1, HCKV)[slots] = c_kv
        kr.view(-1, DR)[slots] = k_pe
