"""``torch.compile(model, backend="mla_fusion")``: the pass in front of torchair, or of eager CPU
kernels.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from mla_fusion import releases
from mla_fusion.compat import is_saving
from mla_fusion.compile import offline
from mla_fusion.compile.boundary import fuse_for_torchair, fuse_with_boundary, warn_once
from mla_fusion.compile.dynamo import naming, specialise
from mla_fusion.config import Config
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
    """A backend for ``torch.compile``.

    config           options of the pass
    compiler_config  a torchair ``CompilerConfig``; by default torchair's own
    report           a folder to which the report of every graph is written as JSON and HTML; for
                     all entry points of a process, the environment variable ``MLA_FUSION_REPORT``
                     does the same

    For tensors on a device: AOT autograd, the pass, then torchair. Without: AOT autograd, the pass,
    then the graph itself, its kernel call run by the CPU reference, so that the same script runs
    anywhere. Graphs that record gradients are compiled unfused, with a report that says so.

    Of torch.compile's own words, ``options={"verify": "all"}`` sets fields of ``config`` for that
    model. On a device ``mode`` picks torchair's compiler: "reduce-overhead" npugraph_ex, others GE;
    a ``compiler_config`` holds a mode of its own and decides alone. Raises ValueError for an option
    that there is not; dynamo wraps it in its BackendCompilerFailed.

    What it compiles cannot be saved, by ``torch.compile(..).aot_compile`` or
    ``torchair.inference.cache_compile``: packed weights live outside the graph. The hook's can
    (:func:`mla_fusion.torchair_pass`).

    Raises UnsupportedRelease on an NPU whose torch_npu lacks what graphs are compiled through
    (docs/releases.md).
    """
    if _device_present():
        releases.require()
    chosen = Config.given(config)
    folder = None if report is None else Path(report).absolute()
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ValueError(f"report names a folder for reports, and {report} is a file")

    return Backend(chosen, compiler_config, folder)


@dataclass(frozen=True)
class Backend:
    """What :func:`backend` returns, for ``torch.compile(model, backend=..)``."""

    config: Config
    compiler_config: Any = None
    report: Path | None = None

    __name__ = "mla_fusion"

    def __call__(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        if is_saving():
            raise NotSaved(
                f"torch.compile(model, backend='mla_fusion').aot_compile: {_NOT_SAVED} {_INDUCTOR}"
            )
        given = _configured(self.config, options or {})
        specialise(gm)
        if not _device_present() or not any(_on_npu(value) for value in inputs):
            _package(
                mode, "no tensor lies on an NPU, so the graph runs by the CPU reference kernel"
            )
            return counting(self._with_cpu(gm, inputs, given), inputs)
        ignored = "the compiler_config given to mla_fusion.backend holds the mode"
        package = _package(mode, ignored if self.compiler_config is not None else "")
        return counting(self._with_torchair(gm, inputs, given, package), inputs)

    @property
    def keywords(self) -> Any:
        """What torchair's ``cache_compile`` asks of a backend, which has to be torchair's own."""
        raise NotSaved(
            "torchair.inference.cache_compile(backend=mla_fusion.backend()): "
            f"{_NOT_SAVED} {_TORCHAIR}"
        )

    def _with_cpu(
        self, gm: GraphModule, inputs: Sequence[Any], config: Config
    ) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        from mla_fusion.compat import aot_autograd

        name = naming(gm)

        def infer(graph: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            name(graph)
            with store.write_reports_into(self.report):
                _, _, wrap = fuse_with_boundary(graph, examples, config, inputs)
            return wrap(graph.forward)

        def decline(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            name(graph)
            with store.write_reports_into(self.report):
                _decline(graph, config)
            return make_boxed_func(graph.forward)  # lets go of what it has used

        compilers: dict[str, Any] = {
            "fw_compiler": decline,
            "bw_compiler": lambda graph, _: make_boxed_func(graph.forward),
            "inference_compiler": infer,
        }
        compile_with_aot = aot_autograd(**compilers, keep_inference_input_mutations=True)
        compiled: Callable[..., Any] = compile_with_aot(gm, inputs)
        return compiled

    def _with_torchair(
        self, gm: GraphModule, inputs: Sequence[Any], config: Config, mode: str
    ) -> Callable[..., Any]:
        from mla_fusion import converters
        from mla_fusion.compile import torchair_bridge

        converters.register()
        chosen = self.compiler_config or torchair_bridge.compiler_config(mode)
        compile_further = torchair_bridge.package(mode).get_compiler(chosen)

        name = naming(gm)

        def infer(graph: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            name(graph)
            with store.write_reports_into(self.report):
                _, examples, wrap = fuse_for_torchair(graph, examples, config, inputs, chosen)
            return wrap(compile_further(graph, examples))

        compiled: Callable[..., Any] = torchair_bridge.backend(mode, chosen, infer)(gm, [*inputs])
        return compiled


class NotSaved(AttributeError, RuntimeError):
    """Somebody wants to save what the backend compiles; the message says what to use instead."""


_NOT_SAVED = (
    "what this backend compiles cannot be saved, since its packed weights live outside the graph."
)
_INDUCTOR = (
    "Write torch.compile(model, options={'post_grad_custom_pre_pass': "
    "mla_fusion.torchair_pass()}).aot_compile(..); "
    "for torchair, torchair.inference.cache_compile with that hook in its config"
)
_TORCHAIR = (
    "Write config.post_grad_custom_pre_pass = mla_fusion.torchair_pass(); "
    "torchair.inference.cache_compile(.., config=config)"
)


def mla_fusion(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The registered backend: ``torch.compile(model, backend="mla_fusion")``."""
    return backend()(gm, inputs, mode=mode, options=options)


_PACKAGES = {
    "default": "ge",
    "max-autotune": "ge",
    "max-autotune-no-cudagraphs": "ge",
    "reduce-overhead": "npugraph_ex",
}


def _package(mode: str | None, why_not: str = "") -> str:
    """The package of torchair that a mode asks for; what cannot be honoured is said once."""
    if mode is None or mode == "default":
        return "ge"
    if why_not or mode not in _PACKAGES:
        why_not = why_not or f"there are {', '.join(_PACKAGES)}"
        warn_once("torch.compile(mode=%r) has no effect: %s", mode, why_not)
        return "ge"
    return _PACKAGES[mode]


def _configured(config: Config, options: Mapping[str, Any]) -> Config:
    """``config`` with some of its fields set anew. Raises ValueError for names that are no
    fields.
    """
    known = [field.name for field in fields(Config)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(
            f"torch.compile(options=..) of mla_fusion: no option {', '.join(map(repr, unknown))}; "
            f"there are {', '.join(known)}"
        )
    return replace(config, **options)


def _decline(graph: GraphModule, config: Config) -> None:
    """Report the layers of a graph with gradients, which stays as it is, that would fuse
    without.
    """
    said = explain(graph, replace(config, verify="off", strict=False), boundary=True)
    found: list[Fusion | Rejection] = [*said.fused]
    # what is kept for backward is read
    found += (one for one in said.rejected if one.code == "reader.latent")
    meaning = CODES["autograd"][0]
    layers = [
        Rejection("autograd", meaning, one.nodes, one.layer, one.source, score=1.0) for one in found
    ]
    report = Report(
        config,
        rejected=layers or [Rejection("autograd", meaning)],
        nodes_before=len(graph.graph.nodes),
    )
    for left in layers[:1]:
        log.warning(
            "no MLA prologue was fused (%d found, the first in %s): [autograd] %s %s",
            len(layers),
            left.layer,
            meaning,
            left.remedy,
        )
    store.keep_report(report)


def _on_npu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def _device_present() -> bool:
    """A real NPU, not the stand-ins of the offline runtime."""
    torch_npu = sys.modules.get("torch_npu")
    return torch_npu is not None and not offline.is_active() and bool(torch_npu.npu.is_available())
