"""The pass object under the loop that vLLM-Ascend's manager runs, over real AOT graphs."""

from __future__ import annotations

import copy
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fusion as mf
from mla_fusion.serving import hidden_prologues, opaque_operators, vllm_ascend_pass
from mla_fusion.serving.prepack import PackOnce
from tests.catalogue import int8_caches

EXAMPLE = Path(__file__).parents[2] / "examples" / "fuse_your_model.py"


def example() -> ModuleType:
    """The example as a module: dynamo looks names up in it."""
    spec = spec_from_file_location("fuse_your_model", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault(spec.name, module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


own = example()
HE, HCKV, DR = own.HE, own.HCKV, own.DR
BLOCKS, BLOCK = 6, 128
WHERE_VLLM_HAS_IT = (
    "vllm.compilation.passes.vllm_inductor_pass",
    "vllm.compilation.vllm_inductor_pass",
)


class Attention(own.Attention):  # type: ignore[misc]
    """The example's prologue: nn.Linear weights, so that every one of them has to be packed."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16).requires_grad_(False)


class Reading(Attention):
    """One that also reads the cache as it was before the write."""

    def forward(self, x, cos, sin, slots, kv_cache, kr_cache):
        before = kv_cache.sum(dtype=torch.float32)
        query, query_rope = super().forward(x, cos, sin, slots, kv_cache, kr_cache)
        return query, query_rope, before


def arguments() -> list[Tensor]:
    torch.manual_seed(1)
    angles = torch.rand(3, DR // 2) * 6.28
    cos, sin = (torch.cat((t, t), dim=-1).bfloat16() for t in (angles.cos(), angles.sin()))
    caches = (torch.randn(BLOCKS, BLOCK, 1, width).bfloat16() for width in (HCKV, DR))
    return [torch.randn(3, HE).bfloat16(), cos, sin, torch.tensor([3, 130, 700]), *caches]


class Manager:
    """vLLM-Ascend's: passes of one class, each asked whether it applies, the graph run as it is."""

    def __init__(self, base: type) -> None:
        self.base, self.passes = base, []

    def add(self, pass_: Any) -> None:
        assert isinstance(pass_, self.base)
        self.passes.append(pass_)

    def __call__(self, graph: GraphModule) -> GraphModule:
        for pass_ in self.passes:
            if pass_.is_applicable_for_range(range(1, 9)):
                pass_(graph)
        graph.recompile()
        return graph


def compiled(
    module: nn.Module, *, keep: bool = False, decompose: bool = True
) -> tuple[Callable, list[GraphModule]]:
    """``module`` compiled as `fusion_pass_compile` does, and the graphs that the manager gave."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    manager = Manager(CustomGraphPass)
    manager.add(vllm_ascend_pass(mf.Config(verify="off")))
    graphs: list[GraphModule] = []

    def inner(graph: GraphModule, example_inputs: Any) -> GraphModule:
        graphs.append(manager(graph))
        return graph

    options: dict[str, Any] = {"decompositions": select_decomp_table()} if decompose else {}
    if keep:
        options["keep_inference_input_mutations"] = True
    torch._dynamo.reset()
    return torch.compile(
        module, backend=aot_autograd(fw_compiler=inner, **options), fullgraph=True
    ), graphs


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("decompose", [False, True])
def test_fuses_and_computes_the_same(keep: bool, decompose: bool) -> None:
    torch.manual_seed(0)
    module = Attention()
    run, graphs = compiled(module, keep=keep, decompose=decompose)
    given, wanted = arguments(), arguments()
    with torch.no_grad():
        found, expected = run(*given), module(*wanted)
    for one, other in zip((*found, *given[4:]), (*expected, *wanted[4:]), strict=True):
        assert (one - other).norm() / other.norm() < 1e-2
    written = (given[4] != arguments()[4]).flatten(0, 2).any(-1).nonzero().flatten().tolist()
    assert written == [3, 130, 700]
    assert called(graphs[0])["npu::npu_mla_prolog_v3"] == 1


def called(gm: GraphModule) -> Counter[str]:
    return Counter(
        node.target._schema.name
        for node in gm.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    )


def test_second_step_packs_and_copies_nothing() -> None:
    """Weights are packed by the first call; a step is then the kernel alone."""
    run, graphs = compiled(Attention(), keep=True)
    given = arguments()
    with torch.no_grad():
        run(*given)
        (once,) = (module for module in graphs[0].modules() if isinstance(module, PackOnce))
        packed_again = []
        for packed in once.weights.wanted:
            packed.program.register_forward_hook(lambda program, *_: packed_again.append(program))
        addresses = [cache.data_ptr() for cache in given[4:]]
        run(*given)
    assert len(once.weights.wanted) == 3 and packed_again == []
    assert called(graphs[0]) == {"npu::npu_mla_prolog_v3": 1}
    assert addresses == [cache.data_ptr() for cache in given[4:]]


def test_packed_rows_are_written_in_place() -> None:
    """Their kr_cache has no elements, and is no input of the graph."""
    run, graphs = compiled(int8_caches.PackedRows(), keep=True)
    with torch.no_grad():
        run(*int8_caches.packed_args())
    assert called(graphs[0])["npu::npu_mla_prolog_v3"] == 1 and "aten::copy_" not in called(
        graphs[0]
    )


def test_a_cache_with_another_reader_is_not_written_in_place() -> None:
    """The functional call stays, or the pass has staged; the old rows are what the reader sees."""
    module = Reading()
    run, graphs = compiled(module)
    given, wanted = arguments(), arguments()
    with torch.no_grad():
        found, expected = run(*given), module(*wanted)
    assert torch.equal(found[2], expected[2])
    for one, other in zip(given[4:], wanted[4:], strict=True):
        assert (one - other).norm() / other.norm() < 1e-2
    calls = graphs[0].graph.find_nodes(
        op="call_function", target=torch.ops.npu.npu_mla_prolog_v3.default
    )
    # kv_cache, kr_cache
    assert not [node for call in calls for node in call.args[9:11] if node.op == "placeholder"]


def plain() -> GraphModule:
    return make_fx(torch.neg)(torch.zeros(2))


class TestProtocol:
    def test_uuid_tells_configurations_apart(self) -> None:
        same = vllm_ascend_pass(mf.Config(soc="A2")).uuid()
        assert same == vllm_ascend_pass(mf.Config(soc="A2")).uuid()
        assert (
            len({same, vllm_ascend_pass().uuid(), vllm_ascend_pass(mf.Config(skip=("a",))).uuid()})
            == 3
        )

    @pytest.mark.parametrize("copied", [lambda it: pickle.loads(pickle.dumps(it)), copy.deepcopy])
    def test_copies_are_the_same_pass(self, copied: Callable[[Any], Any]) -> None:
        """vLLM copies its configuration and sends it to its workers."""
        made = vllm_ascend_pass(mf.Config(soc="A2"))
        again = copied(made)
        assert type(again) is type(made) and again.uuid() == made.uuid()

    def test_takes_a_graph_or_its_module(self) -> None:
        made = vllm_ascend_pass()
        gm = plain()
        assert made(gm) is None and made(gm.graph) is None
        with pytest.raises(ValueError, match="belongs to no module"):
            made(torch.fx.Graph())

    @pytest.mark.parametrize("where", WHERE_VLLM_HAS_IT)
    def test_is_one_of_vllms_own_where_vllm_is(
        self, where: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its base class reads a configuration that does not exist yet: it must not be asked to."""

        class VllmInductorPass:
            def __init__(self, config: Any) -> None:
                raise AssertionError("needs a VllmConfig")

        names = where.split(".")
        for length in range(1, len(names) + 1):
            monkeypatch.setitem(
                sys.modules, ".".join(names[:length]), ModuleType(names[length - 1])
            )
        sys.modules[where].VllmInductorPass = VllmInductorPass
        made = vllm_ascend_pass()
        manager = Manager(VllmInductorPass)
        manager.add(made)
        assert manager(plain()) is not None


def test_what_hides_a_prologue_is_named(caplog: pytest.LogCaptureFixture) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(2)
    node = graph.call_function(operator_of("vllm", "mla_forward"), (x,))
    node = graph.call_function(operator_of("mine", "anything"), (node,))
    node = graph.call_function(torch.ops.aten.neg.default, (node,))
    for made in graph.nodes:
        made.meta["val"] = torch.zeros(2)
    graph.output(node)
    gm = GraphModule(nn.Module(), graph)
    assert opaque_operators(gm) == {"vllm::mla_forward": 1, "mine::anything": 1}
    assert hidden_prologues(gm) == [
        "1 x vllm::mla_forward holds the whole attention, prologue included"
    ]
    vllm_ascend_pass()(gm)
    assert [record.message for record in caplog.records] == [
        "no pass sees into this graph's attention: 1 x vllm::mla_forward holds the whole "
        "attention, prologue included"
    ]


_LIBRARIES: list[torch.library.Library] = []


def operator_of(namespace: str, name: str) -> Any:
    if not hasattr(getattr(torch.ops, namespace), name):
        _LIBRARIES.append(torch.library.Library(namespace, "FRAGMENT"))
        _LIBRARIES[-1].define(f"{name}(Tensor x) -> Tensor")
    return getattr(getattr(torch.ops, namespace), name).default
