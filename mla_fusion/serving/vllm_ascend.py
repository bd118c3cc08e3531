"""The pass as an object for vLLM-Ascend's graph fusion manager.

    CompilationConfig(inductor_passes={"graph_fusion_manager": vllm_ascend_pass()})

vLLM wraps a plain function into a class that vLLM-Ascend's manager then refuses, so the pass has to
be an instance of vLLM's own ``VllmInductorPass``. If vLLM is not imported, the pass derives from
torch's ``CustomGraphPass``, with the same methods.

The manager's graph is executed as it is: no compiler follows. So the pass also does what torchair
would do: it lets the kernel write its caches in place, and packs weights once instead of at every
step.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

from torch.fx import Graph, GraphModule

from mla_fusion.compile import inductor_bridge
from mla_fusion.compile.hook import torchair_pass
from mla_fusion.compile.inplace import write_in_place
from mla_fusion.config import Config
from mla_fusion.serving.opaque import hidden_prologues
from mla_fusion.serving.prepack import pack_once

log = logging.getLogger("mla_fusion")

# newest first
_HOMES = ("vllm.compilation.passes.vllm_inductor_pass", "vllm.compilation.vllm_inductor_pass")


def vllm_ascend_pass(config: Config | None = None) -> Any:
    """Returns a pass object, which is called on an ``fx.Graph`` or its module and edits it.

    The object can be pickled and copied, as vLLM does with its configuration. Raises ValueError if
    ``Config.skip`` holds a predicate that is not a module-level function.
    """
    return _pass_class(_base())(config or Config())


class _GraphFusion:
    """The methods that the pass manager calls."""

    pass_name = "mla_fusion"

    def __init__(self, config: Config) -> None:
        # not vLLM's own __init__: it reads a VllmConfig, which does not exist yet when passes are
        # named
        self.fusion_config = config
        self.hook = torchair_pass(config)

    def __call__(self, graph: Graph | GraphModule) -> None:
        """Edits a graph in place. A prologue that does not fuse is a line in the report.

        Raises an error for a graph that cannot be read.
        """
        self.hook(graph)
        gm = graph.owning_module if isinstance(graph, Graph) else graph
        assert gm is not None  # the hook has refused it otherwise
        if inductor_bridge.runs(self):
            return  # a compiler follows, which does all else itself
        if write_in_place(gm.graph) + pack_once(gm, self.fusion_config):
            gm.graph.lint()
            gm.recompile()
        for line in hidden_prologues(gm):
            log.warning("no pass sees into this graph's attention: %s", line)

    def uuid(self) -> str:
        """Returns the key for compile caches: a digest of all that the graph depends on."""
        return self.hook.digest

    def is_applicable(self, shape: Any = None) -> bool:
        return True

    def is_applicable_for_range(self, compile_range: Any = None) -> bool:
        return True

    def __reduce__(self) -> tuple[Any, tuple[Config]]:
        return vllm_ascend_pass, (self.fusion_config,)


@cache
def _pass_class(base: type) -> type:
    return type("GraphFusion", (_GraphFusion, base), {"__doc__": _GraphFusion.__doc__})


def _base() -> type:
    """Returns vLLM's base class if vLLM is imported, else torch's.

    vLLM is imported wherever its pass manager runs.
    """
    for module in _HOMES if "vllm" in sys.modules else ():
        with suppress(ImportError, AttributeError):
            base: type = import_module(module).VllmInductorPass
            return base
    return inductor_bridge.pass_class()
