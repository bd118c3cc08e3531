"""import torch beside a torch_npu without CANN, and the switch that makes it work."""

import subprocess
import sys
from pathlib import Path

import pytest

from mla_fusion import _autoload
from tests.harness import environment


def test_import_works_without_any_setting_and_torch_npu_behind_it(tmp_path: Path) -> None:
    """The import loads nothing heavy. A file that a command reads then imports torch_npu, which
    works over the stand-ins, without a word; and its operators are there once.
    """
    file = tmp_path / "model.py"
    file.write_text(
        "import torch_npu.dynamo.torchair\nimport torch\n\n\n"
        "def example():\n    return torch.nn.Linear(4, 4), (torch.zeros(2, 4),)\n"
    )
    code = (
        "import mla_fusion, torch, os, sys; print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'], "
        "*{'torch_npu', 'torchair', 'transformers'} & set(sys.modules)); "
        f"from mla_fusion.tools.cli import main; print(main(['explain', {f'{file}:example'!r}]))"
        "; print(torch.ops.npu.npu_mla_prolog_v3.default)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    first, *_, status, operator = done.stdout.splitlines()
    assert (first, operator) == ("0", "npu.npu_mla_prolog_v3.default") and status != "2"


@pytest.mark.exhaustive
def test_nothing_stands_in_for_a_cann_that_is_there(tmp_path: Path) -> None:
    """Nor does ``activate()`` do anything."""
    (tmp_path / "libascendcl.so").touch()
    code = (
        "import torch, mla_fusion, sys; mla_fusion.offline.activate(); "
        "assert 'torch_npu' not in sys.modules; import torch_npu"
    )
    variables = environment(LD_LIBRARY_PATH=str(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "ImportError: libhccl.so: cannot open" in done.stderr.splitlines()[-1]


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
