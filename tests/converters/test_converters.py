"""Our converters against torchair's own, on the real torchair: GE protos agree node by node."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mla_fusion as mf
from mla_fusion.compat import ge_converter

OPERATORS = (
    "npu_mla_prolog",
    "npu_mla_prolog_v2",
    "npu_mla_prolog_v3",
    "npu_mla_prolog_v3_functional",
)
T, HE, HCQ, N, D, DR, HCKV = 8, 7168, 1536, 16, 128, 64, 512
UNTOUCHED = mf.Config(enable=False)


@pytest.fixture
def restored() -> Iterator[None]:
    """Put torchair's converters back after a test that forces ours."""
    mf.offline.activate()
    overloads = [getattr(torch.ops.npu, name).default for name in OPERATORS]
    kept = [ge_converter(overload) for overload in overloads]
    yield
    for overload, converter in zip(overloads, kept, strict=True):
        overload._ge_converter = converter


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def weights(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    token = meta(T, HE, dtype=dtype)
    return [
        token,
        meta(HE, HCQ, dtype=dtype),
        meta(HCQ, N * (D + DR), dtype=dtype),
        meta(N, D, HCKV),
        meta(HE, HCKV + DR, dtype=dtype),
        meta(HCQ),
        meta(HCKV),
        meta(T, DR),
        meta(T, DR),
    ]


def caches() -> list[torch.Tensor]:
    return [meta(1000, 128, 1, HCKV), meta(1000, 128, 1, DR)]


def index() -> torch.Tensor:
    return meta(T, dtype=torch.int64)


def quantised() -> dict[str, torch.Tensor]:
    def scale(*shape: int) -> torch.Tensor:
        return meta(*shape, dtype=torch.float32)

    return {
        "dequant_scale_x": scale(T, 1),
        "dequant_scale_w_dq": scale(1, HCQ),
        "dequant_scale_w_uq_qr": scale(1, N * (D + DR)),
        "dequant_scale_w_dkv_kr": scale(1, HCKV + DR),
    }


def positional_index(name: str, **options: Any) -> tuple[Callable[..., Any], list[Any]]:
    """v1 and v2 take the index before the caches, by position."""
    overload = getattr(torch.ops.npu, name)
    return lambda *args: overload(*args, **options)[:2], [*weights(), index(), *caches()]


def functional(
    options: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    first: list[torch.Tensor] | None = None,
    results: int = 5,
) -> tuple[Callable[..., Any], list[Any]]:
    names = list(tensors or {})

    def call(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        optional = dict(zip(names, args[12:], strict=True))
        outputs = torch.ops.npu.npu_mla_prolog_v3_functional(
            *args[:11], cache_index=args[11], **optional, **(options or {})
        )
        args[9].copy_(outputs[5])
        args[10].copy_(outputs[6])
        return outputs[:results]

    return call, [*(first or weights()), *caches(), index(), *(tensors or {}).values()]


EPSILONS = {"rmsnorm_epsilon_cq": 1e-6, "rmsnorm_epsilon_ckv": 2e-6}
CASES = {
    "v1": lambda: positional_index("npu_mla_prolog", **EPSILONS),
    "v1 in NZ mode": lambda: positional_index("npu_mla_prolog", cache_mode="PA_NZ"),
    "v2": lambda: positional_index("npu_mla_prolog_v2", **EPSILONS),
    "v3": lambda: functional(EPSILONS),
    "v3 with defaults": lambda: functional(),
    "v3 with scales": lambda: functional(
        {"qc_qr_scale": 2.0, "kc_scale": 0.5, "cache_mode": "PA_NZ"}
    ),
    "v3 with query_norm": lambda: functional({"query_norm_flag": True, **EPSILONS}),
    "v3 with int8 weights": lambda: functional(
        {"weight_quant_mode": 2, "query_norm_flag": True, **EPSILONS},
        quantised(),
        weights(torch.int8),
    ),
    "v3 with sequence lengths": lambda: functional(
        EPSILONS, {"actual_seq_len": meta(T, dtype=torch.int32)}
    ),
}


def nodes(case: str, *, dynamic: bool = False) -> list[str]:
    """The optimised GE graph as text, one entry a node."""
    call, args = CASES[case]()
    lowered = mf.lower(call, *args, config=UNTOUCHED, dynamic=dynamic)
    return [str(op) for op in lowered.ge_graph.op]


@pytest.mark.usefixtures("restored")
class TestAgainstTorchair:
    @pytest.mark.parametrize("case", CASES)
    def test_protos_agree_node_by_node(self, case: str) -> None:
        theirs = nodes(case)
        assert set(mf_converters().register(force=True).values()) == {"mla_fusion"}
        ours = nodes(case)
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine == other

    def test_protos_agree_with_symbolic_sizes(self) -> None:
        theirs = nodes("v3", dynamic=True)
        mf_converters().register(force=True)
        assert nodes("v3", dynamic=True) == theirs

    def test_registers_only_what_is_absent(self) -> None:
        owners = mf_converters().register()
        assert {name: owners.pop(name) for name in ("npu_format_cast",)} == {
            "npu_format_cast": "mla_fusion"
        }
        assert set(owners.values()) == {"torchair"}
        overload = torch.ops.npu.npu_mla_prolog_v3_functional.default
        del overload._ge_converter
        assert mf_converters().provenance()["npu_mla_prolog_v3_functional"] == "none"
        owners = mf_converters().register()
        assert owners["npu_mla_prolog_v3_functional"] == "mla_fusion"
        assert owners["npu_mla_prolog_v3"] == "torchair"
        assert any("MlaPrologV3" in text for text in nodes("v3"))

    def test_in_place_operator_returns_the_five_of_its_schema(self) -> None:
        """torchair's own converter returns seven, in GE's order: result 2 would be a cache."""
        from torchair.ge._ge_graph import GeGraph

        mf_converters().register(force=True)
        overload = torch.ops.npu.npu_mla_prolog_v3.default
        with GeGraph() as graph:
            *inputs, index_input = placeholders(12)
            results = overload._ge_converter(*inputs, cache_index=index_input)
            names = [result.node.output_desc[result.index].name for result in results]
            kernels = [op.type for op in graph.op if op.type not in ("Data", "NetOutput")]
        assert names == [
            "query",
            "query_rope",
            "dequant_scale_q_nope",
            "query_norm",
            "dequant_scale_q_norm",
        ]
        assert kernels == ["MlaPrologV3"]


def placeholders(count: int) -> list[Any]:
    from torchair.ge._ge_graph import Data, DataType

    return [Data(index=i, dtype=DataType.DT_BF16, shape=[1], placement="NPU") for i in range(count)]


def mf_converters() -> Any:
    from mla_fusion import converters

    return converters
