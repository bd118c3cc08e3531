"""Lowering through the real torchair: hand-written calls, refusals, and the caller's objects."""

from pathlib import Path

import pytest
import torch

import mla_fusion as mf
from mla_fusion.tools.lowering import LoweringError

T, HE, HCQ, N, D, DR, HCKV = 8, 7168, 1536, 16, 128, 64, 512
BLOCKS, BLOCK = 1000, 128
UNTOUCHED = mf.Config(enable=False)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def arguments() -> list[torch.Tensor]:
    return [
        meta(T, HE),
        meta(HE, HCQ),
        meta(HCQ, N * (D + DR)),
        meta(N, D, HCKV),
        meta(HE, HCKV + DR),
        meta(HCQ),
        meta(HCKV),
        meta(T, DR),
        meta(T, DR),
        meta(BLOCKS, BLOCK, 1, HCKV),
        meta(BLOCKS, BLOCK, 1, DR),
        meta(T, dtype=torch.int64),
    ]


def functional(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    results = torch.ops.npu.npu_mla_prolog_v3_functional(
        *args[:11], cache_index=args[11], rmsnorm_epsilon_cq=1e-6, rmsnorm_epsilon_ckv=1e-6
    )
    args[9].copy_(results[5])
    args[10].copy_(results[6])
    return results[0], results[1]


def test_before_and_after_are_kept_apart() -> None:
    lowered = mf.lower(functional, *arguments(), mode="npugraph_ex", config=UNTOUCHED)
    before = [
        str(node.target) for node in lowered.fx_before.graph.nodes if node.op == "call_function"
    ]
    assert before[0] == "npu.npu_mla_prolog_v3_functional.default"
    assert before.count("aten.copy_.default") == 2
    assert lowered.report is None


def test_save_writes_every_stage(tmp_path: Path) -> None:
    lowered = mf.lower(functional, *arguments(), config=UNTOUCHED)
    written = lowered.save(tmp_path / "out")
    assert [path.name for path in written] == ["fx_before.txt", "fx_after.txt", "graph.pbtxt"]
    assert "MlaPrologV3" in written[2].read_text()
    assert "npu_mla_prolog_v3_functional" in written[0].read_text()


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.ones(32, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(x) * self.scale


def test_module_stays_as_it_is() -> None:
    layer = Layer()
    parameters = dict(layer.named_parameters())
    text = torch.randn(4, 64, dtype=torch.bfloat16)
    expected = layer(text)
    lowered = mf.lower(layer, text)
    assert lowered.ge_ops["Data"] == 3
    assert all(layer.get_parameter(name) is tensor for name, tensor in parameters.items())
    assert layer.projection.weight.device.type == "cpu"
    assert torch.equal(layer(text), expected)


def test_closures_partials_and_methods_are_taken_along() -> None:
    import functools

    layer = Layer()
    scale = torch.ones(32, dtype=torch.bfloat16)

    def closed(x: torch.Tensor) -> torch.Tensor:
        return layer(x) * scale

    x = meta(4, 64)
    counts = [
        mf.lower(call, x).ge_ops["Mul"]
        for call in (layer.forward, closed, functools.partial(torch.mul, other=meta(4, 64)))
    ]
    assert counts == [1, 2, 1]


def test_every_refused_operator_is_named() -> None:
    def writes(x: torch.Tensor, cache: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        cache.index_put_((index,), x)
        cache.index_copy_(0, index, x)
        return x + 1

    with pytest.raises(LoweringError) as error:
        mf.lower(writes, meta(8, 16), meta(100, 16), meta(8, dtype=torch.int64))
    assert error.value.operators == ("aten.index_put.default", "aten.index_copy.default")
    assert "no GE converter for aten.index_put.default, aten.index_copy.default" in str(error.value)


def test_graph_break_is_an_error_with_its_reason() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x

    with pytest.raises(
        LoweringError, match=r"branches does not compile to one graph.*\n?.*[Dd]ata-dependent"
    ):
        mf.lower(branches, meta(4))


def test_no_operation_is_an_error() -> None:
    with pytest.raises(LoweringError, match="holds no tensor operation"):
        mf.lower(lambda x: 3, meta(4))


def test_other_modes_and_flags_are_refused() -> None:
    with pytest.raises(ValueError, match="mode must be one of ge, npugraph_ex"):
        mf.lower(torch.neg, meta(4), mode="acl")
    with pytest.raises(ValueError, match="dynamic must be True or False, got 'yes'"):
        mf.lower(torch.neg, meta(4), dynamic="yes")  # type: ignore[arg-type]
