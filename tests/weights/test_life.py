"""How long packed weights live, and that threads and forked processes may use them at once."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_fusion as mf
from mla_fusion.weights import cache
from tests.catalogue import base, prologues
from tests.exhaustive import one_in, pairs
from tests.harness import assert_no_worse, clones, eager, exact, flat

CONFIGS = {"copy": mf.Config(verify="off"), "counted": mf.Config(verify="off", updates="counted")}


pytestmark = pytest.mark.usefixtures("fresh")


def packed() -> int:
    """Bytes of packed weights that are alive, without looking for those that could go."""
    entries = list(cache._ENTRIES.values())
    return sum(entry.packed.nbytes for entry in entries if entry.packed is not None)


class Sharing(prologues.Neox):
    """A weight is a view of its packed form (W_dq), others are copies (rope columns in halves)."""


@pytest.mark.parametrize(("config", "inference"), pairs(CONFIGS, [False, True]))
def test_packed_weights_go_with_their_model(config: str, inference: bool) -> None:
    before = packed()
    model, args = Sharing(), base.paged_args()
    compiled = torch.compile(model, backend=mf.backend(CONFIGS[config]))
    with torch.inference_mode() if inference else torch.no_grad():
        for _ in range(2):
            compiled(*clones(args))
    assert packed() > before
    assert cache._collected in gc.callbacks
    del model, compiled
    gc.collect()
    assert packed() == before
    gc.collect()  # nothing is left to look for: an interrupt that comes in a callback is lost
    assert cache._collected not in gc.callbacks


@pytest.mark.parametrize("config", one_in(1, CONFIGS))
def test_the_first_calls_of_several_threads_at_once(config: str) -> None:
    args = base.paged_args()
    for _ in range(2):
        torch._dynamo.reset()
        model = Sharing()
        wanted = exact(model, args), eager(model, args)
        run = torch.compile(model, backend=mf.backend(CONFIGS[config]))
        together = threading.Barrier(4)
        found: list[Any] = []

        def call(
            run: Any = run, together: threading.Barrier = together, found: list[Any] = found
        ) -> None:
            given = clones(args)
            together.wait()
            try:
                with torch.no_grad():
                    found.append([run(*given), *given])
            except BaseException as error:  # is raised again below
                found.append(error)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        for values in found:
            if isinstance(values, BaseException):
                raise values
            assert_no_worse(*wanted, [*flat(values[0]), *values[1:]])


def test_a_forked_child_packs_while_a_thread_of_its_parent_does() -> None:
    model, args = Sharing(), base.paged_args()
    run = torch.compile(model, backend=mf.backend())
    with torch.no_grad():
        run(*clones(args))
    inside, over = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            inside.set()
            over.wait(60)
            return weight.clone()

    slow = cache.Packed(torch.fx.symbolic_trace(nn.Identity()))
    slow.program = Slow()  # type: ignore[assignment]
    thread = threading.Thread(target=slow.of, args=([torch.ones(8, 8)],))
    thread.start()
    assert inside.wait(60)
    child = os.fork()
    if child == 0:  # pragma: no cover
        status = 1
        torch.set_num_threads(1)  # those of its parent are not here
        try:
            with torch.no_grad():
                model.q_b_proj.weight.data = model.q_b_proj.weight.data.clone()
                run(*clones(args))  # packs
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + 60
    ended, status = 0, 1
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.05)
    over.set()
    thread.join()
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended and status == 0


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_collection_under_a_fake_mode_sweeps_as_ever() -> None:
    """It is whoever allocates then; what is asked of memory is no business of their mode."""
    model, args = Sharing(), base.paged_args()
    run = torch.compile(model, backend=mf.backend())
    with torch.no_grad():
        run(*clones(args))
    with FakeTensorMode():
        cache._collected("stop", {"generation": 2})
        gc.collect()
