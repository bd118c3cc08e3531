"""``mla-fusion doctor``: reports what is installed, what runs here, and which package converts each
operator.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mla_fusion import machine, ops, releases
from mla_fusion._autoload import cann_location, torch_npu_installed
from mla_fusion.compat import registrations
from mla_fusion.compile import offline
from mla_fusion.compile.offline import standins
from mla_fusion.meta.prolog import PROLOGS
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
_ELSEWHERE = "on CPU tensors the backend works"
_TRIAL = "from mla_fusion.compile import offline; offline.activate(); import torch_npu, torchair"
_TRIAL_SECONDS = 300

Facts = dict[str, Any]


def survey() -> Facts:
    """Returns versions, device, CANN, the offline runtime, the operators and problems, as plain
    data.

    It activates the offline runtime if there is no CANN: torchair needs one of them. It raises
    nothing: a check that fails is an entry of "problems", with what to do.
    """
    problems: list[dict[str, str]] = []

    def add_problem(name: str, failed: str, remedy: str) -> None:
        """Adds an entry to the problems."""
        problems.append({"check": name, "failed": failed, "to do": remedy})

    def ask(name: str, check: Callable[[], Any], remedy: str = _OURS, otherwise: Any = None) -> Any:
        """Returns the result of a check, or ``otherwise`` if the check fails."""
        try:
            return check()
        except Exception as error:
            add_problem(name, _describe(error), remedy)
            return otherwise

    release = ask("release", _release, _PAIR, {})
    if error := release.get("refused"):
        add_problem("release", error, f"install that release; {_ELSEWHERE} with any torch_npu")
    elif (error := ask("trial", _trial, _PAIR) or _activation_error()) and torch_npu_installed():
        add_problem("offline", error, f"{_PAIR}; {_ELSEWHERE} without torchair")
    usable = not error and torch_npu_installed()
    driver = "npu-smi info tells whether the driver sees the device"
    return {
        "versions": ask("versions", installed.versions),
        "release": release,
        "cann": ask("cann", cann_location),
        "cann_version": ask("cann_version", _cann_version),
        "device": ask(
            "device", lambda: machine.device_name(torch) if machine.has_npu() else None, driver
        )
        if usable
        else None,
        "offline": ask("offline", lambda: _offline(error)),
        "operators": {
            name: ask(name, partial(_operator, name, usable), otherwise=_UNKNOWN)
            for name in OPERATORS
        },
        "problems": problems,
    }


def _release() -> dict[str, str | None]:
    """Returns why the installed torch_npu is refused, and what to install beside this torch."""
    beside = releases.for_torch(torch.__version__)
    return {"refused": releases.refusal(), "known beside this torch": releases.command(beside)}


def _activation_error() -> str | None:
    """Returns why torchair cannot be loaded; None if it can."""
    try:
        offline.activate()
        if torch_npu_installed():
            import_module("torch_npu")
    except Exception as error:
        return str(error) if isinstance(error, offline.OfflineError) else _describe(error)
    return None


def _describe(error: Exception) -> str:
    """Returns the class and the message of an error."""
    return f"{type(error).__name__}: {error}"


def _trial() -> str | None:
    """Returns how an import of torch_npu ends a process; None if it does not.

    Libraries that do not fit end a process without an exception. An exception will be raised in
    this process too.
    """
    if not torch_npu_installed() or "torch_npu" in sys.modules:
        return None
    command = [sys.executable, "-c", _TRIAL]
    trial = subprocess.run(
        command, capture_output=True, text=True, timeout=_TRIAL_SECONDS, check=False
    )
    if trial.returncode >= 0:
        return None
    lines = [line.strip() for line in trial.stderr.splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("what():")] + lines
    name = signal.Signals(-trial.returncode).name
    return f"importing torch_npu ends the process with {name}: {[*reasons, 'nothing on stderr'][0]}"


def _offline(error: str | None) -> Facts:
    """Returns the state of the offline runtime."""
    directory = offline.standins_directory()
    return {
        "active": offline.is_active(),
        "standins": str(directory) if directory else None,
        "cache": str(standins.cache_root()),
        "c_compiler": standins.find_compiler(),
        "error": error,
    }


def _operator(name: str, usable: bool) -> Facts:
    """Returns the packages that define schema, CPU kernel and GE converter of an operator."""
    packet = getattr(torch.ops.npu, name, None)
    if packet is None:
        return _UNKNOWN
    converter = None
    if usable:
        bridge = import_module("mla_fusion.compile.torchair_bridge")
        owner = import_module("mla_fusion.converters").register().get(name)
        converter = owner or ("torchair" if bridge.has_converter(packet.default) else "none")
    kernels = {"schema": _registrar(name, "debug"), "cpu_kernel": _registrar(name, "CPU")}
    return {**kernels, "converter": converter}


def _registrar(name: str, key: str) -> str | None:
    """Returns the package whose source file registers a definition or a kernel; None if no package
    does.
    """
    for line in registrations(f"npu::{name}"):
        if not line.startswith(f"{key}: registered at "):
            continue
        # up to torch 2.8 a registration in Python names no file; torch_npu registers in C++
        if "/dev/null" in line and name in ops.OPERATORS:
            return "mla_fusion"
        packages = (package for package in ("torch_npu", "mla_fusion") if f"{package}/" in line)
        return next(packages, "another package")
    return None


def _cann_version() -> str | None:
    """Returns the version in the toolkit's file, beside or above the runtime library."""
    location = cann_location()
    for folder in Path(location).resolve().parents[:5] if location else ():
        for name in ("version.cfg", "ascend_toolkit_install.info"):
            with suppress(OSError):
                text = (folder / name).read_text(encoding="utf-8", errors="replace")
                if version := _VERSION.search(text):
                    return version[1]
    return None
