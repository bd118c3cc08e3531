"""What is installed, what runs on what, and who converts which operator: facts for ``mla-fusion doctor``."""

from __future__ import annotations

import platform
import shutil
import sys
from importlib import import_module, metadata
from typing import Any

import torch

from mla_fusion._autoload import cann_location, torch_npu_installed
from mla_fusion.compile import offline, traps
from mla_fusion.compile.offline import standins

OPERATORS = (
    "npu_mla_prolog",
    "npu_mla_prolog_v2",
    "npu_mla_prolog_v3",
    "npu_mla_prolog_v3_functional",
    "npu_rms_norm",
    "npu_interleave_rope",
    "npu_rotary_mul",
    "npu_kv_rmsnorm_rope_cache",
    "npu_kv_rmsnorm_rope_cache_v2",
    "npu_kv_rmsnorm_rope_cache_v2_functional",
    "npu_transpose_batchmatmul",
    "npu_format_cast",
)


def survey() -> dict[str, Any]:
    """Versions, device, CANN, the offline runtime, the operators and known traps, as plain data.

    Activates the offline runtime where there is no CANN, since only then can torchair be asked; a failure
    to do so is an entry of the answer, not an exception.
    """
    error = _activation_error()
    usable = error is None and torch_npu_installed()
    return {
        "versions": versions(),
        "cann": cann_location(),
        "device": _device() if usable else None,
        "offline": _offline(error),
        "operators": {name: _operator(name, usable) for name in OPERATORS},
        "traps": traps.survey(usable),
    }


def _activation_error() -> str | None:
    try:
        offline.activate()
        if torch_npu_installed():
            import_module("torch_npu")
    except (RuntimeError, ImportError) as error:
        return str(error)
    return None


def versions() -> dict[str, str | None]:
    packages = ("torch", "torch_npu", "transformers", "protobuf", "pyelftools", "numpy")
    found: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    # torchair comes inside torch_npu and has no version of its own.
    found["torchair"] = f"in torch_npu {found['torch_npu']}" if "torchair" in sys.modules else None
    return found


def _device() -> str | None:
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return None
    return str(npu.get_device_name())


def _offline(error: str | None) -> dict[str, Any]:
    directory = offline.standins_directory()
    return {
        "active": offline.is_active(),
        "standins": str(directory) if directory else None,
        "cache": str(standins.cache_root()),
        "c_compiler": next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None),
        "error": error,
    }


def _operator(name: str, usable: bool) -> dict[str, Any]:
    packet = getattr(torch.ops.npu, name, None)
    entry: dict[str, Any] = {"schema": packet is not None, "converter": None}
    if packet is None or not usable:
        return entry
    bridge = import_module("mla_fusion.compile.torchair_bridge")
    converters = import_module("mla_fusion.converters")
    owner = converters.register().get(name)
    overload = packet.default
    entry["converter"] = owner or ("torchair" if bridge.has_converter(overload) else "none")
    return entry
