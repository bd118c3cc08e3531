"""What is installed, found out without torch: for the case that torch is absent, or cannot be
imported.
"""

from __future__ import annotations

import platform
import sys
from importlib import import_module, metadata

from mla_fusion._autoload import cann_location

_PACKAGES = "torch torch_npu transformers protobuf pyelftools numpy".split()
TO_DO = (
    "pip install torch==2.13.0, then pip install torch_npu==2.13.0 (in a virtual environment "
    "where there is no CANN); "
    "docs/releases.md has the other pairs"
)


def versions() -> dict[str, str | None]:
    """Of Python, the platform and the packages that count; None for one that is not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    # torchair comes inside torch_npu and has no version of its own.
    found["torchair"] = f"in torch_npu {found['torch_npu']}" if "torchair" in sys.modules else None
    return found


def without_torch() -> dict[str, object] | None:
    """What ``doctor`` can say where torch cannot be imported, the reason among its problems; None
    where it can.
    """
    try:
        import_module("torch")
        return None
    except Exception as error:  # a library that does not fit can raise anything
        failed = (
            "torch is not installed"
            if is_missing(error)
            else f"import torch: {type(error).__name__}: {error}"
        )
    problem = {"check": "torch", "failed": failed, "to do": TO_DO}
    return {"versions": versions(), "cann": cann_location(), "problems": [problem]}


def is_missing(error: BaseException) -> bool:
    """Is torch what could not be imported?"""
    return isinstance(error, ModuleNotFoundError) and error.name == "torch"
