"""A model with a table of so many positions takes no more tokens: the second witness draws as many
as it takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

import mla_fusion as mf
from tests.catalogue.base import DR, paged_args
from tests.catalogue.prologues import PagedRotateHalf
from tests.harness import traced_graph

ROWS = 61  # fewer than are drawn where nothing limits them
Take = Callable[[Tensor, Tensor], Tensor]
TAKES: dict[str, Take] = {
    "index": lambda table, tokens: table[tokens],
    "index_select": lambda table, tokens: table.index_select(0, tokens),
    "embedding": lambda table, tokens: F.embedding(tokens, table),
    "from the last": lambda table, tokens: table.flip(0)[-1 - tokens],
    "slice": lambda table, tokens: table[: tokens.shape[0]],
    "narrow": lambda table, tokens: table.narrow(0, 0, tokens.shape[0]),
}


class OfTable(PagedRotateHalf):
    """The angle of token t is row t of a table."""

    def __init__(self, take: Take, doubled_from: int = ROWS) -> None:
        super().__init__()
        self.take, self.doubled_from = take, doubled_from
        angles = torch.rand(ROWS, DR // 2).repeat(1, 2)
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())

    def forward(self, x: Tensor, *caches: Tensor) -> Tensor:
        tokens = torch.arange(x.shape[0])
        cos, sin = (self.take(table, tokens) for table in (self.cos, self.sin))
        if self.doubled_from < ROWS:
            cos = torch.where((tokens >= self.doubled_from).unsqueeze(-1), 2 * cos, cos)
        return super().forward(x, cos, sin, *caches)


def _graph(model: OfTable) -> GraphModule:
    x, _, _, *caches = paged_args()
    return traced_graph(model, x, *caches, dynamic=True)


@pytest.mark.parametrize(
    "name",
    [
        "index",
        "slice",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("index_select", "embedding", "from the last", "narrow")
        ),
    ],
)
def test_as_many_tokens_as_the_table_has_rows(name: str) -> None:
    (fusion,) = mf.fuse(_graph(OfTable(TAKES[name])), mf.Config(verify="all")).fused
    (most,) = re.findall(r"and (\d+), ", fusion.compared)
    assert ROWS * 3 // 4 < int(most) <= ROWS, fusion.compared


def test_angles_of_late_tokens() -> None:
    """A table with other rows behind the tokens of the graph is a table like any other, and every
    one of its rows is compared.
    """
    model = OfTable(TAKES["index"], ROWS - 1)
    report = mf.fuse(_graph(model), mf.Config(verify="all"))
    assert report.fused or report.rejected[0].code != "verify.mismatch", str(report)
