"""The key's side of prologues, for a target that needs no query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mla_fusion.fx.shrink import Shrink
from mla_fusion.fx.tokens import Tokens
from mla_fusion.match.candidate import Candidate, KeyHalf, KeySide

_ALTERNATIVES = 7  # of one latent that are tried where the first pair has no plan


def of(
    keys: Sequence[KeySide], used: Sequence[KeySide], shrink: Shrink | None, tokens: Tokens
) -> tuple[KeyHalf, ...]:
    """Each latent with a rotated key, of the same product if there is one; other pairs of the two
    are alternatives.

    Nothing of ``used``, which other candidates have.
    """
    found = []
    left = [
        key
        for key in keys
        if key.rope is not None and not any(_share(key, other) for other in used)
    ]
    left.sort(key=_is_unlikely)
    while left:
        pairs = [key for key in left if _share(key, left[0])]
        left = [key for key in left if key not in pairs]
        halves = [
            KeyHalf(
                key=key, shrink=shrink, tokens=tokens.among((key.down.node, key.down_rope.node))
            )
            for key in pairs[: _ALTERNATIVES + 1]
        ]
        found.append(replace(halves[0], others=tuple(halves[1:])))
    return tuple(found)


def of_whole(item: Candidate) -> tuple[KeyHalf, ...]:
    """That of a whole prologue, as far as plain nodes make it and something rotates."""
    keys = [one.key for one in (item, *item.others) if one.key.cos]
    return of(keys, (), item.shrink, item.tokens)[:1]


def _share(a: KeySide, b: KeySide) -> bool:
    """Is one latent, or one rotated key, a part of both?"""
    latent = a.latent is b.latent and bool(set(a.columns) & set(b.columns))
    return latent or (a.rope is not None and b.rope is not None and a.rope.node is b.rope.node)


def _is_unlikely(key: KeySide) -> tuple[bool, bool]:
    """For sorting: what lies side by side belongs together, and a multiple of a norm is read behind
    the norm.
    """
    return key.down.node is not key.down_rope.node, key.scale != 1.0
