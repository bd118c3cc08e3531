"""Programs that are equal, however they are written, are equal at random points of the field; one
with a slice, a sign, an axis, a weight or a table changed is another.

A program is a chain of blocks, each of rows [T, N] and giving such rows. A block has spellings that
are equal, and changed ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fusion.exact import prove as exact
from mla_fusion.exact.prove import Claim
from mla_fusion.fx.module_path import ARGUMENT
from mla_fusion.graph.departure import Departure
from mla_fusion.graph.form import Value
from mla_fusion.graph.layout import token_layout
from mla_fusion.graph.read import Graph

T, B, S, H, D = 12, 3, 4, 2, 4
N = H * D
CHAINS = 12
INPUTS = {
    "a": (T, 6),
    "p": (T, N),
    "p2": (T, N),
    "cos": (T, D),
    "sin": (T, D),
    "late": (S, N),
    "tab": (30, D),
    "tab2": (30, D),
}
MODEL = {"wx": (6, N), "g": (N,), "g2": (N,), "m": (N, N), "m2": (N, N), "u": (H, D, D)}
NUMBERS = ("pos", "pos2")


class Tensors:
    """What blocks read, by name."""

    a: Tensor
    p: Tensor
    p2: Tensor
    cos: Tensor
    sin: Tensor
    late: Tensor
    tab: Tensor
    tab2: Tensor
    wx: Tensor
    g: Tensor
    g2: Tensor
    m: Tensor
    m2: Tensor
    u: Tensor
    pos: Tensor
    pos2: Tensor


Block = Callable[[Tensors, Tensor], Tensor]


def heads(v: Tensor) -> Tensor:
    return v.view(T, H, D)


def flat(v: Tensor) -> Tensor:
    return v.reshape(T, N)


def normed(v: Tensor, g: Tensor, epsilon: float = 1e-6) -> Tensor:
    return v * (v.square().mean(-1, True) + epsilon).rsqrt() * g


def turned(v: Tensor, cos: Tensor, sin: Tensor, sign: int = -1) -> Tensor:
    first, second = v.chunk(2, -1)
    return v * cos.unsqueeze(1) + torch.cat((sign * second, first), -1) * sin.unsqueeze(1)


def by_halves(v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of tables whose halves are apart."""
    (one, two), (c1, c2) = v.split(D // 2, -1), cos.unsqueeze(1).chunk(2, -1)
    s1, s2 = sin.unsqueeze(1).chunk(2, -1)
    return torch.cat((one * c1 - two * s1, s2 * one + c2 * two), 2)


def turned_by_matrix(v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rows = [[0.0] * D for _ in range(D)]
    for place in range(D // 2):
        rows[place + D // 2][place], rows[place][place + D // 2] = -1.0, 1.0
    return v * cos[:, None] + (v @ torch.tensor(rows)) * sin[:, None]


def as_complex(v: Tensor, cos: Tensor, sin: Tensor, sign: float = 1.0) -> Tensor:
    """Pairs, turned by the first half of the tables."""
    pairs = torch.view_as_complex(v.reshape(T, H, D // 2, 2))
    turns = torch.complex(cos[:, None, : D // 2], sign * sin[:, None, : D // 2])
    return torch.view_as_real(pairs * turns).flatten(-2)


def pairs_apart(v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = v[..., ::2], v[..., 1::2]
    c, s = cos[:, None, : D // 2], sin[:, None, : D // 2]
    return torch.stack((even * c - odd * s, odd * c + even * s), -1).view(T, H, D)


def diagonal(u: Tensor) -> Tensor:
    """The matrices of all heads as one."""
    zeros = torch.zeros(D, D)
    return torch.cat((torch.cat((u[0], zeros), 1), torch.cat((zeros, u[1]), 1)))


def riffled(v: Tensor, rows: int, columns: int) -> Tensor:
    """Another order of the tokens."""
    return v.view(rows, columns, N).transpose(0, 1).reshape(T, N)


EQUAL: dict[str, list[Block]] = {
    "same": [
        lambda t, v: v,
        lambda t, v: flat(heads(v)),
        lambda t, v: v.t().t(),
        lambda t, v: flat(heads(v).permute(2, 0, 1).permute(1, 2, 0)),
        lambda t, v: torch.cat(v.chunk(2, -1), -1),
        lambda t, v: torch.cat((v[:, :3], v[:, 3:5], v[:, 5:]), 1),
        lambda t, v: v * 3 / 3,
        lambda t, v: v * 0.7 - v * -0.3,
        lambda t, v: v + t.p - t.p,
        lambda t, v: torch.stack(v.unbind(-1), -1),
        lambda t, v: v.view(B, S, N).transpose(0, 1).transpose(0, 1).reshape(T, N),
        lambda t, v: riffled(riffled(v, B, S), S, B),
        lambda t, v: v.flip(-1).flip(-1),
        lambda t, v: v.roll(3, -1).roll(-3, -1),
        lambda t, v: F.pad(v, (1, 2))[:, 1:-2],
        lambda t, v: v.view(T, 1, N).expand(T, 3, N)[:, 1],
        lambda t, v: v.repeat(1, 2)[:, N:],
        lambda t, v: v[:, [3, 1, 2, 0, 4, 5, 6, 7]][:, [3, 1, 2, 0, 4, 5, 6, 7]],
        lambda t, v: v.neg().neg(),
        lambda t, v: v.view(T, 1, N).expand(T, 4, N).mean(1),
        lambda t, v: v.double().float(),
        lambda t, v: (v * t.g) / t.g,
        lambda t, v: flat(riffled(v, B, S).view(S, B, N).permute(1, 0, 2)),
    ],
    "norm": [
        lambda t, v: normed(v, t.g),
        lambda t, v: v / (v.pow(2).sum(-1, keepdim=True) / N + 1e-6).sqrt() * t.g,
        lambda t, v: t.g * (v * N**0.5 * (v.pow(2).sum(-1, True) + N * 1e-6).rsqrt()),
        lambda t, v: torch.rms_norm(v, [N], t.g, 1e-6),
        lambda t, v: normed(v * 2, t.g, 4e-6),
        lambda t, v: v * (1 / torch.sqrt(torch.einsum("tn,tn->t", v, v) / N + 1e-6))[:, None] * t.g,
        lambda t, v: flat(normed(v.view(B, S, N), t.g)),
    ],
    "rotation": [
        lambda t, v: flat(turned(heads(v), t.cos, t.sin)),
        lambda t, v: flat(by_halves(heads(v), t.cos, t.sin)),
        lambda t, v: flat(turned_by_matrix(heads(v), t.cos, t.sin)),
        lambda t, v: flat(turned(heads(v).flip(1), t.cos, t.sin).flip(1)),
        lambda t, v: torch.cat(
            [turned(one[:, None], t.cos, t.sin)[:, 0] for one in v.chunk(H, 1)], 1
        ),
    ],
    "pairs": [
        lambda t, v: flat(as_complex(heads(v), t.cos, t.sin)),
        lambda t, v: flat(pairs_apart(heads(v), t.cos, t.sin)),
        lambda t, v: flat(as_complex(heads(v), t.cos, -t.sin, -1.0)),
    ],
    "projection": [
        lambda t, v: v @ t.m,
        lambda t, v: F.linear(v, t.m.t()),
        lambda t, v: torch.cat((v @ t.m[:, :3], v @ t.m[:, 3:]), -1),
        lambda t, v: v[:, :5] @ t.m[:5] + v[:, 5:] @ t.m[5:],
        lambda t, v: (t.m.t() @ v.t()).t(),
        lambda t, v: (v * 2) @ (t.m * 0.5),
        lambda t, v: (v.view(B, S, N) @ t.m).view(T, N),
        lambda t, v: v.flip(-1) @ t.m.flip(0),
        lambda t, v: torch.einsum("tk,km->tm", v, t.m),
        lambda t, v: (v[:, None, :] @ t.m.expand(T, N, N))[:, 0],
    ],
    "heads": [
        lambda t, v: flat(torch.einsum("thd,hde->the", heads(v), t.u)),
        lambda t, v: flat(torch.bmm(heads(v).transpose(0, 1), t.u).transpose(0, 1)),
        lambda t, v: torch.cat([one @ t.u[k] for k, one in enumerate(v.chunk(H, 1))], 1),
        lambda t, v: flat(heads(v).unsqueeze(2) @ t.u),
        lambda t, v: v @ diagonal(t.u),
        lambda t, v: flat(torch.einsum("hed,thd->the", t.u.transpose(1, 2), heads(v))),
    ],
    "table": [
        lambda t, v: flat(heads(v) * t.tab[t.pos][:, None]),
        lambda t, v: flat(t.tab.index_select(0, t.pos).unsqueeze(1) * heads(v)),
        lambda t, v: v * F.embedding(t.pos, t.tab).repeat(1, H),
        lambda t, v: flat(heads(v) * torch.cat((t.tab[:, :1], t.tab[:, 1:]), 1)[t.pos][:, None]),
    ],
    "beside": [
        lambda t, v: v * t.p,
        lambda t, v: flat(v.view(B, S, N) * t.p.view(B, S, N)),
        lambda t, v: flat((v.view(B, S, N).permute(1, 0, 2) * t.p.view(B, S, N).transpose(0, 1))
                          .transpose(0, 1)),
        lambda t, v: v * torch.cat((t.p[:, :3], t.p[:, 3:]), 1),
        lambda t, v: riffled(riffled(v, B, S) * riffled(t.p, B, S), S, B),
    ],
    "sequence": [
        lambda t, v: flat(v.view(B, S, N) * t.late),
        lambda t, v: v * t.late.repeat(B, 1),
        lambda t, v: flat((v.view(B, S, N).transpose(0, 1) * t.late[:, None]).transpose(0, 1)),
    ],
    "gate": [
        lambda t, v: F.silu(v),
        lambda t, v: v * torch.sigmoid(v),
        lambda t, v: torch.sigmoid(v.t()).t() * v,
    ],
    "casts": [
        lambda t, v: v * t.p,
        lambda t, v: v * t.p.bfloat16(),
        lambda t, v: v.bfloat16().float() * t.p,
        lambda t, v: (v.bfloat16() * t.p.bfloat16()).float(),
        lambda t, v: v * t.p.double().float(),
        lambda t, v: v * -(-t.p * 2) * 0.5,
        lambda t, v: v * torch.cat((t.p[:, :3].bfloat16(), t.p[:, 3:].bfloat16()), 1),
    ],
    "numbers": [
        lambda t, v: v * t.tab[t.pos].repeat(1, H),
        lambda t, v: v * t.tab[t.pos // 2 * 2 + t.pos % 2].repeat(1, H),
        lambda t, v: v * t.tab[t.pos - t.pos2 + t.pos2].repeat(1, H),
        lambda t, v: v * t.tab[t.pos.view(B, S)].view(T, D).repeat(1, H),
    ],
    "angles": [
        lambda t, v: v * torch.cos(t.pos[:, None] * t.g),
        lambda t, v: v * torch.cos(t.g * t.pos.unsqueeze(-1)),
        lambda t, v: torch.cos(torch.outer(t.pos, t.g)) * v,
        lambda t, v: torch.cos((t.pos.view(B, S, 1) * t.g).view(T, N)) * v,
    ],
}  # fmt: skip
CHANGED: dict[str, list[Block]] = {
    "same": [
        lambda t, v: -v,
        lambda t, v: v * 3 / 2,
        lambda t, v: v + 1e-6,
        lambda t, v: v.roll(1, -1),
        lambda t, v: v.roll(1, 0),
        lambda t, v: v.flip(0),
        lambda t, v: torch.cat(v.chunk(2, -1)[::-1], -1),
        lambda t, v: flat(heads(v).transpose(1, 2)),
        lambda t, v: heads(v).transpose(0, 1).reshape(T, N),
        lambda t, v: riffled(v, B, S),
        lambda t, v: riffled(riffled(v, B, S), B, S),
        lambda t, v: torch.cat((v[:, :3], v[:, 2:4], v[:, 5:]), 1),
        lambda t, v: F.pad(v, (1, 2))[:, 2:-1],
        lambda t, v: (v * t.g) / t.g2,
        lambda t, v: v + t.p - t.p2,
        lambda t, v: torch.cat((v[1:], v[:1])),
        lambda t, v: v.view(B, S, N).flip(1).reshape(T, N),
        lambda t, v: v.abs(),
        lambda t, v: v.mean(0, True).expand(T, N),
        lambda t, v: v[t.pos % T],
    ],
    "norm": [
        lambda t, v: normed(v, t.g2),
        lambda t, v: normed(v, t.g, 1e-5),
        lambda t, v: normed(v, 1 + t.g),
        lambda t, v: normed(v * 2, t.g),
        lambda t, v: flat(normed(heads(v), t.g.view(H, D))),
        lambda t, v: v / ((v.pow(2).mean(-1, True)).sqrt() + 1e-6) * t.g,
        lambda t, v: v * (v.square().mean(0, True) + 1e-6).rsqrt() * t.g,
        lambda t, v: F.layer_norm(v, [N], t.g, None, 1e-6),
        lambda t, v: v * (v.square().mean(-1, True) + 1e-6).pow(-1.5) * t.g,
    ],
    "rotation": [
        lambda t, v: flat(turned(heads(v), t.cos, t.sin, 1)),
        lambda t, v: flat(turned(heads(v), t.sin, t.cos)),
        lambda t, v: flat(turned(heads(v), t.cos, -t.sin)),
        lambda t, v: flat(turned(heads(v), t.cos, t.sin.roll(1, 0))),
        lambda t, v: flat(turned(heads(v), t.cos, t.sin.flip(1))),
        lambda t, v: flat(pairs_apart(heads(v), t.cos, t.sin)),
        lambda t, v: flat(turned(heads(v), t.cos, torch.cat((t.sin[:, :2], t.sin[:, :2]), 1))),
    ],
    "pairs": [
        lambda t, v: flat(as_complex(heads(v), t.cos, t.sin, -1.0)),
        lambda t, v: flat(as_complex(heads(v), t.sin, t.cos)),
        lambda t, v: flat(turned(heads(v), t.cos, t.sin)),
    ],
    "projection": [
        lambda t, v: v @ t.m2,
        lambda t, v: v @ t.m.t(),
        lambda t, v: torch.cat((v @ t.m[:, 3:], v @ t.m[:, :3]), -1),
        lambda t, v: v[:, :5] @ t.m[3:] + v[:, 5:] @ t.m[:3],
        lambda t, v: v[:, :5] @ t.m[:5] - v[:, 5:] @ t.m[5:],
        lambda t, v: v.flip(-1) @ t.m,
        lambda t, v: v @ t.m.abs(),
        lambda t, v: v @ (t.m * 1.001),
    ],
    "heads": [
        lambda t, v: flat(torch.einsum("thd,hed->the", heads(v), t.u)),
        lambda t, v: flat(torch.einsum("thd,hde->the", heads(v), t.u.flip(0))),
        lambda t, v: flat(torch.einsum("thd,hde->teh", heads(v), t.u)),
        lambda t, v: torch.cat([one @ t.u[0] for one in v.chunk(H, 1)], 1),
    ],
    "table": [
        lambda t, v: flat(heads(v) * t.tab2[t.pos][:, None]),
        lambda t, v: flat(heads(v) * t.tab[t.pos2][:, None]),
        lambda t, v: flat(heads(v) * t.tab[t.pos + 1][:, None]),
        lambda t, v: flat(heads(v) * t.tab.flip(1)[t.pos][:, None]),
        lambda t, v: flat(heads(v) * t.tab.flip(0)[t.pos][:, None]),
        lambda t, v: flat(heads(v) * t.tab.roll(1, 0)[t.pos][:, None]),
        lambda t, v: flat(heads(v) * t.tab[t.pos.flip(0)][:, None]),
        lambda t, v: flat(heads(v) * t.tab[t.pos.view(B, S).t().reshape(T)][:, None]),
        lambda t, v: flat(heads(v) * t.tab[torch.arange(T)][:, None]),
    ],
    "beside": [
        lambda t, v: v * t.p2,
        lambda t, v: v * t.p.flip(0),
        lambda t, v: v * t.p.roll(1, 0),
        lambda t, v: v * riffled(t.p, B, S),
        lambda t, v: riffled(riffled(v, B, S) * t.p, S, B),
        lambda t, v: riffled(v, B, S) * t.p,
        lambda t, v: flat((v.view(B, S, N).transpose(0, 1) * t.p.view(S, B, N)).transpose(0, 1)),
        lambda t, v: flat(v.view(B, S, N) * t.p.view(B, S, N)[:, :1]),
        lambda t, v: flat(v.view(B, S, N) * t.p.view(B, S, N)[:1]),
        lambda t, v: v * t.p[:1],
        lambda t, v: v * t.p[-1:],
    ],
    "sequence": [
        lambda t, v: v * t.late.repeat_interleave(B, 0),
        lambda t, v: flat(v.view(B, S, N) * t.late.flip(0)),
        lambda t, v: flat(v.view(B, S, N) * t.late[:1]),
    ],
    "gate": [
        lambda t, v: v * torch.sigmoid(-v),
        lambda t, v: v * torch.tanh(v),
        lambda t, v: v * torch.sigmoid(v * 2),
        lambda t, v: torch.sigmoid(v),
    ],
    "casts": [
        lambda t, v: v * ((t.p * 3).bfloat16() / 3),
        lambda t, v: v * (t.p * 3 / 3),
        lambda t, v: v * (t.p.bfloat16() + t.p2),
        lambda t, v: v * t.p.to(torch.int8),
        lambda t, v: v * t.p.to(torch.int32),
        lambda t, v: v * t.p.bool(),
        lambda t, v: v * t.p.to(torch.float8_e4m3fn).float(),
        lambda t, v: v * t.p.round(),
        lambda t, v: v * t.p.clamp(-9, 9),
        lambda t, v: v * (t.p + t.p2 - t.p2),
        lambda t, v: v * t.p.bfloat16().view(torch.int16),
        lambda t, v: v * t.p.bfloat16().view(torch.float16),
    ],
    "numbers": [
        lambda t, v: v * t.tab[t.pos // 2 * 2].repeat(1, H),
        lambda t, v: v * t.tab[t.pos // 2 * 2 + t.pos % 3].repeat(1, H),
        lambda t, v: v * t.tab[(t.pos + 1) // 2 * 2 + t.pos % 2].repeat(1, H),
        lambda t, v: v * t.tab[t.pos % 29].repeat(1, H),
        lambda t, v: v * t.tab[t.pos.clamp(max=11)].repeat(1, H),
        lambda t, v: v * t.tab[t.pos.to(torch.int8).long()].repeat(1, H),
        lambda t, v: v * t.tab[t.pos2].repeat(1, H),
        lambda t, v: v * t.tab[t.pos * 2].repeat(1, H),
        lambda t, v: v * t.tab[t.pos ^ 1].repeat(1, H),
        lambda t, v: v * t.tab[t.pos.view(S, B).t().reshape(T)].repeat(1, H),
        lambda t, v: v * t.tab[t.pos.float().round().long()].repeat(1, H),
    ],
    "angles": [
        lambda t, v: v * torch.sin(t.pos[:, None] * t.g),
        lambda t, v: v * torch.cos(t.pos2[:, None] * t.g),
        lambda t, v: v * torch.cos(t.pos[:, None] * t.g2),
        lambda t, v: v * torch.cos(t.pos[:, None].bfloat16() * t.g),
        lambda t, v: v * torch.cos((t.pos[:, None] * t.g).bfloat16()),
        lambda t, v: v * torch.cos(t.pos[:, None] * t.g * 2),
        lambda t, v: v * torch.cos(t.pos[:, None] * t.g.flip(0)),
        lambda t, v: v * torch.cos((t.pos + 1)[:, None] * t.g),
        lambda t, v: v * torch.cos(-t.pos[:, None] * t.g),
    ],
}


def chains() -> list[tuple[list[Block], list[Block], list[Block]]]:
    """Equal chains, and the first of them with one block changed. One norm at most: the square of a
    root is known to constructors, but not in the field.
    """
    rng, found = random.Random(0), []
    for _ in range(CHAINS):
        names = rng.sample(list(EQUAL), k=rng.randint(2, 4))
        one, other = ([rng.choice(EQUAL[name]) for name in names] for _ in range(2))
        changed, at = list(one), rng.randrange(len(names))
        changed[at] = rng.choice(CHANGED[names[at]])
        found.append((one, other, changed))
    return found


@cache
def values() -> tuple[dict[str, Value], Value]:
    """All programs as Values of one graph, and the activation that they begin with."""
    programs: dict[str, list[Block]] = {}
    for name, blocks in EQUAL.items():
        programs |= {f"{name} {k}": [block] for k, block in enumerate(blocks)}
        programs |= {f"{name} changed {k}": [block] for k, block in enumerate(CHANGED[name])}
    for number, chain in enumerate(chains()):
        for kind, blocks in zip(("one", "other", "changed"), chain, strict=True):
            programs[f"chain {number} {kind}"] = blocks
    shapes = INPUTS | MODEL
    given = {name: torch.rand(shape) + 0.1 for name, shape in shapes.items()}
    given |= {name: torch.randint(0, 12, (T,)) for name in NUMBERS}

    def run(*tensors: Tensor) -> list[Tensor]:
        named = Tensors()
        vars(named).update(zip(given, tensors, strict=True))
        x = named.a @ named.wx
        found = [x]
        for blocks in programs.values():
            v = x
            for block in blocks:
                v = block(named, v)
            found.append(v)
        return found

    with torch.no_grad():
        gm = make_fx(run)(*given.values())
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), given, strict=True):
        node.meta[ARGUMENT] = name not in MODEL
    graph = Graph(gm)
    x, *rest = [graph.readings[node] for node in gm.graph.output_node().args[0]]
    return dict(zip(programs, rest, strict=True)), x


def are_equal(one: str, other: str) -> bool:
    found, x = values()
    given = {x: token_layout((T,), (N,))}
    try:
        exact.prove(given, T, [Claim("rows", found[one], found[other])])
    except Departure:
        return False
    return True


@pytest.mark.parametrize("name", EQUAL)
def test_spellings_are_equal(name: str) -> None:
    wrong = [k for k in range(len(EQUAL[name])) if not are_equal(f"{name} 0", f"{name} {k}")]
    assert not wrong


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_changed_differs(name: str) -> None:
    first = f"{name} 0"
    wrong = [k for k in range(len(CHANGED[name])) if are_equal(first, f"{name} changed {k}")]
    assert not wrong


@pytest.mark.parametrize("number", range(CHAINS))
def test_chains(number: int) -> None:
    assert are_equal(f"chain {number} one", f"chain {number} other")
    assert not are_equal(f"chain {number} one", f"chain {number} changed")
