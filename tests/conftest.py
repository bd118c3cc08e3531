"""Settings that must stand before torch is imported."""

import functools
import gc
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tests share models and helpers: `from tests.catalogue import ..`.
ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
# One thread of compilation: the suite runs on small machines, and nothing here is compiled by
# Inductor.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Garbage is collected below, not after every compilation too.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# Of several test processes each keeps to one core.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if "OTHER_PROCESSOR" in os.environ:
    from tests import other_processor

    other_processor.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "of the tests the Kth share of N: each share is the same every time"
    parser.addoption("--share", metavar="K/N", help=text)


@pytest.hookimpl(trylast=True)  # behind what -m leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share = config.getoption("--share")
    if share is None:
        return
    turn, shares = map(int, share.split("/"))
    kept, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        is_of_share = zlib.crc32(item.nodeid.encode()) % shares == turn % shares
        (kept if is_of_share else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


def pytest_collection_finish() -> None:
    """What stands (torch, operators, cases) stays: seeking garbage in it is a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def what_stands_is_no_garbage() -> Iterator[None]:
    """The same for what tests of a file loaded: models of transformers, caches of torch's."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def guards_are_not_timed() -> Iterator[None]:
    """Dynamo flushes the processor's caches after each compilation, to log how long guards take."""
    from torch._dynamo import guards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def compilations_are_not_traced() -> Iterator[None]:
    """torch writes its trace where a handler stands; pytest gives one to each logger."""
    from torch._logging._internal import trace_log

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_log, "addHandler", lambda _: None)
        patch.setattr(trace_log, "handlers", [])
        yield


@pytest.fixture(autouse=True)
def no_reports_yet() -> Iterator[None]:
    """Tests count the reports of their own graphs, of which a process keeps only the newest 256."""
    from mla_fusion.report import store  # here: importing it imports torch

    store._REPORTS.clear()
    yield


@pytest.fixture(autouse=True, scope="session")
def lines_stay_whole() -> None:
    """What is printed does not depend on the terminal of the tests, handed on as COLUMNS."""
    os.environ.pop("COLUMNS", None)


@pytest.fixture(autouse=True, scope="session")
def defects_are_raised() -> Iterator[None]:
    """A defect that a serving job survives fails the test: ``Config.strict`` is on unless given."""
    from mla_fusion.config import Config

    made = Config.__init__

    @functools.wraps(made)
    def strict(self: Config, *args: object, **given: object) -> None:
        made(self, *args, **{"strict": True, **given})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Config, "__init__", strict)
        yield
