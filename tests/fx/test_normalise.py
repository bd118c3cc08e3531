"""The forms of a graph that the pass looks at: empty parts dropped, assemblies taken apart, the
graph untouched.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from mla_fusion.fx import empty_parts
from mla_fusion.fx.normalise import forms
from mla_fusion.fx.workplace import workplace
from tests.fx.tracing import floats, trace

GIVEN = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def targets(gm: GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def assembled(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :3] = x[:, 3:] * 2
    out[:, 3:] = x[:, :3]
    return out


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda x: x * 2, 1),
        (lambda x: torch.cat([x * 2, x[:, 6:]], -1), 1),
        (assembled, 2),
    ],
)
def test_each_form_computes_the_same_and_the_graph_stays(
    fn: Callable[[Tensor], Tensor], count: int
) -> None:
    gm = trace(fn, GIVEN)
    before, wanted = str(gm.graph), gm(GIVEN)
    found = list(forms(gm))
    assert len(found) == count
    for form in found:
        form.recompile()
        torch.testing.assert_close(form(GIVEN), wanted, rtol=0, atol=0)
    assert str(gm.graph) == before


def test_what_was_assembled_is_a_join_of_its_parts() -> None:
    whole, apart = forms(trace(assembled, GIVEN))
    assert any("scatter" in name for name in targets(whole))
    assert not any("scatter" in name for name in targets(apart)) and "aten.cat.default" in targets(
        apart
    )


def test_a_join_with_nothing_is_the_other_part() -> None:
    gm = trace(lambda x: torch.cat([x * 2, x[:, 6:], x[:, :0]], -1), GIVEN)
    assert empty_parts.found(gm.graph)
    empty_parts.drop(gm.graph)
    assert targets(gm) == ["aten.mul.Tensor"] and not empty_parts.found(gm.graph)


def test_a_slice_of_the_whole_is_what_it_is_taken_of() -> None:
    """AOT leaves it in the graph where the size is symbolic."""

    def sliced(x: Tensor) -> Tensor:
        return torch.ops.aten.slice.Tensor(x * 2, 0, 0, 2**63 - 1) + 1

    gm = trace(sliced, GIVEN, symbolic=True)
    assert empty_parts.found(gm.graph)
    empty_parts.drop(gm.graph)
    assert not any("slice" in name for name in targets(gm)) and "aten.mul.Tensor" in targets(gm)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.ops.aten.slice.Tensor(x, 0, 1, 2**63 - 1) * 1,  # all but the first
        lambda x: torch.ops.aten.slice.Tensor(x, 1, 0, 6, 2) * 1,  # every other
        lambda x: torch.cat([x, x[:, 5:]], -1),  # one column
        lambda x: torch.cat([x[:, :3], x[:, 3:]], -1),  # two parts
        lambda x: (
            torch.cat([x.double(), x[:, 6:]], -1)[:, :6] if x.dtype == torch.float16 else x * 1
        ),
    ],
)
def test_other_joins_stay(fn: Callable[[Tensor], Tensor]) -> None:
    gm = trace(fn, GIVEN)
    before = str(gm.graph)
    assert not empty_parts.found(gm.graph)
    empty_parts.drop(gm.graph)
    assert str(gm.graph) == before


def test_a_workplace_holds_the_same_objects_and_is_called_alike() -> None:
    class Weighted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(6, 2))
            self.register_buffer("bias", torch.randn(2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    gm = torch.fx.symbolic_trace(Weighted())
    made = workplace(gm)
    assert made.weight is gm.weight and made.bias is gm.bias
    assert [node.op for node in made.graph.nodes if node.op != "placeholder"] == []
    made.register_buffer("more", floats(1))
    assert not hasattr(gm, "more")
