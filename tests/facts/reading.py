"""Facts of small graphs, read as the pass reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mla_fusion.facts import projection
from mla_fusion.facts.projection import Projection
from mla_fusion.facts.reading import ConeFacts, FactReader
from mla_fusion.facts.rmsnorm import NormFact
from mla_fusion.facts.rope import RopeFact
from mla_fusion.fx.view import View
from tests.fx.tracing import floats, view

T, HE = 5, 16


def read(graph: View) -> tuple[list[Projection], list[ConeFacts]]:
    """Every projection of the graph, and what its cone holds."""
    found = projection.find(graph)
    reader = FactReader(graph, found)
    return found, [reader.read(item) for item in found]


def behind(
    step: Callable[..., Any], width: int, *others: Tensor, tokens: int = T, symbolic: bool = False
) -> View:
    """``step`` behind a product [tokens, width]; other inputs come after it."""
    x, w = floats(tokens, HE), floats(HE, width)
    return view(lambda x, w, *rest: step(x @ w, *rest), x, w, *others, symbolic=symbolic)


def norms(
    step: Callable[..., Any], width: int, *others: Tensor, tokens: int = T, symbolic: bool = False
) -> list[NormFact]:
    return read(behind(step, width, *others, tokens=tokens, symbolic=symbolic))[1][0].norms


def ropes(
    step: Callable[..., Any], width: int, *others: Tensor, tokens: int = T, symbolic: bool = False
) -> list[RopeFact]:
    return read(behind(step, width, *others, tokens=tokens, symbolic=symbolic))[1][0].ropes
