"""What is compiled or exported with fused prologues is saved and loaded, or refused with advice."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import mla_fusion as mf
from mla_fusion.compile import offline
from mla_fusion.compile.backend import NotSaved
from tests.catalogue import Entry, prologues, select
from tests.exhaustive import one_in, pairs
from tests.harness import assert_no_worse, clones, eager, exact, flat


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- torch.export


@pytest.mark.parametrize(
    ("config", "decompose"), pairs([mf.Config(), mf.Config(staging="always")], [False, True])
)
@pytest.mark.parametrize("entry", one_in(3, [select("whole")[0], *select("export")]), ids=str)
def test_an_exported_program_fused_in_place_is_saved_and_loaded(
    entry: Entry, config: mf.Config, decompose: bool
) -> None:
    model, args = entry.model(), entry.args()
    with torch.no_grad():
        program = torch.export.export(model, clones(args))
    program = program.run_decompositions(None if decompose else {})
    before = [node.name for node in program.graph.find_nodes(op="output")[0].all_input_nodes]
    assert mf.fuse(program.graph_module, config).fused
    assert [
        node.name for node in program.graph.find_nodes(op="output")[0].all_input_nodes
    ] == before
    program.validate()
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded, given = torch.export.load(file), clones(args)
    assert any("npu_mla_prolog_v3" in str(node.target) for node in loaded.graph.nodes)
    with torch.no_grad():
        found = [*flat(loaded.module()(*given)), *given]
    assert_no_worse(exact(model, args), eager(model, args), found, entry.slack)


class Twice(prologues.PagedRotateHalf):
    """One value leaves the graph in two places, beside one that is read inside too."""

    def forward(self, x, cos, sin, kv_cache, kr_cache, slots):  # type: ignore[no-untyped-def,override]
        found = super().forward(x, cos, sin, kv_cache, kr_cache, slots)
        return found, found, kv_cache + 1


def test_outputs_that_are_one_value_keep_its_name() -> None:
    program = torch.export.export(Twice(), select("whole")[0].args()).run_decompositions({})
    assert mf.fuse(program.graph_module).fused
    program.validate()


# -- compile caches


def compiled(backend: object) -> object:
    return torch.compile(prologues.Neox().forward, backend=backend, fullgraph=True)  # type: ignore[arg-type]


@pytest.mark.skipif(
    not hasattr(compiled("eager"), "aot_compile"), reason="this torch has no aot_compile"
)
@pytest.mark.parametrize("backend", ["mla_fusion", mf.backend()], ids=["name", "backend"])
def test_ahead_of_time_compilation_says_what_to_use(backend: object) -> None:
    args = select("whole")[0].args()
    with (
        torch.no_grad(),
        pytest.raises(NotSaved, match=r"post_grad_custom_pre_pass.*torchair_pass\(\)"),
    ):
        compiled(backend).aot_compile((args, {}))  # type: ignore[attr-defined]


@pytest.mark.skipif(
    not hasattr(compiled("eager"), "aot_compile"), reason="this torch has no aot_compile"
)
@pytest.mark.exhaustive
def test_what_it_says_to_use_is_saved_and_loaded(tmp_path: Path) -> None:
    model, args = prologues.Neox(), select("whole")[0].args()
    options = {"post_grad_custom_pre_pass": mf.torchair_pass()}
    with torch.no_grad():
        run = torch.compile(model.forward, options=options, fullgraph=True)
        made = run.aot_compile((clones(args), {}))  # type: ignore[attr-defined]
        assert mf.reports()[-1].fused
        made.save_compiled_function(str(tmp_path / "model"))
        with (tmp_path / "model").open("rb") as file:
            loaded = torch.compiler.load_compiled_function(file)
        given = clones(args)
        found = [*flat(loaded(model, *given)), *given]
    assert_no_worse(exact(model, args), eager(model, args), found)


def test_torchairs_cache_says_what_to_use() -> None:
    offline.activate()
    import torchair

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(
        NotSaved,
        match=r"config.post_grad_custom_pre_pass = "
        r"mla_fusion.torchair_pass\(\)",
    ):
        torchair.inference.cache_compile(Model().forward, backend=mf.backend())
    assert not hasattr(mf.backend(), "keywords")


def test_the_backend_can_be_pickled() -> None:
    backend = mf.backend(mf.Config(verify="all"))
    assert pickle.loads(pickle.dumps(backend)) == backend
