"""The time of each stage, and what the pass changes of torch's state, for its own thread alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter

import torch

from mla_fusion.modes import use_threads


class Clock:
    """Adds the time since the last stop to a stage."""

    def __init__(self, timings: dict[str, float]) -> None:
        self.timings, self._last = timings, perf_counter()

    def stop(self, stage: str) -> None:
        now = perf_counter()
        self.timings[stage] = self.timings.get(stage, 0.0) + now - self._last
        self._last = now


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """New tensors on the CPU, in this thread: serving stacks change torch's default device, and
    probes name none.
    """
    try:
        elsewhere = torch.get_default_device().type != "cpu"  # makes a tensor there
    except Exception:  # a device that this process has not
        elsewhere = True
    with torch.device("cpu") if elsewhere else nullcontext():
        yield


@contextmanager
def threads(wanted: int) -> Iterator[int]:
    """Run this thread's operators on so many threads; yields the usual number. Other Python threads
    keep theirs.

    Probes are small: a second thread gains nothing, and on a busy machine each operator waits for
    it.
    """
    usual = torch.get_num_threads()
    if usual == wanted or not use_threads(wanted):
        yield usual
        return
    try:
        yield usual
    finally:
        use_threads(usual)
