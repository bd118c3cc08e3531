"""The axes of a spelling, what goes with what, and seeded sampling of distinct ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from . import absorbs, norms, projections, rotations, tables, writes
from . import prologue as p
from .prologue import Choices

AXES: dict[str, tuple[str, ...]] = {
    "tokens": tuple(p.LEADS),
    "heads": ("1", "2", "4"),
    "x": tuple(p.X_FORMS),
    "stored": ("out_in", "in_out"),
    "down": tuple(p.DOWN),
    "q_product": tuple(projections.PRODUCTS),
    "kv_product": tuple(projections.PRODUCTS),
    "up_product": tuple(projections.UP_PRODUCTS),
    "down_parts": tuple(projections.PARTS),
    "up_parts": tuple(projections.PARTS),
    "up": tuple(p.UP),
    "q_norm": tuple(norms.NORMS),
    "k_norm": tuple(norms.NORMS),
    "q_eps": tuple(p.EPS),
    "k_eps": tuple(p.EPS),
    "tables": tuple(tables.SOURCES),
    "key_tables": tuple(p.KEY_TABLES),
    "q_rotation": tuple(rotations.ROTATIONS),
    "k_rotation": tuple(rotations.ROTATIONS),
    "q_arrangement": tuple(rotations.ARRANGEMENTS),
    "k_arrangement": tuple(rotations.ARRANGEMENTS),
    "w_uk": tuple(absorbs.WEIGHTS),
    "absorb": tuple(absorbs.PRODUCTS),
    "latent_scale": tuple(p.LATENT_SCALES),
    "query_scale": tuple(p.QUERY_SCALES),
    "write": tuple(writes.WRITES),
    "slots": tuple(writes.SLOTS),
    "extra": tuple(p.EXTRAS),
    "outputs": tuple(p.OUTPUTS),
}

_GIVE_WAY = ("k_rotation", "outputs", "q_arrangement", "k_arrangement", "query_scale", "extra")
_NO_ROW_A_TOKEN = frozenset(("one_batch_heads_first", "flat_rows"))


def refused(choices: Mapping[str, str]) -> str:
    """Why the options do not go together, or ""."""
    halves = [choices[f"{side}_rotation"] in rotations.HALVES_OUT for side in "qk"]
    if halves[0] != halves[1]:
        return "query and key must leave RoPE in one layout"
    if rotations.width(choices["q_rotation"]) != rotations.width(choices["k_rotation"]):
        return "a model reads one form of its tables"
    if choices["write"] == "concatenated" and choices["outputs"] not in ("with_rows", "scores"):
        return "nobody would read the rows"
    arranged = {choices["q_arrangement"], choices["k_arrangement"]}
    if choices["tables"] == "shared_by_sequences" and arranged & _NO_ROW_A_TOKEN:
        return "these arrangements flatten the tokens, and the table has no row for each"
    if choices["query_scale"] == "before" and choices["extra"] in ("indexer", "query_latent"):
        return "the kernel scales c_q itself"
    return ""


def sample(seed: int) -> Iterator[Choices]:
    """Spellings without end. Options of an axis come in shuffled rounds, so that none is rare."""
    rng = random.Random(seed)
    decks: dict[str, list[str]] = {axis: [] for axis in AXES}
    while True:
        choices = {axis: _deal(decks[axis], options, rng) for axis, options in AXES.items()}
        while refused(choices):
            axis = rng.choice(_GIVE_WAY)
            choices[axis] = rng.choice(AXES[axis])
        yield choices


def _deal(deck: list[str], options: tuple[str, ...], rng: random.Random) -> str:
    if not deck:
        deck.extend(rng.sample(options, len(options)))
    return deck.pop()
