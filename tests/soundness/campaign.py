"""Many members, over families in turn, judged on several processes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from multiprocessing import get_context

import torch

from mla_fusion.commit import verify
from mla_fusion.plan import planner
from mla_fusion.witness.compare import Outcome as Compared

from .families import FAMILIES
from .judge import judge
from .member import Member, Outcome

LOGGERS = ("mla_fusion", "torch._subclasses.fake_tensor", "torch._dynamo", "torch")


def members(count: int, seed: int, names: tuple[str, ...] = ()) -> list[Member]:
    """``count`` members (fewer where the families hold no more), distinct, the families in turn."""
    turns = [FAMILIES[name].sample(seed) for name in (names or FAMILIES)]
    found: list[Member] = []
    while turns and len(found) < count:
        for turn in list(turns):
            member = next(turn, None)
            if member is None:
                turns.remove(turn)
            else:
                found.append(member)
    return found[:count]


def controls(names: tuple[str, ...] = ()) -> list[Member]:
    return [member for name in (names or FAMILIES) for member in FAMILIES[name].control_members()]


def judged(given: list[Member], jobs: int = 1, without: str = "") -> Iterator[Outcome]:
    """An outcome for each, in order; ``without``: of OPINIONS, the one that is not asked."""
    _prepare(without)
    if jobs == 1:
        yield from map(judge, given)
        return
    started = {"initializer": _prepare, "initargs": (without,), "maxtasksperchild": 200}
    with get_context("spawn").Pool(jobs, **started) as pool:
        yield from pool.imap(judge, given, chunksize=2)


OPINIONS = ("field", "witness")  # exact arithmetic, and a run on drawn values


def _prepare(without: str) -> None:
    quiet()
    if without == "field":
        planner.prove = lambda *_: 0
    elif without == "witness":
        verify.compare = lambda *_, **more: Compared("not asked", (), "", ())


def quiet() -> None:
    """One thread a process; near misses would be logged by the thousand."""
    torch.set_num_threads(1)
    torch._logging.set_logs(all=logging.CRITICAL)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def grouped(outcomes: list[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    for name, found in itertools.groupby(sorted(outcomes, key=_family), key=_family):
        yield name, list(found)


def _family(outcome: Outcome) -> str:
    return outcome.member.family
