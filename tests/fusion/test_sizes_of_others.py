"""Tables are viewed by sizes that the exporter reads off another input than the one it views: an
input whose shape is read beside its values is an input, not a step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.export import Dim, export

import mla_fusion as mf
from tests.catalogue.base import DR, HE, Base, paged_args
from tests.exhaustive import one_in
from tests.harness import assert_no_worse, clones, eager, exact, outcome

Rows = Callable[[Tensor, int], Tensor]


def flattened(t: Tensor, width: int) -> Tensor:
    return t.flatten(0, 1)


def reshaped(t: Tensor, width: int) -> Tensor:
    return t.reshape(-1, width)


class Sequences(Base):
    """x, tables and slots of shape [B, S, ..]."""

    def __init__(self, of_x: Rows, of_tables: Rows) -> None:
        super().__init__()
        self.of_x, self.of_tables = of_x, of_tables

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        cos, sin = self.of_tables(cos, DR), self.of_tables(sin, DR)
        return super().forward(self.of_x(x, HE), cos, sin, kv_cache, kr_cache, slots.flatten())


def arguments(batch: int, length: int) -> tuple[Tensor, ...]:
    x, cos, sin, kv, kr, slots = paged_args(batch * length)
    x, cos, sin = (t.unflatten(0, (batch, length)) for t in (x, cos, sin))
    return x, cos, sin, kv, kr, slots.view(batch, length)


@pytest.mark.parametrize("of_x", one_in(1, [flattened, reshaped]))
def test_tables_flattened_by_the_sizes_of_x(of_x: Rows) -> None:
    torch.manual_seed(0)
    model = Sequences(of_x, flattened)
    sizes = {0: Dim("B", min=2, max=8), 1: Dim("S", min=2, max=7)}
    with torch.no_grad():
        exported = export(
            model,
            arguments(3, 4),
            dynamic_shapes=(sizes, sizes, sizes, None, None, sizes),
        )
    gm = exported.run_decompositions({}).module()
    assert outcome(mf.fuse(gm, mf.Config(strict=True))) == ("in place",)
    for batch, length in ((3, 4), (2, 7)):
        args = arguments(batch, length)
        fused = clones(args)
        with torch.no_grad():
            found = gm(*fused)
        unfused = eager(model, clones(args))
        assert_no_worse(exact(model, args), unfused, [*found, *fused])
