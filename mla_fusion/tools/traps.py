"""Known traps on the way to a fused graph: those that can be seen from here, and those that need
saying.

Each is one line: what it is in this environment, and what to do. Facts from torchair's and
torch_npu's sources.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import textwrap
from importlib import import_module
from typing import Any

import torch

from mla_fusion._autoload import cann_location, torch_npu_installed
from mla_fusion.compat import schema_of, specialises_floats


def survey(usable: bool) -> dict[str, str]:
    """Name of the trap -> what about it. ``usable``: can torchair be imported and asked?"""
    found = {
        "torch.compile(dynamic=True)": _runtime_epsilon(),
        "torchair's compile cache": (
            "its key is the hook's code: it cannot tell two instances, partials or lambdas from "
            "each other; give it mf.torchair_pass(config) itself"
        ),
        "streams": (
            "a prologue whose nodes carry different stream labels is refused (stream.mixed), by "
            "torchair's own "
            "patterns too; keep it on one stream"
        ),
        "caches in GE mode": (
            "a cache input with a reader besides the kernel costs two copies of it a step; "
            "`mla-fusion inspect` on dynamo_optimized_* shows them"
        ),
        "caches in npugraph_ex mode": (
            "the kernel writes in place only if each cache is a graph input itself, not a view, "
            "and no two caches share storage"
        ),
        "graph_dump type py": "written before GE's passes: copies that it shows may be gone; look "
        "at pbtxt instead",
    }
    if torch_npu_installed() and cann_location() is None:
        found["import torch"] = _autoload()
    if importlib.util.find_spec("vllm_ascend") is not None:
        found["vllm-ascend"] = (
            "vllm::mla_forward is opaque: no pass sees the prologue inside; its npugraph_ex mode "
            "never calls "
            "pass managers"
        )
    return {**found, **(_of_torchair() if usable else {})}


def _runtime_epsilon() -> str:
    if specialises_floats():
        return "specialize_float is set: the norm's epsilon stays a constant"
    return (
        "turns the norm's epsilon into a graph input: backend='mla_fusion' makes it a number "
        "again, a pass in another "
        "backend cannot (norm.runtime_eps); there use mark_dynamic, or set "
        "torch._dynamo.config.specialize_float = True"
    )


def _autoload() -> str:
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return (
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set, as it must be where torch_npu is and CANN is "
            "not"
        )
    return (
        "fails here unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set or mla_fusion is imported first"
    )


def _of_torchair() -> dict[str, str]:
    found = {}
    bridge = import_module("mla_fusion.compile.torchair_bridge")
    patterns = _pattern_pass(bridge.compiler_config("ge"))
    if patterns is not None:
        found["pattern_fusion_pass"] = (
            f"{'on' if patterns else 'off'} by default; off, it takes register_replacement "
            "patterns with it; "
            "mla_fusion is a pre pass and runs either way"
        )
    raw = torch.ops.npu.npu_mla_prolog_v3.default
    promised, returned = len(schema_of(raw).returns), _returned(bridge.converter_of(raw))
    if returned not in (None, promised):
        found["npu_mla_prolog_v3 in GE mode"] = (
            f"this torch_npu's converter gives {returned} results for the {promised} of the "
            "schema: those after the "
            "second are wrong; call npu_mla_prolog_v3_functional, or "
            "mla_fusion.converters.register(force=True)"
        )
    return found


def _pattern_pass(config: Any) -> bool | None:
    option = getattr(getattr(config, "experimental_config", None), "pattern_fusion_pass", None)
    return None if option is None else bool(getattr(option, "value", option))


def _returned(converter: Any) -> int | None:
    """How many results the converter's source returns; None where it cannot be read."""
    try:
        tree = ast.parse(
            textwrap.dedent(inspect.getsource(getattr(converter, "__wrapped__", converter)))
        )
    except (OSError, TypeError, SyntaxError):
        return None
    tuples = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return next((len(value.elts) for value in tuples if isinstance(value, ast.Tuple)), None)
