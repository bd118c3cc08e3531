"""Finds changes of weights that torch does not count, in rounds: a share of the bytes at a time.

``parameter.data.add_(..)``, a fused optimizer, a flat buffer of which the parameter is a part, and
every change of a tensor made under inference mode leave no trace but the content. A look
fingerprints one share of one weight, and compares it with the fingerprint of the bytes that were
packed. It waits for no device: a later step reads the outcome. A look costs the host more than all
else that a step does, so it is made at one step of several.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_fusion.modes import is_capturing, outside_modes
from mla_fusion.weights.source import Shares, Source

log = logging.getLogger("mla_fusion")
STEPS_A_LOOK = {"cpu": 64}
STEPS_A_LOOK_OF_OTHERS = 4
_SAID: set[str] = set()  # parameters that a warning has named


class Watched(NamedTuple):
    """A tensor that a weight was packed of.

    position  of the argument
    name      in the user's model
    """

    position: int
    source: Source
    name: str


class _Look(NamedTuple):
    """A share that was looked at.

    is_same  bool without axes, in host memory, once ``event`` is over
    event    None on a CPU
    """

    watched: Watched
    is_same: Tensor
    event: Any

    def is_over(self) -> bool:
        return self.event is None or bool(self.event.query())


class Rounds:
    """Rounds over the sources of one set of packed weights.

    previous  rounds over the same sources, which these continue
    """

    def __init__(self, watched: Sequence[Watched], previous: Rounds | None) -> None:
        self._shares = [
            (each, number) for each in watched for number in range(len(each.source.content))
        ]
        self._next = self._steps = 0
        if previous is not None and len(previous._shares) == len(self._shares):
            self._next, self._steps = previous._next, previous._steps
        kind = watched[0].source.content.device.type
        self._every = STEPS_A_LOOK.get(kind, STEPS_A_LOOK_OF_OTHERS)
        self._looks = deque[_Look]()
        self._turn = Lock()  # one of the threads that call the graph looks; the others do not wait

    @property
    def steps(self) -> int:
        """Steps of one round."""
        return len(self._shares) * self._every

    def step(self, args: Sequence[Any]) -> Watched | None:
        """Looks at the next share, if it is time. Returns a source that a look found changed."""
        self._steps += 1
        if self._steps % self._every or not self._turn.acquire(blocking=False):
            return None
        try:
            return self._look_on(args)
        finally:
            self._turn.release()

    def _look_on(self, args: Sequence[Any]) -> Watched | None:
        watched, number = self._shares[self._next]
        tensor = args[watched.position]
        if not is_capturing(tensor.device):
            self._next = (self._next + 1) % len(self._shares)
            with outside_modes():
                self._looks.append(_look(watched, number, tensor))
        while self._looks and self._looks[0].is_over():
            look = self._looks.popleft()
            if not look.is_same.tolist():  # reads host memory: no operator, no wait
                return look.watched
        return None


def _look(watched: Watched, number: int, tensor: Tensor) -> _Look:
    is_same = Shares(tensor).fingerprint(number) == watched.source.content[number]
    if is_same.device.type == "cpu":
        return _Look(watched, is_same, None)
    on_host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    on_host.copy_(is_same, non_blocking=True)
    event = torch.Event(is_same.device)
    event.record()
    return _Look(watched, on_host, event)


def warn_of_changes(changed: Sequence[Watched], calls: int) -> None:
    """Warns once for each parameter.

    calls  how many calls may have used the old weights
    """
    first = changed[0].name
    if first in _SAID:
        return
    _SAID.update(each.name for each in changed)
    others = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    log.warning(
        "%s%s has changed in a way that torch does not count (through .data, by a fused "
        "optimizer, in a flat buffer). Up to %d calls used the weight that was packed before; it "
        "is packed anew now. Call mla_fusion.refresh(model) after such updates.",
        first,
        others,
        calls,
    )
