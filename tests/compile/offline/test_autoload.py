"""import torch beside a torch_npu without CANN, and the switch that makes it work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_fusion import _autoload


def environment(**changes: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"
    }
    return {**kept, **changes}


def test_import_works_without_any_setting() -> None:
    code = "import mla_fusion, torch, os; print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_imports_nothing_heavy() -> None:
    heavy = "('torch_npu', 'torchair', 'transformers')"
    code = f"import mla_fusion, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout == "[]\n", done.stderr


def test_cann_is_found_by_library_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libascendcl.so"
    library.touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    assert _autoload.cann_location() == str(library)


def test_cann_is_found_by_its_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib64").mkdir()
    library = tmp_path / "lib64" / "libascendcl.so"
    library.touch()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert _autoload.cann_location() == str(library)


def test_cann_is_found_in_the_loader_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "ld.so.cache"
    cache.write_bytes(b"junk\0libascendcl.so\0/opt/cann/lib64/libascendcl.so\0more")
    monkeypatch.setattr(_autoload, "_LOADER_CACHE", cache)
    assert _autoload.cann_location() == "/opt/cann/lib64/libascendcl.so"


def test_imports_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.delitem(sys.modules, "torch")
    _autoload.keep_torch_importable()
    assert "torch" not in sys.modules
