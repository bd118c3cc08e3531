"""Keep ``import torch`` working where torch_npu is installed and CANN is not.

torch loads every package that announces itself as a device backend while torch itself is imported.
torch_npu is one, and without CANN's libraries its import fails and takes torch's down with it. This
module is therefore imported before torch, imports nothing outside the standard library, and
switches that loading off where it can only fail. Somebody who set the switch has the last word.
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
    for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if entry:
            yield Path(entry)
    for home in _HOMES:
        value = os.environ.get(home)
        if value:
            yield Path(value, "lib64")
            yield Path(value, "runtime", "lib64")


def cann_location() -> str | None:
    """Where CANN's runtime library would be found by the loader, or None where it would not."""
    for directory in _directories():
        library = directory / _RUNTIME
        if library.exists():
            return str(library)
    try:
        known = _LOADER_CACHE.read_bytes()
    except OSError:
        return None
    # The cache lists absolute paths, each ended by a NUL.
    end = known.find(b"/" + _RUNTIME.encode() + b"\0")
    if end < 0:
        return None
    start = known.rfind(b"\0", 0, end) + 1
    return known[start:end].decode(errors="replace") + "/" + _RUNTIME


def torch_npu_installed() -> bool:
    """Whether torch_npu could be imported, found out without importing it."""
    try:
        return find_spec("torch_npu") is not None
    except (ImportError, ValueError):
        return False


def keep_torch_importable() -> None:
    """Switch torch's backend autoload off if it would import a torch_npu that has no CANN to
    load.
    """
    if "torch" in sys.modules or _SWITCH in os.environ:
        return
    if torch_npu_installed() and cann_location() is None:
        os.environ[_SWITCH] = "0"
