"""``Config(slots="checked")``: the real slots of each call, tested before anything is written.

The kernel takes each slot at its word: outside its cache it would write memory that is not the
cache's, and of two tokens with one slot either row may stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from mla_fusion.compat import FakeTensor


class SlotError(ValueError):
    """A slot that the kernel must not be given; the message names the slot, its token and the
    cache.
    """


@dataclass(frozen=True)
class SlotCheck:
    """The slots of one kernel call, made of the caller's arguments.

    program     from the arguments at ``positions`` to the slots [T] or [B, S]; None where the one
                argument is they
    caches      of each cache: its name, what makes it of the caller's arguments, and the width of a
                row
    skips       a token whose slot is negative is left out, by the model as by the kernel
    """

    program: GraphModule | None
    positions: tuple[int, ...]
    caches: tuple[tuple[str, Callable[[Sequence[Any]], torch.Tensor], int], ...]
    skips: bool = False

    def __call__(self, args: Sequence[Any]) -> None:
        """Raises SlotError. Waits for a device: slots have to be read."""
        sources = [args[position] for position in self.positions]
        if any(isinstance(source, FakeTensor) for source in sources):
            return  # a dry run: there are no slots
        with torch.no_grad():
            slots = (
                (sources[0] if self.program is None else self.program(*sources)).reshape(-1).cpu()
            )
        if self.skips:
            # each its own, below every cache
            own = -1 - torch.arange(len(slots), device=slots.device)
            slots = torch.where(slots < 0, own, slots)
        for name, cache, width in self.caches:
            _test(slots, cache(args).numel() // width, name, self.skips)


def _test(slots: torch.Tensor, rows: int, name: str, skips: bool) -> None:
    outside = ((slots >= rows) if skips else (slots < 0) | (slots >= rows)).nonzero()
    if len(outside):
        token = int(outside[0])
        raise SlotError(
            f"slot {int(slots[token])} of token {token} lies outside {name}, which has {rows} rows"
        )
    order = slots.argsort(stable=True)
    again = (slots[order][1:] == slots[order][:-1]).nonzero()
    if len(again):
        first, second = (int(token) for token in order[int(again[0]) : int(again[0]) + 2])
        raise SlotError(
            f"slot {int(slots[first])} is given to token {first} and to token {second} of one "
            f"write to {name}, "
            f"which has {rows} rows"
        )
