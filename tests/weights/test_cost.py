"""What a step costs on a device by ``Config.updates``, counted on meta tensors: docs/weights.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mla_fusion.weights.rounds import STEPS_A_LOOK_OF_OTHERS
from mla_fusion.weights.source import SHARE_OF_OTHERS, Shares, fingerprint

PAGE = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
# DeepSeek-V3, one rank: W_dq, W_uq_qr, W_dkv_kr, W_uk of a layer
SHAPES = (7168, 1536), (1536, 128 * 192), (7168, 576), (128, 128, 512)
LAYER = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in SHAPES]
LAYERS = 61
BYTES = LAYERS * sum(weight.nbytes for weight in LAYER)


@dataclass
class Cost:
    """Of operators that are no views: how many, and the bytes of what they read and write."""

    launches: int = 0
    traffic: int = 0


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and func not in (
            torch.ops.aten.detach.default,
            torch.ops.aten.empty.memory_format,
        ):
            tensors = [
                leaf for leaf in tree_leaves((args, kwargs, found)) if isinstance(leaf, Tensor)
            ]
            self.cost.launches += 1
            self.cost.traffic += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return found


def cost(function: Callable[[], Any]) -> Cost:
    function()  # the keys are made once
    with Counting() as mode:
        function()
    return mode.cost


def test_a_look_of_rounds() -> None:
    shares = Shares(LAYER[1])
    content = torch.empty(shares.count, dtype=torch.int64, device="meta")
    looked = cost(lambda: shares.fingerprint(0) == content[0])
    size = shares.size * shares.rows[0].nbytes
    assert (
        SHARE_OF_OTHERS * 0.99 < size <= SHARE_OF_OTHERS == 32 << 20 and STEPS_A_LOOK_OF_OTHERS == 4
    )
    times = looked.traffic / size
    assert f"reads 32 MiB, {times:.0f} times that in traffic and {looked.launches} launches" in PAGE
    steps = STEPS_A_LOOK_OF_OTHERS * LAYERS * sum(Shares(weight).count for weight in LAYER)
    assert f"{BYTES / 1e9:.1f} GB: {steps:,} steps" in PAGE


def test_every_call_reads_everything() -> None:
    known = [
        torch.empty(Shares(weight).count, dtype=torch.int64, device="meta") for weight in LAYER
    ]
    read = cost(
        lambda: [
            fingerprint(weight) == content for weight, content in zip(LAYER, known, strict=True)
        ]
    )
    assert (
        f"{read.traffic * LAYERS / 1e9:.0f} GB of traffic and {read.launches * LAYERS:,} launches"
        in PAGE
    )


@pytest.mark.parametrize(
    "words", ['| `"counted"` | before the next call | not at all', "no launch and no byte"]
)
def test_counted_reads_nothing(words: str) -> None:
    """test_step.py counts the operators of such a step: none."""
    assert words in PAGE
