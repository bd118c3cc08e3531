"""Measures the time of each stage, and sets threads and default device for the pass.

``pipeline.py`` runs all stages inside these settings. They hold for the thread of the pass only.
"""

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
        """Adds the time since the last stop to ``stage``, in seconds."""
        now = perf_counter()
        self.timings[stage] = self.timings.get(stage, 0.0) + now - self._last
        self._last = now


@contextmanager
def default_device_cpu() -> Iterator[None]:
    """Makes new tensors CPU tensors in this thread.

    Serving stacks change torch's default device, and probes name no device.
    """
    try:
        is_elsewhere = torch.get_default_device().type != "cpu"  # makes a tensor on that device
    except Exception:  # this process does not have the device
        is_elsewhere = True
    with torch.device("cpu") if is_elsewhere else nullcontext():
        yield


@contextmanager
def use_cpu_threads(count: int) -> Iterator[int]:
    """Runs this thread's operators on ``count`` threads. Yields the usual number.

    Other Python threads keep theirs. Probes are small, so a second thread gains nothing. On a busy
    machine each operator would wait for it.
    """
    usual = torch.get_num_threads()
    is_changed = usual != count and use_threads(count)
    try:
        yield usual
    finally:
        if is_changed:
            use_threads(usual)
