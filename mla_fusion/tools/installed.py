"""Reports what is installed, without torch: it may be absent, or its import may fail."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib import import_module, metadata

from mla_fusion._autoload import cann_location

_PACKAGES = "torch torch_npu transformers protobuf pyelftools numpy".split()
TO_DO = (
    "pip install torch==2.13.0, then pip install torch_npu==2.13.0 (in a virtual environment "
    "where there is no CANN); "
    "docs/releases.md has the other pairs"
)


def versions() -> dict[str, str | None]:
    """Returns the versions of Python, the platform and the packages; None for a package that is not
    installed.
    """
    numbers: dict[str, str | None] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for package in _PACKAGES:
        numbers[package] = None
        with suppress(metadata.PackageNotFoundError):
            numbers[package] = metadata.version(package)
    release = numbers["torch_npu"]  # torchair is a part of it and has no version of its own
    return numbers | {"torchair": release and f"in torch_npu {release}"}


def without_torch() -> dict[str, object] | None:
    """Returns the doctor's facts if torch cannot be imported, with the reason; None if it can."""
    try:
        import_module("torch")
        return None
    except Exception as error:  # a library that does not fit can raise anything
        failed = f"import torch: {type(error).__name__}: {error}"
        if is_missing(error):
            failed = "torch is not installed"
    problem = {"check": "torch", "failed": failed, "to do": TO_DO}
    return {"versions": versions(), "cann": cann_location(), "problems": [problem]}


def is_missing(error: BaseException) -> bool:
    """Returns True if the error says that torch is not installed."""
    return isinstance(error, ModuleNotFoundError) and error.name == "torch"
