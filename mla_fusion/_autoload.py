"""Keeps ``import torch`` working if torch_npu is installed and CANN is not.

``import torch`` loads every package that announces itself as a device backend. torch_npu is one.
Without CANN's libraries its import fails, and torch's with it. So this module is imported before
torch, and switches that loading off if it would fail. It imports only the standard library. A
switch that the user has set stays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_RUNTIME = "libascendcl.so"
_LOADER_CACHE = Path("/etc/ld.so.cache")
_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_AICPU_PATH")


def _directories() -> Iterator[Path]:
    """Yields the directories in which the loader would look for CANN's libraries."""
    for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if entry:
            yield Path(entry)
    for home in filter(None, map(os.environ.get, _HOMES)):
        yield Path(home, "lib64")
        yield Path(home, "runtime", "lib64")


def cann_location() -> str | None:
    """Returns where the loader finds CANN's runtime library; None if it does not."""
    for directory in _directories():
        library = directory / _RUNTIME
        if library.exists():
            return str(library)
    try:
        entries = _LOADER_CACHE.read_bytes().split(b"\0")  # absolute paths, among other things
    except OSError:
        return None
    suffix = f"/{_RUNTIME}".encode()
    return next(
        (entry.decode(errors="replace") for entry in entries if entry.endswith(suffix)), None
    )


def torch_npu_installed() -> bool:
    """Returns True if torch_npu is installed. Does not import it."""
    try:
        return find_spec("torch_npu") is not None
    except (ImportError, ValueError):
        return False


def keep_torch_importable() -> None:
    """Switches torch's backend autoload off if it would import a torch_npu without CANN."""
    if "torch" in sys.modules or _SWITCH in os.environ:
        return
    if torch_npu_installed() and cann_location() is None:
        os.environ[_SWITCH] = "0"
