"""``quant.dynamic`` says in what plain nodes quantise otherwise than the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.catalogue.base import paged_args
from tests.catalogue.int8_plain import PlainFull, PlainLinear, PlainPartial, largest, to_int8
from tests.catalogue.int8_plain_models import model_of
from tests.harness import graph_of, refused

Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]


def _by(most: float) -> Quantise:
    def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = largest(rows) / most
        return to_int8(rows / scale), scale

    return quantise


def _rounded(how: Callable[[Tensor], Tensor]) -> Quantise:
    def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = largest(rows) / 127
        return how(rows / scale).clamp(-128, 127).to(torch.int8), scale

    return quantise


def _of_all(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = (rows.abs().amax() / 127).expand(rows.shape[0], 1)
    return to_int8(rows / scale), scale


def _by_another(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = rows.square().mean(-1, keepdim=True).sqrt() / 40
    return to_int8(rows / scale), scale


OTHERWISE: dict[str, tuple[Quantise, str]] = {
    "128 steps": (_by(128), "max|row| / 128"),
    "255 steps": (_by(127.5), "max|row| / 127.5"),
    "four bits": (_by(7), "max|row| / 7"),
    "truncated": (_rounded(lambda x: x), "rounded (half to even), from -128 to 127"),
    "floor": (_rounded(torch.floor), "rounded (half to even), from -128 to 127"),
    "half up": (_rounded(lambda x: (x + 0.5).floor()), "rounded (half to even), from -128 to 127"),
    "within 126": (_rounded(lambda x: x.round().clamp(-126, 126)), "from -128 to 127"),
    "of all tokens": (_of_all, "cannot be shown to be max|row| / 127 of each token"),
    "of the root mean square": (_by_another, "cannot be shown to be max|row| / 127 of each token"),
}


@pytest.mark.parametrize("kind", [PlainFull, PlainPartial])
@pytest.mark.parametrize("name", OTHERWISE)
def test_the_difference_is_named(name: str, kind: Any) -> None:
    quantise, said = OTHERWISE[name]

    class Otherwise(PlainLinear):
        def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return quantise(x.float())

    rejection = refused(graph_of(model_of(kind, Otherwise), *paged_args()))
    assert said in rejection.message, rejection.message
