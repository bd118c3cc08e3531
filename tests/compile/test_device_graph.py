"""Capture: the CPU form and the device-npu form of a graph, and what fake relocation keeps."""

import subprocess
import sys

import pytest
import torch

from mla_fusion.compile.device_graph import CaptureError, capture


def write(
    x: torch.Tensor, weight: torch.Tensor, cache: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    rows = torch.nn.functional.linear(x, weight)
    cache.index_put_((index,), rows)
    return rows * 2


def arguments() -> list[torch.Tensor]:
    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    # 100 GiB of cache: nothing may be allocated.
    return [meta(2, 4, 64), meta(512, 64), meta(100 << 20, 512), meta(2, 4, dtype=torch.int64)]


def targets(gm: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_cpu_form() -> None:
    gm, inputs = capture(write, *arguments(), device="cpu")
    assert "aten.mm.default" in targets(gm) and "aten.index_put.default" in targets(gm)
    assert targets(gm)[-1] == "aten.copy_.default"
    assert {tensor.device.type for tensor in inputs} == {"cpu"}


def test_device_form_keeps_matmul() -> None:
    gm, inputs = capture(write, *arguments(), device="npu")
    assert targets(gm)[:2] == ["aten.t.default", "aten.matmul.default"]
    assert {str(tensor.device) for tensor in inputs} == {"npu:0"}


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_dynamic_makes_sizes_symbolic(device: str) -> None:
    gm, inputs = capture(write, *arguments(), device=device, dynamic=True)
    assert any(isinstance(value, torch.SymInt) for value in inputs)
    x = next(
        node
        for node in gm.graph.nodes
        if node.op == "placeholder" and node.meta["val"].__class__.__name__ == "FakeTensor"
    )
    assert isinstance(x.meta["val"].shape[0], torch.SymInt)


def test_marked_dimension_alone_is_symbolic() -> None:
    x, weight = torch.empty(8, 64), torch.empty(16, 64)
    torch._dynamo.mark_dynamic(x, 0)
    _, inputs = capture(torch.nn.functional.linear, x, weight, device="cpu")
    assert sum(isinstance(value, torch.SymInt) for value in inputs) == 1


def test_strides_and_shared_storage_are_kept() -> None:
    pool = torch.empty(10, 576)
    cache, rope = pool[:, :512], pool[:, 512:]

    def update(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first.sum() + second.sum()

    _, inputs = capture(update, cache, rope, device="cpu")
    assert [tensor.stride() for tensor in inputs] == [(576, 1), (576, 1)]
    assert [tensor.storage_offset() for tensor in inputs] == [0, 512]
    assert inputs[0].untyped_storage()._cdata == inputs[1].untyped_storage()._cdata


def test_graph_break_is_an_error() -> None:
    with pytest.raises(CaptureError, match="does not compile to one graph"):
        capture(lambda x: x + 1 if x.sum() > 0 else x, torch.ones(3), device="cpu")


def test_cpu_form_needs_no_torch_npu() -> None:
    code = """
import sys
sys.modules["torch_npu"] = None
import torch
from mla_fusion.compile.device_graph import capture
capture(torch.nn.functional.linear, torch.ones(2, 3), torch.ones(4, 3), device="cpu")
print([name for name in sys.modules if name.startswith(("torchair", "torch_npu."))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
