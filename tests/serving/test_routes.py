"""Each route of `routes.py` fuses, and after ``mf.prepack`` packs by views alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import mla_fusion as mf
from mla_fusion.compile import hook
from mla_fusion.compile.offline import NpuNotAvailable
from mla_fusion.fx.kinds import op_name
from mla_fusion.machine import Machine
from mla_fusion.weights.cache import Packed
from tests.catalogue import base
from tests.exhaustive import one_in
from tests.harness import assert_no_worse, eager, exact
from tests.serving import routes
from tests.serving.routes import ROUTES, Going, Route
from tests.weights.own import OwnAbsorb

VIEWS = "t permute transpose view reshape _unsafe_view alias detach unsqueeze squeeze".split()
# memory stays, or (the cast) is asked to stay where it has the format already
FREE = {*(f"aten::{name}" for name in VIEWS), "npu::npu_format_cast"}


@pytest.fixture
def going(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Going]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    gc.collect()
    yield Going(OwnAbsorb(), base.paged_args(), tmp_path, monkeypatch)
    torch._dynamo.reset()


@pytest.mark.parametrize("route", one_in(6, ROUTES), ids=str)
def test_a_route_fuses(route: Route, going: Going) -> None:
    before = len(mf.reports())
    wanted = exact(going.model, going.args), eager(going.model, going.args)
    reached = route.go(going)
    assert mf.reports()[before:] and mf.reports()[before].fused
    if reached.results is not None:
        assert_no_worse(*wanted, reached.results, slack=1.2)
    if reached.text:
        assert "MlaPrologV3" in reached.text or "npu_mla_prolog_v3" in reached.text
        assert "TensorMove" not in reached.text


@pytest.mark.parametrize("route", one_in(3, ROUTES, first=1), ids=str)
def test_after_prepack_packing_is_views(route: Route, going: Going) -> None:
    assert mf.prepack(going.model, *going.args).bytes_copied == 0
    copied = copies(route, going)
    assert copied and not any(copied), copied


@pytest.mark.parametrize("name", ["torchair, GE", "the same on an NPU"])
def test_before_it_there_are_copies(name: str, going: Going) -> None:
    (route,) = (route for route in ROUTES if route.name == name)
    assert "aten::clone" in {step for steps in copies(route, going) for step in steps}


def copies(route: Route, going: Going) -> list[list[str]]:
    """Of each packing, inside of a graph or outside of it, the operators that are no views."""
    found: list[list[str]] = []
    usual, usual_packed = hook.fuse, Packed.__init__

    def fuse(gm: GraphModule, config: mf.Config) -> Any:
        report = usual(gm, config)
        found.append(steps_on_weights(gm))
        return report

    def packed(self: Packed, *args: Any, **given: Any) -> None:
        usual_packed(self, *args, **given)
        steps = [node for node in self.program.graph.nodes if node.op == "call_function"]
        found.append(sorted({*map(op_name, steps)} - FREE))

    going.patch.setattr(hook, "fuse", fuse)
    going.patch.setattr(mf, "fuse", fuse)
    going.patch.setattr(Packed, "__init__", packed)
    route.go(going)
    return found


def steps_on_weights(gm: GraphModule) -> list[str]:
    """Operators between weights and kernel that are no views."""
    (call,) = (
        node for node in gm.graph.nodes if op_name(node).startswith("npu::npu_mla_prolog_v3")
    )
    steps, found = [call.args[place] for place in (1, 2, 3, 4)], []
    while steps:
        step = steps.pop()
        found += [op_name(step)] if step.op == "call_function" else []
        steps += step.all_input_nodes
    return sorted(set(found) - FREE)


# -- torchair's cache


def test_a_cached_graph_takes_the_weights_of_now(going: Going) -> None:
    """Those of the model that it is loaded for: the file holds none."""
    code = routes.ge_cache(going).text
    assert "frozenInput" in code and not {"TensorMove", "Assign"} & set(code.split('"'))
    from torchair import npu_fx_compiler
    from torchair.inference._cache_compiler import CompiledModel

    taken: list[Any] = []

    def kernel(*args: Any) -> Any:
        taken.extend(args)
        raise NpuNotAvailable("the kernel")

    going.patch.setattr(
        npu_fx_compiler, "_compile_py_code", lambda code: SimpleNamespace(kernel=kernel)
    )
    (file,) = going.folder.rglob("compiled_module")
    decoder = routes.Decoder(OwnAbsorb())
    run = CompiledModel.load(str(file)).rebase(decoder, vars(routes), decoder.decode)
    routes.stopped(run, *going.args)
    assert {id(parameter) for parameter in decoder.parameters()} <= {id(tensor) for tensor in taken}


@pytest.mark.parametrize(
    "machine", [Machine("A2", "latest", ""), Machine("A3", "8.5", "")], ids=str
)
def test_a_graph_decided_for_another_machine_is_not_loaded(machine: Machine, going: Going) -> None:
    """torchair's key has neither chip nor CANN; the hook's literals have both."""
    mf.offline.activate()
    from torchair.inference._cache_compiler import CompiledModel

    def key() -> str:
        config = routes.ge_config(replace(going, config=mf.Config()))
        return str(CompiledModel.get_cache_bin(routes.Decoder(going.model).decode, config=config))

    here = key()
    assert key() == here
    going.patch.setattr("mla_fusion.config.settled", lambda soc, cann: machine)
    assert key() != here


# -- vllm_ascend_pass and its configuration

OPTIONS: dict[str, Any] = {
    "enable": False,
    "verify": "off",
    "cann": "8.5",
    "soc": "A2",
    "staging": "always",
    "kr_layout": "half",
    "targets": ("v3", "identity"),
    "skip": ("no.such.layer",),
    "updates": "every call",
    "slots": "checked",
    "strides": "exact",
    "strict": False,
}


def test_every_option_has_another_value_here() -> None:
    usual = mf.Config()  # strict in these tests, unless it is given
    assert set(OPTIONS) == set(vars(usual))
    assert not [name for name, value in OPTIONS.items() if getattr(usual, name) == value]


@pytest.mark.parametrize("name", one_in(3, list(OPTIONS)))
def test_the_manager_takes_every_option(name: str, going: Going) -> None:
    wanted = exact(going.model, going.args), eager(going.model, going.args)
    reached = routes.vllm_ascend(replace(going, config=mf.Config(**{name: OPTIONS[name]})))
    assert reached.results is not None
    assert_no_worse(*wanted, reached.results, slack=1.2)
    assert ("npu_mla_prolog_v3" in reached.text) == (name != "enable")
