"""The time of each stage, and what of torch's global state the pass runs under."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter

import torch


class Clock:
    """Adds the time since the last stop to a stage."""

    def __init__(self, timings: dict[str, float]) -> None:
        self.timings, self._last = timings, perf_counter()

    def stop(self, stage: str) -> None:
        now = perf_counter()
        self.timings[stage] = self.timings.get(stage, 0.0) + now - self._last
        self._last = now


@contextmanager
def torch_defaults() -> Iterator[None]:
    """float32 on the CPU: serving stacks change torch's default dtype and device, and probes and draws name neither."""
    dtype = torch.get_default_dtype()
    try:
        elsewhere = torch.get_default_device().type != "cpu"  # makes a tensor there
    except Exception:  # a device that this process has not
        elsewhere = True
    if dtype != torch.float32:
        torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu") if elsewhere else nullcontext():
            yield
    finally:
        if dtype != torch.float32:
            torch.set_default_dtype(dtype)


@contextmanager
def threads(wanted: int) -> Iterator[int]:
    """Run with so many threads; yields the usual number.

    Probes are small: a second thread gains nothing, and on a busy machine each operator waits for it. Changing
    the number costs milliseconds, so it is done once for the whole pass.
    """
    usual = torch.get_num_threads()
    if usual == wanted:
        yield usual
        return
    torch.set_num_threads(wanted)
    try:
        yield usual
    finally:
        torch.set_num_threads(usual)
