"""Calls torchair's internals. No other file does.

Two packages inside torch_npu share one design: ``torchair`` (GE graphs) and ``npugraph_ex``
(captured ACL graphs). Both offer ``get_compiler(config)``, a function from an AOT graph to a
compiled graph. So the FX graph can be changed before it, and the callable wrapped after it. The
attributes of the compiled object are private and differ by mode; ``compile_graph`` returns them in
one form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch.fx import GraphModule

from mla_fusion import releases
from mla_fusion.compat import DispatchKey, ge_converter
from mla_fusion.compile import offline
from mla_fusion.converters import registry

MODES = ("ge", "npugraph_ex")


@dataclass(frozen=True)
class Compiled:
    """Holds the result of torchair. Without a GE graph ``proto`` is None and ``text`` is ""."""

    fx: GraphModule
    proto: Any
    text: str
    runner: Any


def package(mode: str = "ge") -> Any:
    """Returns the compiler module of a mode: torchair's, or npugraph_ex's."""
    _prepare()
    name = "npugraph_ex" if mode == "npugraph_ex" else "torchair"
    import_module(name)  # a package that is loaded lazily has no submodules before
    return import_module(f"{name}.npu_fx_compiler")


@cache
def _prepare() -> None:
    """Raises UnsupportedRelease for a torchair that lacks functions; has torchair patch torch.

    torchair and npugraph_ex patch torch's dispatch alike, and only npugraph_ex looks whether that
    has been done. So torchair comes first. If npugraph_ex was used before, torchair's patch would
    raise, and is left out.
    """
    releases.require()
    offline.activate()
    import_module("torchair")
    if DispatchKey.AutogradPrivateUse1 in torch.ops.aten.to.other.py_kernels:
        vars(import_module("torchair._utils"))["register_matmul_backward_decomp"] = lambda: None
    module = import_module("torchair.npu_fx_compiler")
    module._get_merged_decompositions(module.CompilerConfig(), {})


def compiler_config(mode: str = "ge") -> Any:
    """Returns a new ``CompilerConfig`` for a mode."""
    return package(mode).CompilerConfig()


def default_decompositions() -> dict[Any, Any]:
    """Returns the decompositions that torchair passes to AOT autograd."""
    return dict(package()._get_merged_decompositions(compiler_config(), {}))


def backend(
    mode: str, config: Any, compiler: Callable[[GraphModule, list[Any]], Any]
) -> Callable[[GraphModule, list[Any]], Any]:
    """Returns torchair's backend for torch.compile, with ``compiler`` as its graph compiler."""
    module = package(mode)
    decompositions = module._get_merged_decompositions(config, {})

    def compile_dynamo_graph(gm: GraphModule, inputs: list[Any]) -> Any:
        # torchair calls AOT autograd itself, without this count, by which DDP's splitter decides
        # whether it may ask for fake results.
        torch._dynamo.utils.counters["aot_autograd"]["total"] += 1
        module._process_send_recv(gm, config)
        return module._compile_graph_with_aot(
            gm, compiler, inputs, config, decompositions, is_cache=False
        )

    return compile_dynamo_graph


def compile_graph(mode: str, config: Any, gm: GraphModule, inputs: list[Any]) -> Compiled:
    """Runs torchair's graph compiler (passes, converters, GE graph passes) on an AOT graph."""
    runner = package(mode).get_compiler(config)(gm, inputs).runner
    proto, text = None, ""
    if mode == "ge":
        utils = import_module("torchair._ge_concrete_graph.utils")
        proto, text = runner.graph._proto, str(utils.convert_to_pbtxt(runner.graph))
    return Compiled(runner.fx_graph, proto, text, runner)


def has_converter(target: Any) -> bool:
    """Returns True if torchair can convert calls of ``target``."""
    package("ge")
    converter = ge_converter(target)
    return converter is not None and not registry.only_raises(converter)
