"""torch.compile's own words, for the backend by its name and as a function."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mla_fusion.examples.fuse_your_model import example
from torch import Tensor

import mla_fusion as mf
from mla_fusion.compile import backend as backend_module
from tests.exhaustive import one_in, pairs


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    backend_module.warn_once.cache_clear()
    yield
    torch._dynamo.reset()


def model() -> torch.nn.Module:
    return example()[0]


def given(tokens: int = 4) -> tuple[Tensor, ...]:
    *inputs, slots, kv_cache, kr_cache = example()[1]
    repeated = (tensor.repeat(-(-tokens // 4), 1)[:tokens] for tensor in inputs)
    slots = torch.arange(3, 3 * tokens + 3, 3) if tokens != 4 else slots
    return *repeated, slots, kv_cache, kr_cache


@torch.no_grad()
def call(run: Any, tokens: int = 4) -> mf.Report:
    """One call, beside an eager one of the same model; the newest report."""
    args, other = given(tokens), given(tokens)
    for found, wanted in zip(run(*args), model()(*other), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2**-5, atol=2**-4)
    for found, wanted in zip(args[-2:], other[-2:], strict=True):
        torch.testing.assert_close(found, wanted, rtol=2**-5, atol=2**-4)
    return mf.reports()[-1] if mf.reports() else mf.Report(mf.Config())


@pytest.mark.parametrize(("by_name", "dynamic"), pairs([True, False], [None, True]))
def test_dynamic_and_fullgraph(by_name: bool, dynamic: bool | None) -> None:
    backend = "mla_fusion" if by_name else mf.backend()
    report = call(torch.compile(model(), backend=backend, dynamic=dynamic, fullgraph=bool(dynamic)))
    assert len(report.fused) == 1, str(report)


def test_options_are_fields_of_the_configuration() -> None:
    report = call(
        torch.compile(model(), backend="mla_fusion", options={"staging": "always", "verify": "off"})
    )
    assert report.config == mf.Config(staging="always", verify="off")
    assert report.fused[0].placement.startswith("staged")


def test_options_are_merged_over_the_given_configuration() -> None:
    chosen = mf.backend(mf.Config(staging="always"))
    assert call(
        torch.compile(model(), backend=chosen, options={"verify": "off"})
    ).config == mf.Config(staging="always", verify="off")
    torch._dynamo.reset()
    assert call(torch.compile(model(), backend=chosen)).config == mf.Config(staging="always")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"stagging": "always"}, r"no option 'stagging'; there are enable, verify, .*slots"),
        (
            {"staging": "sometimes"},
            r"Config.staging must be one of auto, always, never, got "
            r"'sometimes'",
        ),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    run = torch.compile(model(), backend="mla_fusion", options=options)
    with pytest.raises(Exception, match=message) as caught, torch.no_grad():
        run(*given())
    assert isinstance(
        caught.value.__cause__ or caught.value,
        (ValueError, torch._dynamo.exc.BackendCompilerFailed),
    )


def test_the_default_mode_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    assert call(torch.compile(model(), backend="mla_fusion", mode="default")).fused
    assert not caplog.records


MODES = ["reduce-overhead", "max-autotune", "fastest", "max-autotune-no-cudagraphs"]


@pytest.mark.parametrize("mode", one_in(2, MODES))
def test_what_a_mode_cannot_do_is_said_once(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mla_fusion"):
        for _ in range(2):
            torch._dynamo.reset()
            assert call(torch.compile(model(), backend="mla_fusion", mode=mode)).fused
    (record,) = [
        record for record in caplog.records if "torch.compile(mode=" in record.getMessage()
    ]
    assert mode in record.getMessage() and "has no effect" in record.getMessage()


# -- stances


def test_forced_eager_compiles_nothing() -> None:
    run = torch.compile(model(), backend="mla_fusion")
    with torch.compiler.set_stance("force_eager"):
        call(run)
    assert not mf.reports()
    assert call(run).fused


def test_eager_on_recompile() -> None:
    run = torch.compile(model(), backend="mla_fusion", dynamic=False)
    call(run)
    with torch.compiler.set_stance("eager_on_recompile"):
        call(run)
        call(run, tokens=7)
    assert len(mf.reports()) == 1
    call(run, tokens=7)
    assert len(mf.reports()) == 2


def test_fail_on_recompile() -> None:
    run = torch.compile(model(), backend="mla_fusion", dynamic=False)
    call(run)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            call(run)
        with pytest.raises(RuntimeError, match="recompile"):
            call(run, tokens=7)
    assert len(mf.reports()) == 1


def test_the_backend_takes_a_graph_module() -> None:
    with pytest.raises(TypeError, match="got Linear; a module is compiled"):
        mf.backend()(torch.nn.Linear(2, 2), [])
