"""The prologue as a function of a spelling: one option for each independent choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.catalogue.base import DR, HCKV, HCQ, D, attend

from . import absorbs, norms, projections, rotations, tables, writes
from .inputs import Named
from .rotations import Rotation
from .tables import Tables

LEADS = {"six": (6,), "two_by_three": (2, 3), "four": (4,), "one": (1,), "three_by_one": (3, 1)}
EPS = {"1e-6": 1e-6, "1e-5": 1e-5, "3e-7": 3e-7}

Choices = dict[str, str]


@dataclass(frozen=True)
class Step:
    """One spelled prologue under construction: what was chosen, and the inputs."""

    choices: Choices
    i: Named

    def weight(self, name: str) -> Tensor:
        """Stored [out, in], or [in, out] and seen transposed."""
        return self.i[name] if self.choices["stored"] == "out_in" else self.i[f"{name}_t"].t()

    def product(self, axis: str, x: Tensor, weight: Tensor) -> Tensor:
        return ALL["product"][self.choices[axis]](x, weight)

    def parts(self, axis: str, x: Tensor, sizes: list[int]) -> list[Tensor]:
        return ALL["parts"][self.choices[axis]](x, sizes)

    def norm(self, side: str, x: Tensor, gamma: str) -> Tensor:
        return ALL["norm"][self.choices[f"{side}_norm"]](
            x, self.i[gamma], EPS[self.choices[f"{side}_eps"]]
        )

    def rotate(self, side: str, x: Tensor, t: Tables) -> Tensor:
        arrangement = rotations.ARRANGEMENTS[self.choices[f"{side}_arrangement"]]
        rotation: Rotation = ALL["rotation"][self.choices[f"{side}_rotation"]]
        return arrangement(rotation, x, t).to(x.dtype)


def prologue(choices: Choices, i: Named) -> tuple[Tensor, ...]:
    """Run (or trace) the spelling; caches among ``i`` are written in place."""
    step = Step(choices, i)
    x = X_FORMS[choices["x"]](i["x"])
    q_raw, kv_raw, k_raw = DOWN[choices["down"]](step, x)
    c_q, c_kv = step.norm("q", q_raw, "gamma_q"), step.norm("k", kv_raw, "gamma_kv")
    q_nope, q_raw_pe = UP[choices["up"]](step, c_q)
    c_kv = LATENT_SCALES[choices["latent_scale"]](c_kv)
    q_tables = tables.SOURCES[choices["tables"]](i)
    k_tables = KEY_TABLES[choices["key_tables"]](step, q_tables)
    q_pe = step.rotate("q", q_raw_pe, q_tables)
    k_pe = step.rotate("k", k_raw.unsqueeze(-2), k_tables).squeeze(-2)
    query = ALL["absorb"][choices["absorb"]](q_nope, absorbs.WEIGHTS[choices["w_uk"]](i))
    query, q_pe = QUERY_SCALES[choices["query_scale"]](query, q_pe)
    extra = ALL["extra"][choices["extra"]](
        Values(i, q_raw, kv_raw, k_raw, c_q, c_kv, q_raw_pe, q_nope, k_pe)
    )
    kv, kr = ALL["write"][choices["write"]](
        i, writes.SLOTS[choices["slots"]](i["slots"]), c_kv, k_pe
    )
    return (*OUTPUTS[choices["outputs"]](query, q_pe, kv, kr), *extra)


# -- x


def _plain(x: Tensor) -> Tensor:
    return x


def _from_wide(x: Tensor) -> Tensor:
    """The residual stream is float32."""
    return (x.float() * 1.0).to(x.dtype)


def _normed(x: Tensor) -> Tensor:
    """Behind the layer's own input norm."""
    return F.rms_norm(x, (x.shape[-1],), None, 1e-12) * x.abs().mean(-1, keepdim=True)


X_FORMS = {"plain": _plain, "from_wide": _from_wide, "normed": _normed}


# -- down projections: c_q, c_kv and k_pe before norm and rotation

Down = Callable[[Step, Tensor], tuple[Tensor, Tensor, Tensor]]


def _merged(step: Step, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, kv, k = step.parts(
        "down_parts", step.product("q_product", x, step.weight("qkv_a")), [HCQ, HCKV, DR]
    )
    return q, kv, k


def _two(step: Step, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kv, k = step.parts("down_parts", step.product("kv_product", x, step.weight("kv_a")), [HCKV, DR])
    return step.product("q_product", x, step.weight("q_a")), kv, k


def _three(step: Step, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = step.product("q_product", x, step.weight("q_a"))
    kv = step.product("kv_product", x, step.weight("dkv"))
    return q, kv, step.product("kv_product", x, step.weight("kr"))


def _slices_of_one(step: Step, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weight = step.weight("qkv_a")
    kv, k = step.parts("down_parts", step.product("kv_product", x, weight[HCQ:]), [HCKV, DR])
    return step.product("q_product", x, weight[:HCQ]), kv, k


DOWN: dict[str, Down] = {
    "merged": _merged,
    "two": _two,
    "three": _three,
    "slices_of_one": _slices_of_one,
}


# -- the query's up projection: q_nope [.., N, D], q_pe [.., N, Dr]


def _joint(step: Step, c_q: Tensor) -> tuple[Tensor, Tensor]:
    q = _scaled(step, step.product("up_product", c_q, step.weight("q_b")))
    nope, rope = step.parts("up_parts", q.view(*q.shape[:-1], -1, D + DR), [D, DR])
    return nope, rope


def _heads_first(step: Step, c_q: Tensor) -> tuple[Tensor, Tensor]:
    q = _scaled(step, step.product("up_product", c_q, step.weight("q_b")))
    q = q.reshape(*q.shape[:-1], -1, D + DR).transpose(-2, -3)
    nope, rope = step.parts("up_parts", q, [D, DR])
    return nope.transpose(-2, -3), rope.transpose(-2, -3)


def _separate(step: Step, c_q: Tensor) -> tuple[Tensor, Tensor]:
    nope = _scaled(step, step.product("up_product", c_q, step.weight("uq")))
    rope = _scaled(step, step.product("up_product", c_q, step.weight("qr")))
    return nope.unflatten(-1, (-1, D)), rope.unflatten(-1, (-1, DR))


def _rope_first(step: Step, c_q: Tensor) -> tuple[Tensor, Tensor]:
    q = _scaled(step, step.product("up_product", c_q, step.weight("q_b"))).unflatten(
        -1, (-1, D + DR)
    )
    rope, nope = step.parts("up_parts", q, [DR, D])
    return nope, rope


def _all_nope_then_all_rope(step: Step, c_q: Tensor) -> tuple[Tensor, Tensor]:
    q = _scaled(step, step.product("up_product", c_q, step.weight("q_b")))
    heads = q.shape[-1] // (D + DR)
    nope, rope = step.parts("up_parts", q, [heads * D, heads * DR])
    return nope.reshape(*q.shape[:-1], heads, D), rope.reshape(*q.shape[:-1], heads, DR)


def _scaled(step: Step, q: Tensor) -> Tensor:
    return q * 1.5 if step.choices["query_scale"] == "before" else q


Up = Callable[[Step, Tensor], tuple[Tensor, Tensor]]
UP: dict[str, Up] = {
    "joint": _joint,
    "heads_first": _heads_first,
    "separate": _separate,
    "rope_first": _rope_first,
    "all_nope_then_all_rope": _all_nope_then_all_rope,
}


# -- scales

LATENT_SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda c_kv: c_kv,
    "times": lambda c_kv: c_kv * 3.46,
    "divided": lambda c_kv: c_kv / 2.0,
}
QUERY_SCALES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "none": lambda query, q_pe: (query, q_pe),
    "before": lambda query, q_pe: (query, q_pe),  # done where q is projected
    "after": lambda query, q_pe: (query * 0.125, q_pe * 0.125),
}


# -- tables of the key


def _shared(step: Step, t: Tables) -> Tables:
    return t


def _recomputed(step: Step, t: Tables) -> Tables:
    return tables.SOURCES[step.choices["tables"]](step.i)


KEY_TABLES = {"shared": _shared, "recomputed": _recomputed}


# -- who else reads


@dataclass(frozen=True)
class Values:
    """What an extra reader may read."""

    i: Named
    q_raw: Tensor
    kv_raw: Tensor
    k_raw: Tensor
    c_q: Tensor
    c_kv: Tensor
    q_raw_pe: Tensor
    q_nope: Tensor
    k_pe: Tensor


Extra = Callable[[Values], tuple[Tensor, ...]]
EXTRAS: dict[str, Extra] = {
    "nobody": lambda v: (),
    "indexer": lambda v: (F.linear(v.c_q, v.i["indexer"]),),
    "query_latent": lambda v: (v.c_q.flatten(),),
    "new_latents": lambda v: (v.c_kv.float().sum(-1),),
    "new_keys": lambda v: (v.k_pe.reshape(-1, DR).t(),),
    "both_new_rows": lambda v: (torch.cat([v.c_kv, v.k_pe], -1),),
    "old_rows": lambda v: (v.i["kv_cache"].view(-1, HCKV)[v.i["slots"]],),
    "hidden_state": lambda v: (v.i["x"].abs().sum(-1),),
}


# -- what leaves


def _direct(query: Tensor, q_pe: Tensor, kv: Tensor, kr: Tensor) -> tuple[Tensor, ...]:
    return query, q_pe


def _with_rows(query: Tensor, q_pe: Tensor, kv: Tensor, kr: Tensor) -> tuple[Tensor, ...]:
    return query, q_pe, kv.clone(), kr + 0


def _heads_in_front(query: Tensor, q_pe: Tensor, kv: Tensor, kr: Tensor) -> tuple[Tensor, ...]:
    return query.transpose(-2, -3), q_pe.transpose(-2, -3).contiguous(), kr.t()


def _scores(query: Tensor, q_pe: Tensor, kv: Tensor, kr: Tensor) -> tuple[Tensor, ...]:
    return (attend(query, q_pe, kv, kr),)


OUTPUTS = {f.__name__.lstrip("_"): f for f in (_direct, _with_rows, _heads_in_front, _scores)}

ALL: dict[str, Mapping[str, Callable[..., Any]]] = {
    "product": projections.UP_PRODUCTS,
    "parts": projections.PARTS,
    "norm": norms.NORMS,
    "rotation": rotations.ROTATIONS,
    "absorb": absorbs.PRODUCTS,
    "write": writes.WRITES,
    "extra": EXTRAS,
}
