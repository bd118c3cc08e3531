"""The table of releases, and what is refused before anything of torch_npu is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from mla_fusion import compat, machine, releases
from mla_fusion.compile import backend, torchair_bridge


@pytest.mark.parametrize(
    ("torch_version", "torch_npu"),
    [
        ("2.7.1", "2.7.1.post11"),
        ("2.8.0+cpu", "2.8.0.post5"),
        ("2.9.0", "2.9.0.post9"),
        ("2.10.0", "2.10.0.post7"),
        ("2.9.1", "2.9.1"),  # not tested, and the only one for this torch
        ("2.6.0", "2.14.0"),  # none works beside it
        ("2.99.0", "2.14.0"),
    ],
)
def test_the_release_to_install(torch_version: str, torch_npu: str) -> None:
    assert releases.for_torch(torch_version).torch_npu == torch_npu


def test_what_the_installed_release_is_said_to_bring_is_there() -> None:
    assert releases.refusal() is None
    package = torchair_bridge.package("ge")
    for name in compat._COMPILES_THROUGH:
        assert callable(getattr(package, name))


REFUSED = """
import mla_fusion as mf, torch
from mla_fusion.releases import UnsupportedRelease
for call in (lambda: mf.lower(torch.relu, torch.ones(2)), mf.offline.activate):
    try:
        call()
    except UnsupportedRelease as error:
        print(error)
"""


@pytest.mark.exhaustive
def test_a_release_without_these_functions_is_refused_with_the_one_to_install(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise AssertionError('imported')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + REFUSED
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lacks = "lacks _compile_graph_with_aot, _get_merged_decompositions, _process_send_recv"
    assert done.stdout.count(lacks) == done.stdout.count("pip install torch==") == 2


def test_backend_is_refused_where_there_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "torchair_lacks", lambda: ("_process_send_recv",))
    assert callable(backend.backend())  # on CPU nothing is compiled through torchair
    monkeypatch.setattr(machine, "has_npu", lambda: True)
    with pytest.raises(releases.UnsupportedRelease, match="lacks _process_send_recv"):
        backend.backend()
