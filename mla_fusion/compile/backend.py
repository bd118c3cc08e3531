"""The backend of ``torch.compile``: runs the pass in front of torchair, or of CPU kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from mla_fusion import machine, releases
from mla_fusion.compat import is_saving
from mla_fusion.compile.boundary import fuse_for_torchair, fuse_with_boundary, warn_once
from mla_fusion.compile.dynamo import naming, specialise
from mla_fusion.config import Config
from mla_fusion.fx.kinds import check_graph_module
from mla_fusion.pipeline import explain
from mla_fusion.report import store
from mla_fusion.report.rejection import CODES, Rejection
from mla_fusion.report.report import Fusion, Report
from mla_fusion.weights.source import counting

log = logging.getLogger("mla_fusion")


def backend(
    config: Config | None = None,
    compiler_config: Any = None,
    report: str | PathLike[str] | None = None,
) -> Backend:
    """Returns a backend for ``torch.compile``.

    config           options of the pass
    compiler_config  a torchair ``CompilerConfig``; None: torchair's default
    report           a folder to which the report of every graph is written as JSON and HTML; for
                     all entry points of a process, the environment variable ``MLA_FUSION_REPORT``
                     does the same

    AOT autograd and the pass come first. Then torchair compiles the graph, if a tensor lies on an
    NPU. Otherwise the graph runs as it is, with the CPU reference kernel, so that the same script
    runs anywhere. Graphs that record gradients are compiled unfused, with a report that says so.

    ``torch.compile(options={"verify": "all"})`` sets fields of ``config`` for that model. On an
    NPU ``mode`` picks torchair's compiler: "reduce-overhead" picks npugraph_ex, others GE. A
    ``compiler_config`` has a mode, which takes precedence. An unknown option raises ValueError,
    which dynamo wraps in its BackendCompilerFailed.

    Compiled graphs cannot be saved by ``torch.compile(..).aot_compile`` or
    ``torchair.inference.cache_compile``: packed weights live outside the graph. Graphs that
    :func:`mla_fusion.torchair_pass` has fused can be saved.

    Raises UnsupportedRelease on an NPU whose torch_npu lacks what graphs are compiled through
    (docs/releases.md), and TypeError for a report that is no path.
    """
    if machine.has_npu():
        releases.require()
    chosen = Config.given(config)
    if report == "" or not (report is None or isinstance(report, (str, PathLike))):
        raise TypeError(f"report must be the path of a folder, got {report!r}")
    folder = None if report is None else Path(report).absolute()
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ValueError(f"report names a folder for reports, and {report} is a file")
    return Backend(chosen, compiler_config, folder)


@dataclass(frozen=True)
class Backend:
    """Compiles graphs for ``torch.compile(model, backend=..)``. :func:`backend` makes it."""

    config: Config
    compiler_config: Any
    report: Path | None

    __name__ = "mla_fusion"

    def __call__(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Returns the compiled graph. Raises NotSaved if torch is to save it, TypeError for what is
        no graph.
        """
        if is_saving():
            raise NotSaved(
                f"torch.compile(model, backend='mla_fusion').aot_compile: {_NOT_SAVED} {_INDUCTOR}"
            )
        check_graph_module(gm)
        config = _with_options(self.config, options or {})
        specialise(gm)
        tensors = (value for value in inputs if isinstance(value, torch.Tensor))
        on_npu = machine.has_npu() and any(value.device.type == "npu" for value in tensors)
        obstacle = ""
        if not on_npu:
            obstacle = "no tensor lies on an NPU, so the graph runs by the CPU reference kernel"
        elif self.compiler_config is not None:
            obstacle = "the compiler_config given to mla_fusion.backend holds the mode"
        package = _package(mode, obstacle)
        with store.write_reports_into(self.report):
            compiled = (
                self._with_torchair(gm, inputs, config, package)
                if on_npu
                else _with_cpu(gm, inputs, config)
            )
        return counting(compiled, inputs)

    @property
    def keywords(self) -> Any:
        """Raises NotSaved. torchair's ``cache_compile`` reads this of a backend."""
        raise NotSaved(
            "torchair.inference.cache_compile(backend=mla_fusion.backend()): "
            f"{_NOT_SAVED} {_TORCHAIR}"
        )

    def _with_torchair(
        self, gm: GraphModule, inputs: Sequence[Any], config: Config, package: str
    ) -> Callable[..., Any]:
        """Returns the graph, compiled by a package of torchair."""
        from mla_fusion import converters
        from mla_fusion.compile import torchair_bridge

        converters.register()
        options = self.compiler_config or torchair_bridge.compiler_config(package)
        compile_further = torchair_bridge.package(package).get_compiler(options)
        name_inputs = naming(gm)

        def infer(graph: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            """Returns a compiled inference graph."""
            name_inputs(graph)
            _, examples, wrap = fuse_for_torchair(graph, examples, config, inputs, options)
            return wrap(compile_further(graph, examples))

        return torchair_bridge.backend(package, options, infer)(gm, [*inputs])


def _with_cpu(gm: GraphModule, inputs: Sequence[Any], config: Config) -> Callable[..., Any]:
    """Returns the fused graph, which runs as it is."""
    from functorch.compile import make_boxed_func

    from mla_fusion.compat import aot_autograd

    name_inputs = naming(gm)

    def infer(graph: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Returns a fused inference graph."""
        name_inputs(graph)
        _, _, wrap = fuse_with_boundary(graph, examples, config, inputs)
        return wrap(graph.forward)

    def decline(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """Returns a graph that records gradients, unfused."""
        name_inputs(graph)
        _report_gradients(graph, config)
        return make_boxed_func(graph.forward)  # frees what it has used

    compilers = {
        "fw_compiler": decline,
        "bw_compiler": lambda graph, _: make_boxed_func(graph.forward),
        "inference_compiler": infer,
    }
    return aot_autograd(**compilers, keep_inference_input_mutations=True)(gm, inputs)


class NotSaved(AttributeError, RuntimeError):
    """The backend's graphs cannot be saved; the message says what to use instead."""


_NOT_SAVED = (
    "what this backend compiles cannot be saved, since its packed weights live outside the graph."
)
_INDUCTOR = (
    "Write torch.compile(model, options={'post_grad_custom_pre_pass': "
    "mla_fusion.torchair_pass()}).aot_compile(..); for torchair, "
    "torchair.inference.cache_compile with that hook in its config"
)
_TORCHAIR = (
    "Write config.post_grad_custom_pre_pass = mla_fusion.torchair_pass(); "
    "torchair.inference.cache_compile(.., config=config)"
)


def mla_fusion(gm: GraphModule, inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
    """Compiles a graph for ``torch.compile(model, backend="mla_fusion")``."""
    return backend()(gm, inputs, **settings)


_PACKAGES = {
    "default": "ge",
    "max-autotune": "ge",
    "max-autotune-no-cudagraphs": "ge",
    "reduce-overhead": "npugraph_ex",
}


def _package(mode: str | None, obstacle: str) -> str:
    """Returns the package of torchair that a mode picks. Warns once if the mode has no effect.

    obstacle  why no mode has an effect; "" if a known one has
    """
    if mode is None or mode == "default":
        return "ge"
    if not obstacle and mode not in _PACKAGES:
        obstacle = f"there are {', '.join(_PACKAGES)}"
    if obstacle:
        warn_once("torch.compile(mode=%r) has no effect: %s", mode, obstacle)
        return "ge"
    return _PACKAGES[mode]


def _with_options(config: Config, options: Mapping[str, Any]) -> Config:
    """Returns ``config`` with some fields replaced. Raises ValueError for an unknown name."""
    known = [field.name for field in fields(Config)]
    unknown = ", ".join(repr(name) for name in options if name not in known)
    if unknown:
        raise ValueError(
            f"torch.compile(options=..) of mla_fusion: no option {unknown}; "
            f"there are {', '.join(known)}"
        )
    return replace(config, **options)


def _report_gradients(graph: GraphModule, config: Config) -> None:
    """Reports the layers that only gradients keep from being fused."""
    trial = explain(graph, replace(config, verify="off", strict=False), boundary=True)
    # a value that is saved for the backward pass has another reader
    read = [rejection for rejection in trial.rejected if rejection.code == "reader.latent"]
    prologues: list[Fusion | Rejection] = [*trial.fused, *read]
    meaning = CODES["autograd"][0]
    layers = [
        Rejection("autograd", meaning, item.nodes, item.layer, item.source, score=1.0)
        for item in prologues
    ]
    report = Report(
        config,
        rejected=layers or [Rejection("autograd", meaning)],
        nodes_before=len(graph.graph.nodes),
    )
    if layers:
        log.warning(
            "no MLA prologue was fused (%d found, the first in %s): [autograd] %s %s",
            len(layers),
            layers[0].layer,
            meaning,
            layers[0].remedy,
        )
    store.keep_report(report)
