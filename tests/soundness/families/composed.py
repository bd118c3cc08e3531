"""Programs in which one memory, weight or table plays two roles, or a weight hangs on data."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.catalogue.base import DR, HCKV, HE

from ..inputs import ROWS, ordinary
from ..member import ALL, Family, attacks
from ..program import Named, Step, Style, prologue

Outputs = tuple[Tensor, ...]


def _with(**others: object) -> Step:
    """The prologue with inputs replaced by functions of all inputs."""

    def program(i: Named, style: Style) -> Outputs:
        return prologue({**_All(i), **{name: made(i) for name, made in others.items()}}, style)  # type: ignore[operator]

    return program


class _All(dict):  # type: ignore[type-arg]
    """Names that the prologue reads, through the recorder that tells which inputs a program has."""

    _WEIGHTS = "w_dq w_uq w_uk w_dkv_kr gamma_q gamma_kv"
    _OTHERS = "x positions all_cos all_sin inv_freq cos sin slots kv_cache kr_cache"

    def __init__(self, i: Named) -> None:
        names = f"{self._WEIGHTS} {self._OTHERS}".split()
        super().__init__({name: i[name] for name in names if name in i})


def _two_on_one_x(i: Named, style: Style) -> Outputs:
    """A second prologue writes the same caches at the same slots."""
    first = prologue(i, style)
    return *first, *prologue(
        {**_All(i), "w_dkv_kr": i["w_dkv_kr"] * 2, "w_uk": i["w_uk"].flip(0)}, style
    )


def _second_reads_first(i: Named, style: Style) -> Outputs:
    query, q_pe = prologue(i, style)
    x = i["x"] + query.flatten(1)[:, :HE]
    return query, q_pe, *prologue({**_All(i), "x": x}, style)


def _again_on_moved_slots(i: Named, style: Style) -> Outputs:
    first = prologue(i, style)
    return *first, *prologue({**_All(i), "slots": (i["slots"] + 1) % ROWS}, style)


def _old_rows_as_x(i: Named, style: Style) -> Outputs:
    """x is read from the cache after the write of another prologue."""
    first = prologue(i, style)
    rows = i["kv_cache"].view(-1, HCKV)[i["slots"]]
    return *first, *prologue({**_All(i), "x": torch.cat([rows, rows], -1)}, style)


def _cache_read_before_and_after(i: Named, style: Style) -> Outputs:
    before = i["kv_cache"].view(-1, HCKV)[i["slots"]].clone()
    return *prologue(i, style), before, i["kv_cache"].view(-1, HCKV)[i["slots"]] - before


def _rows_written_again(i: Named, style: Style) -> Outputs:
    found = prologue(i, style)
    i["kr_cache"].view(-1, DR)[i["slots"]] = i["kr_cache"].view(-1, DR)[i["slots"]] * 2
    return found


def _flipped_before(i: Named, style: Style) -> Outputs:
    i["kv_cache"].neg_()
    return prologue(i, style)


def _restored(i: Named, style: Style) -> Outputs:
    """The write is undone."""
    old = i["kv_cache"].clone()
    found = prologue(i, style)
    i["kv_cache"].copy_(old)
    return found


_ROLES: dict[str, Step] = {
    "one_memory_for_both_caches": _with(
        kr_cache=lambda i: i["kv_cache"].view(-1)[: ROWS * DR].view(32, 16, 1, DR)
    ),
    "overlapping_caches": _with(
        kr_cache=lambda i: i["kv_cache"].view(-1, DR)[8 : 8 + ROWS].view(32, 16, 1, DR)
    ),
    "one_weight_for_both_latents": _with(w_dkv_kr=lambda i: i["w_dq"][: HCKV + DR]),
    "tied_gammas": _with(gamma_kv=lambda i: i["gamma_q"][:HCKV]),
    "gamma_of_the_query_shifted": _with(gamma_kv=lambda i: i["gamma_q"][1 : HCKV + 1]),
    "w_uk_of_w_uq": _with(w_uk=lambda i: i["w_uq"].reshape(-1)[: 2 * 128 * 512].view(2, 128, 512)),
    "tables_from_cache": _with(
        cos=lambda i: i["kr_cache"].view(-1, DR)[: i["x"].shape[0]],
        all_cos=lambda i: i["kr_cache"].view(-1, DR).repeat(64, 1),
    ),
    "weights_from_cache": _with(w_uk=lambda i: i["kv_cache"].view(2, -1, HCKV)[:, :128]),
    "gamma_from_cache": _with(gamma_kv=lambda i: i["kv_cache"].view(-1, HCKV)[3]),
    "x_from_cache": _with(x=lambda i: i["kv_cache"].view(-1, HE)[: i["x"].shape[0]] + i["x"]),
    "gamma_of_x": _with(
        gamma_q=lambda i: i["gamma_q"] * (1 + i["x"].float().mean()).to(i["x"].dtype)
    ),
    "w_uk_of_x": _with(
        w_uk=lambda i: i["w_uk"] * (1 + i["x"].float().abs().amax()).to(i["x"].dtype)
    ),
    "w_dq_of_x": _with(w_dq=lambda i: i["w_dq"] + i["x"][:1]),
    "cos_of_x": _with(
        cos=lambda i: i["x"][:, :DR].float().cos().to(i["x"].dtype),
        all_cos=lambda i: i["all_cos"] * (1 + i["x"].float().mean()).to(i["x"].dtype),
    ),
    "cos_is_sin": _with(cos=lambda i: i["sin"], all_cos=lambda i: i["all_sin"]),
    "tables_swapped": _with(
        cos=lambda i: i["sin"],
        sin=lambda i: i["cos"],
        all_cos=lambda i: i["all_sin"],
        all_sin=lambda i: i["all_cos"],
    ),
    "slots_of_x": _with(slots=lambda i: (i["slots"] + (i["x"][:, 0].float() * 4).long()) % ROWS),
    "slots_of_cache": _with(
        slots=lambda i: (i["slots"] + i["kr_cache"].view(-1)[:1].long().abs()) % ROWS
    ),
    "two_prologues_on_one_x": _two_on_one_x,
    "second_reads_first": _second_reads_first,
    "again_on_moved_slots": _again_on_moved_slots,
    "old_rows_as_x": _old_rows_as_x,
    "cache_read_before_and_after": _cache_read_before_and_after,
    "rows_written_again": _rows_written_again,
    "cache_negated_before": _flipped_before,
    "write_undone": _restored,
}

_BY_POSITION: dict[str, Step] = {
    "positions_of_cache": _with(
        positions=lambda i: (
            i["positions"] // 2
            + i["kr_cache"].view(-1, DR)[: i["x"].shape[0], 0].mul(9).long().abs()
        )
    )
}


def _positions_by_float(p: Tensor, i: Named) -> Tensor:
    return (p.float() + 0.4999).round().long()


_TABLES: dict[str, Step] = {
    "one_row_for_all": lambda v, i: v[:1],
    "one_row_expanded": lambda v, i: v[:1].expand_as(v),
    "last_row_expanded": lambda v, i: v[-1:].expand_as(v),
    "rolled": lambda v, i: v.roll(1, 0),
    "paired": lambda v, i: torch.cat([v[:1], v[:-1]]),
    "first_row_kept": lambda v, i: torch.cat([torch.ones_like(v[:1]), v[1:]]),
}
_SOME = tuple(regime for regime in ALL if regime != "T1")


def _no_tokens(tokens: tuple[int, ...]) -> list[tuple[str, Named]]:
    return [("no tokens", ordinary(0, 5))]


FAMILIES = [
    Family(
        "composed.roles",
        "one memory, weight or table in two roles",
        attacks(_ROLES, ("program",), ALL)
        + attacks(_BY_POSITION, ("program",), ALL, ("paged", "blocks", "angles")),
    ),
    Family(
        "composed.tables",
        "tables with one row for all tokens, or rows of other tokens, for one of the rotations or "
        "both",
        attacks(
            _TABLES, ("cos", "q_cos", "k_sin", "k_cos+k_sin", "q_cos+q_sin+k_cos+k_sin"), _SOME
        ),
    ),
    Family(
        "composed.positions",
        "positions that went through floats",
        attacks(
            {"nudged": _positions_by_float},
            ("k_positions", "q_positions"),
            ALL,
            ("paged", "blocks"),
        ),
    ),
    Family(
        "composed.no_tokens",
        "a graph for any number of tokens is run with none",
        (),
        attacks({"plain": lambda v, i: v}, ("x",), ("sym", "dynamo")),
        extra=_no_tokens,
    ),
]
