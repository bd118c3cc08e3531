"""Run a model unfused, fused, and in float64, and compare."""

from __future__ import annotations

import copy
import inspect
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.graph import CodeGen

import mla_fusion as mf
from mla_fusion.compile import dynamo
from mla_fusion.compile.boundary import fuse_with_boundary
from mla_fusion.compile.device_graph import capture
from mla_fusion.fx import module_path
from mla_fusion.report.rejection import CODES, Rejection
from mla_fusion.tools.accuracy import largest_ratio


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process that decides by itself whether torch loads torch_npu."""
    kept = {
        name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"
    }
    return {**kept, **changes}


def clones(args: tuple[Tensor, ...], wide: bool = False) -> tuple[Tensor, ...]:
    return tuple(a.double() if wide and a.is_floating_point() else a.clone() for a in args)


def flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def eager(model: nn.Module, args: tuple[Tensor, ...]) -> list[Tensor]:
    """Outputs, then the arguments as the call left them."""
    with torch.no_grad():
        return [*flat(model(*args)), *args]


def compiled(
    model: nn.Module, args: tuple[Tensor, ...], backend: Any, dynamic: bool = False
) -> list[Tensor]:
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):
        return [
            *flat(torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(*args)),
            *args,
        ]


def fused(
    model: nn.Module, args: tuple[Tensor, ...], config: mf.Config | None = None
) -> Callable[..., Any]:
    """As the model compiled with ``mf.backend(config)``, without Dynamo and AOT autograd, most of
    its time. A call takes the weights that the model then holds.
    """
    gm, given = as_for_backend(model, args)
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    _, _, wrap = fuse_with_boundary(gm, inputs, config or mf.Config(), given)
    run = wrap(gm.forward)
    return lambda *values: run(*held_by(model).values(), *values)


def run_fused(
    model: nn.Module, args: tuple[Tensor, ...], config: mf.Config | None = None
) -> list[Tensor]:
    """As :func:`compiled` with ``mf.backend(config)``, by :func:`fused`."""
    with torch.no_grad():
        return [*flat(fused(model, args, config)(*args)), *args]


def fuse_only(config: mf.Config | None = None) -> Callable[..., Any]:
    """A backend that is ``mf.fuse`` alone, with no boundary around the graph."""
    from torch._functorch.aot_autograd import aot_module_simplified

    def compile_graph(gm: GraphModule, inputs: list[Any]) -> Any:
        def infer(graph: GraphModule, _: Any) -> Any:
            mf.fuse(graph, config)
            return graph.forward

        return aot_module_simplified(
            gm,
            inputs,
            fw_compiler=infer,
            inference_compiler=infer,
            keep_inference_input_mutations=True,
        )

    return compile_graph


def both_ways(
    model: nn.Module, args: tuple[Tensor, ...], config: mf.Config | None = None
) -> list[tuple[mf.Report, list[Tensor]]]:
    """The reports and results of one graph, fused as the backend does it, with a boundary, and by
    ``mf.fuse`` alone, which leaves nothing to fuse.
    """
    from torch._functorch.aot_autograd import aot_module_simplified

    fused: list[tuple[mf.Report, Callable[..., Any]]] = []
    held: list[Any] = []

    def infer(graph: GraphModule, inputs: list[Any]) -> Any:
        copied = Graph()
        copied.output(copied.graph_copy(graph.graph, {}))
        alone = GraphModule(graph, copied)
        report, _, wrap = fuse_with_boundary(graph, inputs, config or mf.Config(), held)
        fused.extend([(report, wrap(graph.forward)), (mf.fuse(alone, config), alone.forward)])
        assert not mf.fuse(alone, config).fused
        turns = iter(fused)
        return lambda *given: next(turns)[1](*given)

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        held.extend(inputs)
        kept = {"keep_inference_input_mutations": True}
        return aot_module_simplified(
            gm, inputs, fw_compiler=infer, inference_compiler=infer, **kept
        )

    torch._dynamo.reset()
    results, run = [], torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):
        for _ in range(2):
            given = clones(args)
            results.append([*flat(run(*given)), *given])
    return [(report, values) for (report, _), values in zip(fused, results, strict=True)]


def outcome(report: mf.Report) -> tuple[str, ...]:
    """Where each prologue was fused; if none was, the code of the first rejection."""
    if report.fused:
        return tuple(fusion.placement.partition(":")[0] for fusion in report.fused)
    return tuple(rejection.code for rejection in report.rejected[:1])


def graph_of(model: nn.Module, *args: Tensor, device: str = "cpu", **options: Any) -> GraphModule:
    with torch._dynamo.config.patch(specialize_float=True):
        return capture(model, *args, device=device, **options)[0]


def held_by(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def traced(
    model: nn.Module, given: tuple[Tensor, ...], dynamic: bool = False
) -> tuple[GraphModule, list[Tensor]]:
    """The functional graph and its first arguments, the parameters and buffers.

    But for views and paths of modules it is what :func:`graph_of` captures on device cpu, in a
    fourth of the time: neither Dynamo nor AOT autograd runs.
    """
    weights = held_by(model)
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=not dynamic)

    def fake(name: str, value: Tensor, varies: bool) -> Tensor:
        if not dynamic:
            return mode.from_tensor(value)
        free = [DimDynamic.DUCK if varies else DimDynamic.STATIC for _ in value.shape]
        context = StatelessSymbolicContext(dynamic_sizes=free)
        return mode.from_tensor(value, symbolic_context=context, source=ConstantSource(name))

    def call(values: list[Tensor], *args: Tensor) -> Any:
        return torch.func.functional_call(model, dict(zip(weights, values, strict=True)), args)

    functional = torch.func.functionalize(call, remove="mutations")
    held = [fake(f"weight{i}", value, False) for i, value in enumerate(weights.values())]
    args = [fake(f"arg{i}", value, True) for i, value in enumerate(given)]
    with torch.no_grad():
        gm = make_fx(functional, tracing_mode="symbolic" if dynamic else "fake")(held, *args)
    gm.graph.eliminate_dead_code()
    gm.graph.set_codegen(CodeGen())  # the inputs one by one, not as they were given
    gm.recompile()
    names = [*weights, *inspect.signature(model.forward).parameters]
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), names, strict=False):
        node.meta[module_path.NAME] = name
        node.meta[module_path.ARGUMENT] = name not in weights
    return gm, list(weights.values())


def as_for_backend(model: nn.Module, args: tuple[Tensor, ...]) -> tuple[GraphModule, list[Tensor]]:
    """The functional graph, where vectors of the model have been looked at, and all its inputs."""
    gm, weights = traced(copy.deepcopy(model), args)[0], list(held_by(model).values())
    for one in weights:
        torch._dynamo.mark_static_address(one)  # as Dynamo marks a model's own
    dynamo.mark_numbers(gm, [*weights, *args])
    return gm, [*weights, *args]


def traced_graph(model: nn.Module, *args: Tensor, dynamic: bool = False) -> GraphModule:
    """As :func:`graph_of`, for tests of what the pass reads, not of where graphs come from."""
    return traced(model, args, dynamic)[0]


def refused(gm: GraphModule, config: mf.Config | None = None) -> Rejection:
    """The first rejection of a graph that is left exactly as it was."""
    before = str(gm.graph)
    report = mf.fuse(gm, config)
    assert report.fused == [], str(report)
    assert str(gm.graph) == before
    rejection, *_ = report.rejected
    assert rejection.message.startswith(CODES[rejection.code.partition(":")[0]][0])
    assert rejection.nodes and rejection.remedy
    named, numbered = module_path.Labels(gm.graph), r"(?<![\w.])(?!npu_)\w*\d\w*(?![\w.])"
    names = {node.name: named.of(node) for node in gm.graph.nodes}
    found = re.findall(numbered, rejection.message)
    internal = [name for name in found if names.get(name, name) != name]
    assert not internal, f"{internal} in {rejection.message}"
    return rejection


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / max(float(b.double().norm()), 1e-30))


def assert_as_exact(
    model: nn.Module, args: tuple[Tensor, ...], fused: list[Tensor], slack: float = 1.1
) -> None:
    """Beside float64, the fused run errs no more than the unfused one (times slack)."""
    assert_no_worse(exact(model, args), eager(model, clones(args)), fused, slack)


def exact(model: nn.Module, args: tuple[Tensor, ...]) -> list[Tensor]:
    """As :func:`eager`, in float64."""
    return eager(copy.deepcopy(model).double(), clones(args, wide=True))


def assert_no_worse(
    exact: list[Tensor], unfused: list[Tensor], fused: list[Tensor], slack: float = 1.1
) -> None:
    """The fused values err no more than the unfused ones (times slack), but for chance; integers
    are the same.

    Chance is that of the numbers which either run has rounded: rows of a cache that nobody wrote
    are not among them.
    """
    assert len(exact) == len(unfused) == len(fused)
    for index, (want, plain, got) in enumerate(zip(exact, unfused, fused, strict=True)):
        if not want.is_floating_point():
            assert torch.equal(plain, got), index
            continue
        rounded = int(((plain.double() != want) | (got.double() != want)).sum())
        error, unfused_error = distance(got, want), distance(plain, want)
        limit = largest_ratio(max(rounded, 1), slack) * unfused_error
        assert error <= limit + 1e-12, (
            f"value {index}: error {error:.3e}, unfused {unfused_error:.3e}"
        )
