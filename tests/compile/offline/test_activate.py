"""activate() on the real torch_npu wheel, each time in a process of its own where that matters."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_fusion as mf
from mla_fusion.compat import in_tracing_mode
from mla_fusion.compile.offline import runtime
from tests.harness import environment

SHORT = "import mla_fusion as mf; mf.offline.activate(); import torch_npu, torchair; print('ready')"


@pytest.fixture(scope="module", autouse=True)
def active() -> None:
    mf.offline.activate()


def test_real_packages_import() -> None:
    import torch_npu
    import torchair

    assert torch_npu.__version__.split(".")[:2] == torch.__version__.split("+")[0].split(".")[:2]
    assert callable(torchair.get_npu_backend)
    assert not torch.npu.is_available()
    assert torch.npu.device_count() == 0


def test_fake_tensors_go_through_the_real_dispatcher() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 8, dtype=torch.bfloat16, device="npu")
        gamma = torch.empty(8, dtype=torch.bfloat16, device="npu")
        normed, rstd = torch.ops.npu.npu_rms_norm(x, gamma, 1e-6)
    assert normed.device == torch.device("npu:0")
    assert (normed.shape, rstd.shape) == ((4, 8), (4, 1))


def test_modules_with_gradients_pass_stream_guards() -> None:
    with FakeTensorMode():
        layer = torch.nn.Linear(8, 8, device="npu")
        layer(torch.empty(2, 8, device="npu")).sum().backward()
        assert layer.weight.grad is not None


def test_no_thread_polls_a_queue() -> None:
    """torch_npu starts two for its task queue with the first stream, unless the queue is off."""
    with FakeTensorMode():
        torch.nn.Linear(8, 8, device="npu")(torch.empty(2, 8, device="npu")).sum().backward()
    names = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    assert not names & {"acl_thread", "release_thread"}, names


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: torch.empty(3, 2, device="npu"), r"aten::empty on device npu of size \[3, 2\]"),
        (lambda: torch.ones(2).to("npu:0"), "aten::_to_copy on device npu"),
        (lambda: torch.tensor([1], device="npu"), "on device npu"),
        (lambda: torch.randn(3, device="npu"), "aten::empty"),
        (lambda: torch.npu.synchronize(), r"torch\.npu\.synchronize"),
        (lambda: torch.npu.Stream(), r"torch\.npu\.Stream"),
        (lambda: torch.nn.Linear(2, 2).npu(), "torch.npu"),
    ],
)
def test_device_work_is_refused_by_name(call, named: str) -> None:
    with pytest.raises(mf.offline.NpuNotAvailable, match=named):
        call()


def test_compiled_graph_is_refused_where_it_would_run() -> None:
    import torchair

    compile_graph = torchair.get_npu_backend()

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        return compile_graph(gm, in_tracing_mode(inputs))  # torch before 2.11 takes no others

    compiled = torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)
    with FakeTensorMode():
        x = torch.empty(4, device="npu")
    with pytest.raises(mf.offline.NpuNotAvailable, match="running the compiled graph graph_"):
        compiled(x)


def test_second_call_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes
    import subprocess

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the libraries stand already")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    mf.offline.activate()


def test_interrupt_handler_stays_pythons() -> None:
    import signal

    # a shell starts jobs in the background with SIG_IGN
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN)


@pytest.mark.exhaustive
def test_missing_compiler_says_what_to_install(tmp_path: Path) -> None:
    given = environment(MLA_FUSION_CACHE=str(tmp_path), PATH=str(tmp_path))
    command = [sys.executable, "-c", SHORT]
    done = subprocess.run(command, capture_output=True, text=True, env=given, check=False)
    assert done.returncode != 0
    assert "found no C compiler" in done.stderr and "apt install gcc" in done.stderr


@pytest.mark.exhaustive
def test_cached_stand_ins_need_no_compiler_and_no_walk(tmp_path: Path) -> None:
    """torch_npu seeks CANN's version file; without CANN, in all below the current directory."""
    (tmp_path / "ascend_toolkit_install.info").write_text("version=9.9\n")
    command = [
        sys.executable,
        "-c",
        SHORT + "; import os, torch; print(torch.version.cann, *os.walk('.'))",
    ]
    given = environment(PATH=str(tmp_path))
    done = subprocess.run(
        command, capture_output=True, text=True, env=given, check=False, cwd=tmp_path
    )
    assert done.stdout == "ready\nnot known ('.', [], ['ascend_toolkit_install.info'])\n", (
        done.stderr
    )


def test_torch_npu_imported_first_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runtime._state, "standins", None)
    with pytest.raises(runtime.OfflineError, match="was imported without CANN before"):
        mf.offline.activate()
