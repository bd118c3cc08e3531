"""Every way from a model to a compiled graph, as data: `test_routes.py` goes each, docs/serving.md
lists them.

On a machine without an NPU a route ends where a device would be needed; ``reaches`` says where that
is.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.compat import aot_autograd
from mla_fusion.compile.offline import NpuNotAvailable
from mla_fusion.serving import vllm_ascend_pass
from tests.harness import clones, flat


@dataclass(frozen=True)
class Reached:
    """``results``: what a call gave, then its arguments; ``text``: the last readable graph."""

    results: list[Tensor] | None = None
    text: str = ""


@dataclass(frozen=True)
class Going:
    """What a route is given, and where its hook's graph is found afterwards."""

    model: nn.Module
    args: tuple[Tensor, ...]
    folder: Path
    patch: pytest.MonkeyPatch
    config: mf.Config = field(default_factory=mf.Config)


@dataclass(frozen=True)
class Route:
    """``packs``: "outside" the graph, once, or "inside" it, by operators."""

    name: str
    how: str
    reaches: str
    packs: str
    go: Callable[[Going], Reached]

    def __str__(self) -> str:
        return self.name


RUNS = "runs; same numbers"
GE = "compiled to the GE graph, which is read"


def called(run: Callable[..., Any], going: Going) -> Reached:
    given = clones(going.args)
    with torch.no_grad():
        found = run(*given)
    return Reached([*flat(found), *given])


def by_name(going: Going) -> Reached:
    return called(torch.compile(going.model, backend="mla_fusion", fullgraph=True), going)


def by_object(going: Going) -> Reached:
    return called(
        torch.compile(going.model, backend=mf.backend(going.config), fullgraph=True), going
    )


def on_npu(going: Going) -> Reached:
    return Reached(text=mf.lower(going.model, *going.args, config=going.config).ge_text)


class Decoder(nn.Module):
    """``cache_compile`` wants a method, by its name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def decode(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, kr: Tensor, slots: Tensor
    ) -> Any:
        return self.layer(x, cos, sin, kv, kr, slots)


def ge_config(going: Going) -> Any:
    import torchair

    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = mf.torchair_pass(going.config)
    config.experimental_config.frozen_parameter = True
    return config


def stopped(run: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Run up to where a device is needed."""
    # npu_get_npu_format of a fake tensor
    fake = torch._subclasses.fake_tensor.UnsupportedOperatorException
    with torch.no_grad(), suppress(NpuNotAvailable, fake):
        run(*args, **options)


def ge_hook(going: Going) -> Reached:
    return Reached(text=mf.lower(going.model, *going.args, hook=True, config=going.config).ge_text)


def npugraph_ex(going: Going) -> Reached:
    lowered = mf.lower(going.model, *going.args, mode="npugraph_ex", hook=True, config=going.config)
    return Reached(text=str(lowered.fx_after.graph))


def ge_cache(going: Going) -> Reached:
    model, args = mf.offline.on_npu(going.model, going.args)
    import torchair

    decoder = Decoder(model)  # type: ignore[arg-type]
    options: dict[str, Any] = {
        "config": ge_config(going),
        "dynamic": False,
        "cache_dir": str(going.folder),
    }
    stopped(torchair.inference.cache_compile(decoder.decode, **options), *args)
    (file,) = going.folder.rglob("compiled_module")
    return Reached(
        text=torchair.inference._cache_compiler.CompiledModel.load(str(file)).compiled_fx.py_code
    )


def npugraph_ex_cache(going: Going) -> Reached:
    model, args = mf.offline.on_npu(going.model, going.args)
    compiler = pytest.importorskip("npugraph_ex.npu_fx_compiler")
    inference = pytest.importorskip("torch_npu.npu.npugraph_ex.inference")
    written: list[str] = []

    def stop(code: str) -> None:
        written.append(code)
        raise NpuNotAvailable("a stream")

    going.patch.setattr(compiler, "_compile_py_code", stop)
    decoder = Decoder(model)  # type: ignore[arg-type]
    hook = {"post_grad_custom_pre_pass": mf.torchair_pass(going.config), "frozen_parameter": True}
    options: dict[str, Any] = {"options": hook, "dynamic": False, "cache_dir": str(going.folder)}
    with suppress(torch._dynamo.exc.BackendCompilerFailed):
        stopped(inference.cache_compile(decoder.decode, **options), *args)
    return Reached(text=written[-1])


def ge_export(going: Going) -> Reached:
    model, args = mf.offline.on_npu(going.model, going.args)
    import torchair

    options = {
        "model": model,
        "export_path": str(going.folder),
        "dynamic": False,
        "config": ge_config(going),
    }
    stopped(torchair.dynamo_export, *args, **options)
    return Reached()


def export(going: Going) -> Reached:
    with torch.no_grad():
        program = torch.export.export(going.model, clones(going.args)).run_decompositions({})
    mf.fuse(program.graph_module, going.config)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    found = called(loaded.module(), going)
    return Reached(found.results, str(loaded.graph))


def ahead_of_time(going: Going) -> Reached:
    options = {"post_grad_custom_pre_pass": mf.torchair_pass(going.config)}
    run: Any = torch.compile(going.model.forward, options=options, fullgraph=True)
    if not hasattr(run, "aot_compile"):
        pytest.skip("this torch has no aot_compile")
    with torch.no_grad():
        made = run.aot_compile((clones(going.args), {}))
    made.save_compiled_function(str(going.folder / "model"))
    with (going.folder / "model").open("rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    return called(lambda *given: loaded(going.model, *given), going)


def inductor(going: Going) -> Reached:
    from torch._dynamo.utils import counters

    going.patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(going.folder))
    options = {"post_grad_custom_pre_pass": mf.torchair_pass(going.config), "fx_graph_cache": True}
    called(torch.compile(going.model, options=options, fullgraph=True), going)
    torch._dynamo.reset()
    counters.clear()
    found = called(torch.compile(going.model, options=options, fullgraph=True), going)
    hits = (
        counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    )
    assert hits, "the second graph comes out of the cache"
    return found


def vllm_ascend(going: Going) -> Reached:
    fusion, graphs = vllm_ascend_pass(going.config), list[str]()

    def manager(gm: Any, _: Any) -> Any:
        fusion(gm)
        graphs.append(str(gm.graph))
        return gm.forward

    compiler = aot_autograd(
        fw_compiler=manager, inference_compiler=manager, keep_inference_input_mutations=True
    )
    return Reached(
        called(torch.compile(going.model, backend=compiler, fullgraph=True), going).results,
        graphs[-1],
    )


HOOK = "`config.post_grad_custom_pre_pass = mf.torchair_pass()`"
OPTION = '`options={"post_grad_custom_pre_pass": mf.torchair_pass()}`'
ROUTES = (
    Route(
        "torch.compile, by name", '`backend="mla_fusion"`', RUNS + " on a CPU", "outside", by_name
    ),
    Route(
        "torch.compile, by object",
        "`backend=mf.backend(config)`",
        RUNS + " on a CPU",
        "outside",
        by_object,
    ),
    Route(
        "the same on an NPU",
        "`mf.backend()`, which compiles through torchair",
        GE,
        "outside",
        on_npu,
    ),
    Route("torchair, GE", HOOK, GE, "inside", ge_hook),
    Route(
        "npugraph_ex",
        OPTION,
        "compiled to the FX graph that would be captured",
        "inside",
        npugraph_ex,
    ),
    Route(
        "torchair.inference.cache_compile",
        HOOK,
        "the cache file is written and loaded: its graph, and which weights it takes, are read",
        "inside",
        ge_cache,
    ),
    Route(
        "torch.npu.npugraph_ex.inference.cache_compile",
        OPTION,
        "compiled to the code that the cache holds; no file, since that code asks for a stream",
        "inside",
        npugraph_ex_cache,
    ),
    Route(
        "torchair.dynamo_export",
        HOOK,
        "compiled; the export itself needs a device",
        "inside",
        ge_export,
    ),
    Route(
        "torch.export",
        "`program = program.run_decompositions({})`, `mf.fuse(program.graph_module)`, then save",
        "saved, loaded; " + RUNS,
        "inside",
        export,
    ),
    Route(
        "torch.compile(..).aot_compile", OPTION, "saved, loaded; " + RUNS, "inside", ahead_of_time
    ),
    Route("Inductor and its caches", OPTION, RUNS + ", out of the cache too", "inside", inductor),
    Route(
        "vLLM-Ascend's pass manager",
        "`vllm_ascend_pass(config)`",
        RUNS + " under a stand-in",
        "once",
        vllm_ascend,
    ),
)
