"""The hook in Inductor: it compiles, runs, and no cache gives a graph of another configuration."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from mla_fusion.examples.fuse_your_model import example
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import lowerings
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fusion as mf
from mla_fusion.compile import inductor_bridge
from mla_fusion.machine import Machine
from mla_fusion.reference import prolog
from mla_fusion.serving import vllm_ascend_pass
from tests.catalogue import prologues, select
from tests.harness import assert_no_worse, clones, eager, exact, flat

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def through_inductor(
    model: nn.Module, args: tuple[Tensor, ...], hook: Any, **options: Any
) -> list[Tensor]:
    """What a call gives, and the arguments behind it."""
    torch._dynamo.reset()
    given = clones(args)
    options = {"post_grad_custom_pre_pass": hook, **options}
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, options=options)(*given)
    return [*flat(found), *given]


def assert_fused_right(
    model: nn.Module, args: tuple[Tensor, ...], hook: Any, slack: float = 1.2
) -> None:
    before = len(mf.reports())
    found = through_inductor(model, args, hook, fx_graph_cache=False)
    (report,) = mf.reports()[before:]
    assert report.fused and not report.rejected, str(report)
    assert_no_worse(exact(model, args), eager(model, args), found, slack)


@pytest.mark.exhaustive  # a program that Inductor has compiled runs in test_saving.py each time
@pytest.mark.parametrize("make", [mf.torchair_pass, vllm_ascend_pass])
def test_the_example_of_the_readme(make: Any) -> None:
    model, args = example()
    assert_fused_right(model, tuple(args), make())


# -- operators


@pytest.mark.exhaustive
def test_a_model_that_aotinductor_has_packaged_runs(tmp_path: Path) -> None:
    """It hands every argument of the schema to an operator, so each has to stand in the call."""
    model, args = example()
    with torch.no_grad(), inductor_config.patch({"post_grad_custom_pre_pass": mf.torchair_pass()}):
        program = torch.export.export(model, args)
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
    assert len(mf.reports()[-1].fused) == 1
    given, wanted = clones(args), clones(args)
    with torch.no_grad():
        found, expected = torch._inductor.aoti_load_package(path)(*given), model(*wanted)
    for one, other in zip([*flat(found), *given], [*flat(expected), *wanted], strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)


X = torch.ones(3, 4)
CALLS = {  # of those that Inductor has no lowering for, once it has decomposed the graph
    aten._to_copy.default: lambda x: aten._to_copy.default(x, dtype=torch.bfloat16),
    aten.arange.default: lambda x: x + aten.arange.default(4, device=x.device),
    aten.index_select.default: lambda x: aten.index_select.default(x, 1, x[0, :2].long()),
}


@pytest.mark.parametrize("target", CALLS, ids=str)
def test_what_has_no_lowering_is_decomposed(target: Any) -> None:
    gm = make_fx(lambda x: CALLS[target](x).sum(0), tracing_mode="fake")(X)
    assert any(node.target is target for node in gm.graph.nodes)
    wanted = gm(X)
    inductor_bridge.finish(gm.graph)
    gm.graph.lint()
    gm.recompile()
    targets = {node.target for node in gm.graph.nodes if node.target not in lowerings}
    assert not targets & set(select_decomp_table())
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")
    found = gm(X)
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)


# -- caches


def test_inductor_takes_the_hook_for_one_of_its_own() -> None:
    hook = mf.torchair_pass()
    assert isinstance(hook, CustomGraphPass) and hook.uuid()
    assert pickle.loads(pickle.dumps(hook)) is hook


@pytest.mark.exhaustive
def test_the_hook_does_not_load_inductor() -> None:
    code = (
        "import mla_fusion as mf, sys; hook = mf.torchair_pass(); hook.uuid(); "
        "assert not [name for name in sys.modules if name.startswith('torch._inductor')]; "
        "from torch._inductor.custom_graph_pass import CustomGraphPass; assert isinstance(hook, "
        "CustomGraphPass)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_graphs_depend_on_is_in_the_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    import dis

    def keys() -> tuple[Any, str]:
        out = io.StringIO()
        dis.dis(hook, file=out)  # type: ignore[arg-type]  # as torchair reads it
        return hook.uuid(), out.getvalue()

    hook = mf.torchair_pass()
    seen = [keys()]
    for other in (mf.Config(verify="off"), mf.Config(soc="A2"), mf.Config(skip=("absorb.absent",))):
        seen.append((mf.torchair_pass(other).uuid(), ""))
    assert mf.torchair_pass(mf.Config()).uuid() == seen[0][0]
    for machine in (Machine("A2", "latest", ""), Machine("A3", "8.5", "")):
        monkeypatch.setattr("mla_fusion.config.settled", lambda soc, cann, found=machine: found)
        seen.append(keys())
    monkeypatch.setattr("mla_fusion.compile.hook._sources", lambda: "another version")
    seen.append(keys())
    assert len({uuid for uuid, _ in seen}) == len(seen)
    assert len({code for _, code in seen if code}) == 4


def predicate(candidate: Any) -> bool:
    return False


def test_predicates_keep_graphs_out_of_inductors_caches() -> None:
    """Their code may change between two processes."""
    assert mf.torchair_pass(mf.Config(skip=(predicate,))).uuid() is None


@pytest.mark.exhaustive  # each in half a minute
def test_no_cache_gives_the_graph_of_another_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, args = prologues.Neox(), select()[0].args()
    ran: list[Any] = []
    usual = prolog.format_of

    def counted(mode: int) -> Any:  # once a call of the kernel
        ran.append(mode)
        return usual(mode)

    monkeypatch.setattr(prolog, "format_of", counted)
    fusing, leaving = mf.Config(verify="off"), mf.Config(enable=False)

    def calls(config: mf.Config) -> tuple[int, int]:
        """Reports made, none where a cache gave the graph, and calls of the kernel."""
        before = len(mf.reports())
        torch._dynamo.reset()
        with inductor_config.patch(
            post_grad_custom_pre_pass=mf.torchair_pass(config), fx_graph_cache=True
        ):
            run = torch.compile(model, fullgraph=True)
            with torch.no_grad():
                run(*clones(args))  # compiles
                ran.clear()
                run(*clones(args))
        return len(mf.reports()) - before, len(ran)

    assert calls(fusing) == (1, 1)
    assert calls(leaving) == (1, 0)
    assert calls(fusing) == (0, 1)  # out of the cache
    assert calls(leaving) == (0, 0)
