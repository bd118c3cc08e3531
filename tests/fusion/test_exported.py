"""Graphs as torch.export makes them: dtypes stated before each cast, products not taken apart,
sizes that no step asks for.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import dropout

import mla_fusion as mf
from mla_fusion.fx.kinds import word
from tests.catalogue.base import DR, HCKV, Base, Prologue, attend, paged_args, rotated
from tests.catalogue.int8 import Full
from tests.catalogue.int8_caches import PackedRows, PlainCache, int8_cache_args, packed_args
from tests.catalogue.int8_plain import PlainFull, PlainPartial
from tests.catalogue.layouts import sequence_args
from tests.exhaustive import one_in
from tests.harness import assert_as_exact, clones, flat

# steps of a prologue: what stays of them is computed twice
_STEPS = frozenset(("rsqrt", "linear", "_int_mm", "npu_quant_matmul"))

Args = tuple[Tensor, ...]


def exported(model: Prologue, args: Args, **options: object) -> GraphModule:
    program = torch.export.export(model, args, strict=False, **options)  # type: ignore[arg-type]
    module = program.run_decompositions({}).module()
    assert isinstance(module, GraphModule)
    return module


def check(model: Prologue, gm: GraphModule, args: Args) -> None:
    given = clones(args)
    with torch.no_grad():
        found = [*flat(gm(*given)), *given]
    assert_as_exact(model, args, found)


MODELS = dict.fromkeys((Base, Full, PlainPartial, PlainFull), paged_args)
MODELS |= {PlainCache: int8_cache_args, PackedRows: packed_args}


@pytest.mark.parametrize("model, args", one_in(1, MODELS.items()))
def test_nothing_is_computed_twice(model: type[Prologue], args: object) -> None:
    assert callable(args)
    gm = exported(model(), args())
    assert any(word(node) == "_assert_tensor_metadata" for node in gm.graph.nodes)
    report = mf.fuse(gm)
    assert [item.placement for item in report.fused] == ["in place"], str(report)
    assert not [node for node in gm.graph.nodes if word(node) in _STEPS]


def test_a_weight_of_two_names() -> None:
    model, args = Base(), paged_args()
    model.again = torch.nn.ModuleList([model.q_a_proj, model.q_a_layernorm])
    gm = exported(model, args)
    assert mf.fuse(gm).fused
    model.q_a_layernorm.weight.data.mul_(1.5)
    check(model, gm, args)


class OfSequences(Prologue):
    """[B, S, He]; W_uk by an equation with an ellipsis."""

    equation = "...nd,ndc->...nc"

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        query = torch.einsum(self.equation, q_nope, self.w_uk())
        q_pe = rotated(q_pe, cos.unsqueeze(-2), sin.unsqueeze(-2))
        kv_cache.view(-1, HCKV)[slots] = c_kv
        kr_cache.view(-1, DR)[slots] = rotated(k_pe, cos, sin)
        return attend(query, q_pe, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


def test_an_equation_with_an_ellipsis() -> None:
    model, args = OfSequences(), sequence_args()
    gm = exported(model, args)
    report = mf.fuse(gm)
    assert [item.placement for item in report.fused] == ["in place"], str(report)
    check(model, gm, args)


def test_sizes_that_no_step_asks_for() -> None:
    model, args = OfSequences(), sequence_args(4, 3)
    auto = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    gm = exported(model, args, dynamic_shapes=(auto, auto, auto, {}, {}, auto))
    report = mf.fuse(gm)
    assert len(report.fused) == 1 and not report.rejected, str(report)
    assert not [node for node in gm.graph.nodes if word(node) in _STEPS]
    for lead in ((4, 3), (5, 2), (2, 7)):
        other = sequence_args(*lead)
        check(model, gm, other)


class ReturnsCache(Base):
    """A cache that it writes: the copy into the input, which has no meta value, is read."""

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        return (*super().forward(*args), args[3])


def test_a_copy_into_an_input_that_is_returned() -> None:
    model, args = ReturnsCache(), paged_args()
    gm = exported(model, args)
    undescribed = [node for node in gm.graph.nodes if word(node) == "copy_" and node.users]
    assert undescribed and not any("val" in node.meta for node in undescribed)
    explained = mf.explain(gm)
    assert len(explained.fused) == 1 and not any("val" in node.meta for node in undescribed)
    report = mf.fuse(gm)
    assert [item.placement for item in report.fused] == ["in place"], str(report)
    check(model, gm, args)


class Masked(Base):
    """Beside the prologue, an input is cast."""

    def forward(self, mask: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        return (*super().forward(*args), mask.float())


def test_what_is_stated_of_an_input_stays() -> None:
    mask = torch.randn(4).bfloat16()
    gm = exported(Masked(), (mask, *paged_args()))
    assert mf.fuse(gm).fused
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        gm(mask.half(), *paged_args())


STEPS = {
    "": lambda sin, slots: None,
    "dropout": lambda sin, slots: dropout(slots, 0.1, False).bitwise_xor_(1),
    "einsum": lambda sin, slots: torch.einsum("a->a", slots).bitwise_xor_(1),
    "swapdims": lambda sin, slots: torch.swapdims(sin, 0, 1)[:1].fill_(1),
}


class InSteps(Base):
    step = ""

    def forward(self, x, cos, sin, kv_cache, kr_cache, slots):  # type: ignore[no-untyped-def,override]
        STEPS[self.step](sin, slots)
        return super().forward(x if len(x) > 6 else x * 2, cos, sin, kv_cache, kr_cache, slots)


@pytest.mark.parametrize("step", STEPS)
def test_steps_through_operators_that_torch_makes_of_others(step: str) -> None:
    model, args = InSteps().eval(), paged_args(4)
    model.step = step
    sizes = [{0: torch.export.Dim.AUTO} if len(arg.shape) < 4 else None for arg in args]
    gm = torch.export.export(model, args, dynamic_shapes=sizes, strict=False).module()
    assert isinstance(gm, GraphModule) and (mf.fuse(gm).fused or step)
    check(model, gm, args)
    with torch.no_grad(), pytest.raises(Exception, match="Guard failed"):
        gm(*paged_args(8))


COPIES = {
    "x": lambda x, cos: x[1:].copy_(x[:-1].clone()),
    "tables": lambda x, cos: cos[1:].copy_(cos[:-1].clone()),
    "whole": lambda x, cos: cos.copy_(cos.flip(0) + 1),
    "between": lambda x, cos: cos[1:].copy_(cos[:-1].clone()),
}


class Overwritten(Prologue):
    """Copies into what the call reads, and into what its results are multiplied by."""

    what = ""

    def forward(self, x, cos, sin, kv_cache, kr_cache, slots):  # type: ignore[no-untyped-def]
        q_nope, q_pe = self.query(x)
        c_kv, k_pe = self.latent(x)
        if self.what == "x":
            COPIES["x"](x, cos)
        factor = 1 if self.what == "between" else cos[:, 3:4, None]
        query = self.absorb(q_nope * factor).float().sin()
        if self.what == "between":  # a result that is read, and a table that comes later
            COPIES[self.what](x, cos)
        c = cos * 1.5
        q_pe = rotated(q_pe, c.unsqueeze(1), sin.unsqueeze(1)) * factor
        kv_cache.view(-1, HCKV)[slots] = c_kv
        kr_cache.view(-1, DR)[slots] = rotated(k_pe, c, sin)
        if self.what in ("tables", "whole"):
            COPIES[self.what](x, cos)
        return query, q_pe.float().sin()


@pytest.mark.parametrize("what", COPIES)
def test_copies_into_what_is_read_come_after_it(what: str) -> None:
    model, args = Overwritten(), paged_args()
    model.what = what
    gm = torch.export.export(model, args, strict=False).module()
    assert isinstance(gm, GraphModule) and bool(mf.fuse(gm).fused) == (what != "between")
    check(model, gm, args)


class GammaOverwritten(Base):
    is_first = False

    def forward(self, x: Tensor, *args: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        c_kv, _ = self.latent(x)
        results = () if self.is_first else super().forward(x, *args)
        gamma = self.q_a_layernorm.weight
        gamma[::2].copy_(gamma[::2].roll(1))
        return *(results or super().forward(x, *args)), c_kv.sin()


@pytest.mark.parametrize("is_first", [False, True])
def test_an_attribute_that_two_nodes_read_is_one_memory(is_first: bool) -> None:
    model, args = GammaOverwritten(), paged_args()
    model.is_first = is_first
    before = deepcopy(model)
    with torch.no_grad():
        gm = make_fx(lambda *a: model(*a), tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    assert not mf.fuse(gm).fused
    check(before, gm, args)
