"""What is installed, what runs on what, and who converts which operator: facts for ``mla-fusion
doctor``.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mla_fusion import ops, releases
from mla_fusion._autoload import cann_location, torch_npu_installed
from mla_fusion.compat import registrations, schema_of, specialises_floats
from mla_fusion.compile import inductor_bridge, offline
from mla_fusion.compile.offline import standins
from mla_fusion.meta.prolog import PROLOGS
from mla_fusion.report import store
from mla_fusion.tools import installed

_VERSION = re.compile(r"version\w*\s*=\s*\[?(?:[\d.]+:)?([\d.]+(?:RC\w*|alpha\w*)?)", re.IGNORECASE)
_UNKNOWN = {"schema": None, "cpu_kernel": None, "converter": None}
_BESIDE = """
    npu_rms_norm npu_interleave_rope npu_rotary_mul npu_kv_rmsnorm_rope_cache
    npu_kv_rmsnorm_rope_cache_v2 npu_kv_rmsnorm_rope_cache_v2_functional npu_scatter_nd_update
    npu_scatter_pa_kv_cache_functional npu_dynamic_quant npu_quant_matmul npu_transpose_batchmatmul
    npu_format_cast
"""
OPERATORS = *PROLOGS, *_BESIDE.split()
_OURS = "a defect of mla_fusion: the other answers hold; please report this one with all of them"
_PAIR = (
    "install a pair of the table in docs/releases.md; doctor names the one beside your torch "
    'under "release"'
)
_TRIAL = "from mla_fusion.compile import offline; offline.activate(); import torch_npu, torchair"
_TRIAL_SECONDS = 300

Facts = dict[str, Any]


class _Checks:
    """Runs checks, each by itself: one that fails leaves a line on what failed and what to do, and
    no answer.
    """

    def __init__(self) -> None:
        self.problems: list[dict[str, str]] = []

    def ask(
        self, name: str, check: Callable[[], Any], remedy: str = _OURS, otherwise: Any = None
    ) -> Any:
        try:
            return check()
        except Exception as error:
            self.add(name, f"{type(error).__name__}: {error}", remedy)
            return otherwise

    def add(self, name: str, failed: str, remedy: str) -> None:
        self.problems.append({"check": name, "failed": failed, "to do": remedy})


def survey() -> Facts:
    """Versions, device, CANN, the offline runtime, the operators, hooks, known traps and problems,
    as plain data.

    Activates the offline runtime where there is no CANN, since only then can torchair be asked.
    Nothing is raised: a check that fails is an entry of "problems", with what to do.
    """
    checks = _Checks()
    ask = checks.ask
    release = ask("release", _release, _PAIR)
    error = _activation_error(checks, release)
    usable = error is None and torch_npu_installed()
    return {
        "versions": ask("versions", installed.versions),
        "release": release,
        "cann": ask("cann", cann_location),
        "cann_version": ask("cann_version", _cann_version),
        "device": ask("device", _device, "npu-smi info tells whether the driver sees the device")
        if usable
        else None,
        "offline": ask("offline", lambda: _offline(error)),
        "operators": {
            name: ask(name, partial(_operator, name, usable), otherwise=_UNKNOWN)
            for name in OPERATORS
        },
        "hooks": ask("hooks", lambda: hooks(usable)),
        "traps": ask("traps", lambda: _traps(usable)),
        "problems": checks.problems,
    }


def _release() -> dict[str, str | None]:
    """What the installed torch_npu is, as far as this package is concerned."""
    beside = releases.for_torch(torch.__version__)
    return {"refused": releases.refusal(), "known beside this torch": releases.command(beside)}


def _activation_error(checks: _Checks, release: dict[str, str | None] | None) -> str | None:
    """Why torchair cannot be asked here; None where it can, or where there is no torch_npu and
    nobody needs it.
    """
    refused, elsewhere = (release or {}).get("refused"), "on CPU tensors the backend works"
    if refused:
        checks.add("release", refused, f"install that release; {elsewhere} with any torch_npu")
        return refused
    found, remedy = checks.ask("trial", _trial, _PAIR), _PAIR
    if found is None:
        try:
            offline.activate()
            if torch_npu_installed():
                import_module("torch_npu")
        except offline.OfflineError as error:
            if not torch_npu_installed():
                return str(error)
            found, remedy = str(error), f"as the message says; {elsewhere} without torchair"
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
    if found is not None:
        checks.add("offline", found, remedy)
    return found


def _trial() -> str | None:
    """How importing torch_npu ends a process, where it does: libraries that do not fit raise no
    exception. One that is raised will be the same in this process.
    """
    if not torch_npu_installed() or "torch_npu" in sys.modules:
        return None
    command = [sys.executable, "-c", _TRIAL]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TRIAL_SECONDS, check=False
    )
    if done.returncode >= 0:
        return None
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    what = [line for line in said if line.startswith("what():")] or said or ["nothing on stderr"]
    signalled = signal.Signals(-done.returncode).name
    return f"importing torch_npu ends the process with {signalled}: {what[0]}"


def _device() -> str | None:
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return None
    return str(npu.get_device_name())


def _offline(error: str | None) -> Facts:
    directory = offline.standins_directory()
    return {
        "active": offline.is_active(),
        "standins": str(directory) if directory else None,
        "cache": str(standins.cache_root()),
        "c_compiler": next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None),
        "error": error,
    }


def _operator(name: str, usable: bool) -> Facts:
    """Whose its schema, CPU kernel and GE converter are, where there are any."""
    entry: Facts = dict(_UNKNOWN)
    packet = getattr(torch.ops.npu, name, None)
    if packet is None:
        return entry
    entry["schema"] = _registrar(name, "debug")
    entry["cpu_kernel"] = _registrar(name, "CPU")
    if usable:
        bridge = import_module("mla_fusion.compile.torchair_bridge")
        owner = import_module("mla_fusion.converters").register().get(name)
        entry["converter"] = owner or (
            "torchair" if bridge.has_converter(packet.default) else "none"
        )
    return entry


def _registrar(name: str, key: str) -> str | None:
    """The package of the source file that the dispatcher says a definition or a kernel is from."""
    lines = registrations(f"npu::{name}")
    found = next((line for line in lines if line.startswith(f"{key}: registered at ")), None)
    if found is None:
        return None
    if "/dev/null" in found and name in ops.OPERATORS:
        # up to torch 2.8 what is registered in Python names no file, and torch_npu does it in C++
        return "mla_fusion"
    packages = (package for package in ("torch_npu", "mla_fusion") if f"{package}/" in found)
    return next(packages, "another package")


def hooks(usable: bool) -> dict[str, str]:
    """What of this process calls the pass, and who else stands where it could. torchair's are
    fields of each config.
    """
    names = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass")
    found = {f"Inductor {name}": _named(inductor_bridge.option(name)) for name in names}
    known = "mla_fusion" in torch.compiler.list_backends(exclude_tags=())
    found['torch.compile(backend="mla_fusion")'] = (
        "known" if known else "unknown: pip install the package"
    )
    if usable:
        config = import_module("mla_fusion.compile.torchair_bridge").compiler_config("ge")
        hook = _option(config, "post_grad_custom_pre_pass")
        found["a fresh torchair CompilerConfig"] = _named(hook)
    found[store.VARIABLE] = os.environ.get(store.VARIABLE, "not set: reports stay in memory")
    return found


def _named(hook: Any) -> str:
    if hook is None:
        return "none"
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"{getattr(hook, '__module__', '?')}.{name}"


def _cann_version() -> str | None:
    """As the toolkit's own file states it, beside or above the runtime library."""
    location = cann_location()
    for folder in Path(location).resolve().parents[:5] if location else ():
        for name in ("version.cfg", "ascend_toolkit_install.info"):
            with suppress(OSError):
                text = (folder / name).read_text(encoding="utf-8", errors="replace")
                if found := _VERSION.search(text):
                    return found[1]
    return None


# -- known traps on the way to a fused graph


def _traps(usable: bool) -> dict[str, str]:
    """Name of the trap -> what about it: what it is in this environment, and what to do. Facts from
    torchair's and torch_npu's sources.
    """
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
    options = _option(bridge.compiler_config("ge"), "experimental_config")
    patterns = _option(options, "pattern_fusion_pass")
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


def _option(config: Any, name: str) -> Any:
    """Of a torchair config; None for one that it has not."""
    held = getattr(config, name, None)
    return getattr(held, "value", held)


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
