"""A target is one file and two rows: `query_side.py` beside this is one, from schema to call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from mla_fusion.meta.errors import ContractError
from torch import Tensor

import mla_fusion as mf
from mla_fusion import config, ops
from mla_fusion.emit import targets
from mla_fusion.emit.target import Target
from mla_fusion.prove.field import Num
from mla_fusion.prove.operators import Call
from tests.catalogue import projections, prologues
from tests.catalogue.base import Prologue, paged_args
from tests.emit import query_latent, query_side
from tests.harness import assert_as_exact, clones, compiled, graph_of, refused, traced_graph

NAME = query_side.OPERATOR.name
MADE_UP: dict[str, Target[Any]] = {"query": query_side.TARGET, "latent": query_latent.TARGET}
Install = Callable[..., None]
MODELS: dict[type[Prologue], Callable[[], tuple[Tensor, ...]]] = {
    prologues.PagedRotateHalf: paged_args,
    prologues.ComplexDense: prologues.dense_args,  # [B, S, He], and pairs behind the rotation
    prologues.FusedQkvA: paged_args,
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a target into the two tables, with some of its fields changed."""

    def install(name: str = "query", **changed: Any) -> None:
        monkeypatch.setitem(config.TARGETS, name, {"absorbed"})
        monkeypatch.setitem(targets.TARGETS, name, replace(MADE_UP[name], **changed))

    return install


def _calls(graph: torch.fx.GraphModule, name: str) -> int:
    return sum(name in str(node.target) for node in graph.graph.nodes)


def _products(graph: torch.fx.GraphModule) -> int:
    return _calls(graph, "aten.mm") + _calls(graph, "aten.bmm")


def _asked(*above: str, **options: Any) -> mf.Config:
    return mf.Config(targets=(*above, "query"), strict=True, **options)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_it_is_called_and_the_key_is_the_models(
    install: Install, model: type[Prologue], dynamic: bool
) -> None:
    install()
    graph = graph_of(model(), *MODELS[model](), dynamic=dynamic)
    products = _products(graph)
    (fusion,) = mf.fuse(graph, _asked(verify="all")).fused
    assert (fusion.operator, fusion.target) == (NAME, "query")
    assert set(fusion.replaced.values()) == {"query", "query_rope"}
    joined = model is prologues.FusedQkvA  # then W_dq's product is the key's as well
    assert _calls(graph, NAME) == 1 and _products(graph) == products - (2 if joined else 3)
    assert "left to the model" in fusion.placement and not fusion.staged_by and not fusion.leaves
    assert fusion.proof and not any("512 columns" in line for line in fusion.proof)
    assert fusion.certificate is None, "mla-fusion check-proof does not know the operator"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_it_errs_no_more_than_the_model(install: Install, model: type[Prologue]) -> None:
    install()
    made, args = model(), MODELS[model]()
    ran = compiled(made, clones(args), mf.backend(_asked()))
    assert mf.reports()[-1].fused[0].operator == NAME
    assert_as_exact(made, args, ran, slack=prologues.COMPLEX)


def test_it_stands_below_the_others(install: Install) -> None:
    install()
    graph = traced_graph(prologues.PagedRotateHalf(), *paged_args())
    (fusion,) = mf.fuse(graph, _asked("v3")).fused
    assert fusion.target == "v3"


def test_what_its_check_refuses(install: Install) -> None:
    def check(token_x: Tensor, **others: Any) -> None:
        raise ContractError("dims.he", "token_x", "He below 64", token_x.shape[-1])

    install(check=check)
    graph = traced_graph(prologues.PagedRotateHalf(), *paged_args())
    rejection = refused(graph, _asked())
    assert rejection.code == "contract:dims.he" and "He below 64" in rejection.message


def test_a_definition_that_is_not_the_models(install: Install) -> None:
    def exact(call: Call) -> list[Num]:
        query, query_rope = query_side.exact(call)
        return [query * query, query_rope]

    install(exact=exact)
    graph = traced_graph(prologues.PagedRotateHalf(), *paged_args())
    assert refused(graph, _asked(verify="off")).code == "proof.differs"


def test_a_kernel_that_is_not_its_definition(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    computed = query_side.numerics.rms_norm
    monkeypatch.setattr(query_side.numerics, "rms_norm", lambda *given: computed(*given).flip(-1))
    graph = traced_graph(prologues.PagedRotateHalf(), *paged_args())
    assert refused(graph, _asked()).code == "verify.mismatch"


def test_its_operator_outlives_a_second_definition(install: Install) -> None:
    """As all that are defined here do when torch_npu is imported after them."""
    install()
    shapes = [(4, 32), (32, 48), (48, 2 * 24), (2, 16, 64), (48,), (4, 8), (4, 8)]
    given = [torch.randn(shape).bfloat16() for shape in shapes]
    operator = getattr(torch.ops.npu, NAME)
    wanted = operator(*given)
    ops.withdraw()
    ops.provide()
    for device in ("cpu", "meta"):
        found = operator(*(item.to(device) for item in given))
        assert [item.shape for item in found] == [(4, 2, 64), (4, 2, 8)]
    assert all(map(torch.equal, wanted, getattr(torch.ops.npu, NAME)(*given)))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_one_that_ends_before_the_up_projections(
    install: Install, model: type[Prologue], dynamic: bool
) -> None:
    install("latent")
    graph = graph_of(model(), *MODELS[model](), dynamic=dynamic)
    products = _products(graph)
    asked = mf.Config(targets=("latent",), strict=True, verify="all")
    (fusion,) = mf.fuse(graph, asked).fused
    assert set(fusion.replaced.values()) == {"query_norm"}
    assert fusion.placement == "query_norm alone: the caches are left to the model"
    norm, tokens, *_ = fusion.proof
    assert norm.startswith("RMSNorm of 1536") and tokens.startswith("tokens: ")
    assert _calls(graph, query_latent.OPERATOR.name) == 1
    assert _products(graph) == products - (model is not prologues.FusedQkvA)


@pytest.mark.parametrize("name", MADE_UP)
def test_x_is_given_in_the_dtype_of_the_weights(install: Install, name: str) -> None:
    """Where the model projects a float32 copy of it."""
    install(name)
    graph = graph_of(projections.WideProducts(), *paged_args())
    asked = mf.Config(targets=(name,), strict=True, verify="all")
    assert mf.fuse(graph, asked).fused
