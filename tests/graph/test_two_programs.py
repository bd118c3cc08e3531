"""Programs that compute different numbers are different Values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fusion.fx.module_path import ARGUMENT
from mla_fusion.graph.read import Graph

TEXT = (Path(__file__).parent / "two_programs.txt").read_text().partition("\n\n")[2]
INPUTS = {
    "p": torch.arange(20000.0),
    "x": torch.randn(9, 8),
    "w": torch.randn(8, 4),
    "i": torch.arange(4),
    "i8": torch.tensor([1, -2, 3, 0], dtype=torch.int8),
    "i32": torch.arange(4, dtype=torch.int32),
    "rows": torch.randn(4, 3),
    "cube": torch.randn(4, 4, 4),
} | {name: torch.rand(()) for name in "fg"}


@pytest.mark.parametrize("line", TEXT.strip().splitlines())
def test_two_programs_are_two_values(line: str) -> None:
    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        names = dict(zip(INPUTS, tensors, strict=True))
        names |= {"torch": torch, "wx": names["x"] @ names["w"]}
        names |= {"T": names["p"].shape[0], "U": names["x"].shape[0]}
        return [eval(program, names) for program in line.split(" | ")]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        gm = make_fx(run, tracing_mode="symbolic", pre_dispatch=True)(*INPUTS.values())
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), INPUTS, strict=True):
        node.meta[ARGUMENT] = name != "w"
    graph = Graph(gm)
    assert len({graph.readings[node] for node in gm.graph.output_node().args[0]}) == 2
