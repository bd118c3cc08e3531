"""``mf.lower``: lowers a function with the real torchair, without a device.

torch.compile captures the function over fake tensors on device npu. torchair runs its FX passes and
converters and, in mode "ge", its GE graph passes. The work stops before a device would load the
result.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.fx import Graph, GraphModule

from mla_fusion.compat import BackendCompilerFailed, OpOverload
from mla_fusion.compile import torchair_bridge
from mla_fusion.compile.boundary import fuse_for_torchair
from mla_fusion.compile.device_graph import CaptureError, stop, trace
from mla_fusion.compile.dynamo import naming, specialise
from mla_fusion.compile.hook import torchair_pass
from mla_fusion.config import Config
from mla_fusion.fx.kinds import count_operators, op_name
from mla_fusion.fx.walk import origin, views_and_model_casts
from mla_fusion.machine import compiling_for
from mla_fusion.meta.prolog import CACHES, V3, V3_FUNCTIONAL
from mla_fusion.report.report import Report
from mla_fusion.report.store import reports
from mla_fusion.report.text_tables import first_line

_CALL = f"npu::{V3.name}"
_CACHES = V3_FUNCTIONAL.places(*CACHES)


class LoweringError(RuntimeError):
    """Raised if a function cannot be lowered. ``operators`` names the operators without a GE
    converter.
    """

    def __init__(self, message: str, operators: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.operators = operators


@dataclass(repr=False)
class Lowering:
    """The stages of one lowered graph.

    mode               the mode of :func:`lower`
    fx_before          the AOT graph of torch.compile
    fx_after           the FX graph that torchair holds at the end (mode "npugraph_ex": after
                       re-inplace)
    fx_ops             how often each target occurs in ``fx_after``
    ge_ops             how often each operator type occurs in the optimised GE graph; empty in mode
                       "npugraph_ex"
    ge_text, ge_graph  that graph as pbtxt and as protobuf; "" and None in mode "npugraph_ex"
    report             the report of the fusion pass, or None if it did not run
    """

    mode: str
    fx_before: GraphModule
    fx_after: GraphModule
    fx_ops: Counter[str]
    ge_ops: Counter[str]
    ge_text: str
    ge_graph: Any
    report: Report | None = None

    def __repr__(self) -> str:
        operators = self.ge_ops or self.fx_ops
        return (
            f"<Lowering: mode {self.mode}, {sum(operators.values())} operators, report "
            f"{self.report!r}>"
        )

    def save(self, directory: str | Path) -> list[Path]:
        """Writes fx_before.txt, fx_after.txt and, if they exist, graph.pbtxt and report.json, and
        returns their paths.

        directory  is made if there is none
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        texts = {
            "fx_before.txt": self.fx_before.print_readable(print_output=False),
            "fx_after.txt": self.fx_after.print_readable(print_output=False),
            "graph.pbtxt": self.ge_text,
            "report.json": self.report.to_json() if self.report is not None else "",
        }
        paths = [folder / name for name, text in texts.items() if text]
        for path in paths:
            path.write_text(texts[path.name])
        return paths


def lower(
    module_or_fn: Callable[..., Any],
    *args: Any,
    mode: str = "ge",
    dynamic: bool = False,
    config: Config | None = None,
    hook: bool = False,
) -> Lowering:
    """Compiles one call of ``module_or_fn`` with the real torchair, and returns the stages.

    module_or_fn  a module or a function
    args        its arguments
    mode        "ge" for torchair's GE graph, "npugraph_ex" for the FX graph of the ACL-graph path.
    dynamic     as torch.compile's; tensors may also carry ``torch._dynamo.mark_dynamic``.
    config      options of the fusion pass; ``Config(enable=False)`` lowers the graph as it is.
    hook        run the pass through torchair's own hook, as ``mf.torchair_pass`` does: weights are
                packed inside the graph. By default it runs as in ``mf.backend``, which packs them
                outside.

    Tensors may lie on any device, meta included; nothing is allocated and the module stays as it
    is. No other thread may run compiled code meanwhile: torch drops it all, and can crash.

    Raises LoweringError for a graph break and for operators that torchair cannot convert,
    naming all of them.
    """
    if mode not in torchair_bridge.MODES:
        raise ValueError(f"mode must be one of {', '.join(torchair_bridge.MODES)}, got {mode!r}")
    for name, flag in (("dynamic", dynamic), ("hook", hook)):
        if flag not in (True, False, None):
            raise ValueError(f"{name} must be True or False, got {flag!r}")
    config = Config.given(config)
    at_boundary = config.enable and not hook
    options = torchair_bridge.compiler_config(mode)
    if config.enable and hook:
        options.post_grad_custom_pre_pass = torchair_pass(config)
    import_module("mla_fusion.converters").register()
    # errors are raised at the end: dynamo would wrap them beyond reading
    outcomes: list[Lowering | LoweringError] = []

    def compile_graph(dynamo: GraphModule, arguments: list[Any]) -> Any:
        """Compiles the graph of dynamo by torchair's backend."""
        if at_boundary:
            specialise(dynamo)
        name_inputs = naming(dynamo)

        def on_graph(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            """Compiles the AOT graph, and records the outcome."""
            if at_boundary:
                name_inputs(gm)
            # a copy over the same attributes; metadata stays on the nodes
            before = GraphModule(gm, copy.deepcopy(gm.graph))
            earlier = reports()[-1:]
            try:
                if at_boundary:
                    _, inputs, _ = fuse_for_torchair(gm, inputs, config, arguments, options)
                compiled = torchair_bridge.compile_graph(mode, options, gm, list(inputs))
            except Exception as error:
                outcomes.append(_lowering_error(mode, gm, error))
                return stop
            newest = reports()[-1:]
            report = newest[0] if newest and newest != earlier else None
            if report is not None and mode == "npugraph_ex":
                _correct_placements(report, compiled.fx.graph)
            ge_ops = Counter(op.type for op in getattr(compiled.proto, "op", ()))
            fx_ops = Counter(
                {
                    name.removeprefix("<built-in function ").rstrip(">"): count
                    for name, count in count_operators(compiled.fx).items()
                }
            )
            graphs = compiled.text, compiled.proto
            outcomes.append(Lowering(mode, before, compiled.fx, fx_ops, ge_ops, *graphs, report))
            return stop

        return torchair_bridge.backend(mode, options, on_graph)(dynamo, arguments)

    try:
        with compiling_for(config.machine.soc):
            trace(compile_graph, module_or_fn, args, device="npu", dynamic=dynamic)
    except CaptureError as error:
        raise LoweringError(str(error)) from error
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        raise LoweringError(f"torchair failed: {first_line(inner)}") from inner
    if not outcomes:
        raise LoweringError("torchair was given no graph")
    if isinstance(outcomes[-1], LoweringError):
        raise outcomes[-1]
    return outcomes[-1]


def _lowering_error(mode: str, gm: GraphModule, error: Exception) -> LoweringError:
    """Returns the error of a graph that torchair refuses, with the operators that it cannot
    convert.
    """
    # torchair declares a converter for most of ATen, and many of them only raise
    targets = (node.target for node in gm.graph.nodes if isinstance(node.target, OpOverload))
    refused = dict.fromkeys(
        str(target)
        for target in targets
        if mode == "ge" and not torchair_bridge.has_converter(target)
    )
    message = f"torchair failed on this graph: {first_line(error)}"
    if refused:
        message = (
            f"torchair has no GE converter for {', '.join(refused)}. If nothing is fused: "
            "mla_fusion.converters.register_unfused(), after mla_fusion.offline.activate(), adds "
            "those of index_put, index_copy and repeat_interleave"
        )
    outcome = LoweringError(message, tuple(refused))
    outcome.__cause__ = error
    return outcome


def _correct_placements(report: Report, lowered: Graph) -> None:
    """Corrects the placement of each fusion whose cache ``lowered`` copies as a whole.

    The pass emits a functional call and ``copy_``. torchair replaces both by a call that writes in
    place, unless its options forbid that, or nodes between the two run on another stream.
    """
    calls = [node for node in lowered.nodes if op_name(node).startswith(_CALL)]
    if len(calls) != len(report.fused):
        return  # the model has calls of its own: which call is a fusion's is unknown
    for place, (fusion, call) in enumerate(zip(report.fused, calls, strict=True)):
        if not op_name(call).endswith("_functional") or fusion.placement != "in place":
            continue
        caches = (origin(call.args[at], views_and_model_casts) for at in _CACHES)
        inputs = sorted(cache.name for cache in caches if cache.op == "placeholder")
        if inputs:
            placement = (
                f"written by the kernel, copied by copy_: the whole of {', '.join(inputs)} at "
                "every step"
            )
            report.fused[place] = replace(fusion, placement=placement)
