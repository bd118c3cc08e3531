"""``mf.prepack`` of a model of 61 layers: memory added, memory held meanwhile, and its bar."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.compile import prepack
from mla_fusion.weights import inverse
from tests.catalogue import prologues
from tests.weights.own import OwnAbsorb, storage_bytes

pytestmark = pytest.mark.usefixtures("fresh")
LAYERS = 61


class Bar:
    """Stands in for tqdm."""

    made: list[str] = []  # noqa: RUF012

    def __init__(self, weights: Any, name: str, **_: Any) -> None:
        self.weights = weights
        self.made.append(f"{name} {len(weights)}")

    def __iter__(self) -> Any:
        return iter(self.weights)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_sixty_one_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every live storage of a float counts, whoever holds it, each time that a weight is laid
    out.
    """
    model = prologues.Layers(OwnAbsorb, LAYERS)
    args = prologues.layers_args(count=LAYERS)
    one_layer = storage_bytes(model.layers[0].parameters())  # type: ignore[union-attr,operator,arg-type]
    usual, seen = inverse.Without.run, list[int]()

    def run(self: Any, *given: Any) -> Any:
        found = usual(self, *given)
        if isinstance(found, Tensor) and not found.is_meta:
            seen.append(storage_bytes([*model.parameters(), found]))
        return found

    monkeypatch.setattr(inverse.Without, "run", run)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(prepack, "import_module", lambda _: type("tqdm", (), {"tqdm": Bar}))
    monkeypatch.setattr(Bar, "made", [])
    before, alive = storage_bytes(model.parameters()), live_bytes()
    done = mf.prepack(model, *args)
    assert done.laid_out == 3 * LAYERS and done.bytes_copied == 0
    assert storage_bytes(model.parameters()) == before == done.bytes_after
    assert live_bytes() <= alive + 2**16, "nothing that was made meanwhile is held"
    assert len(seen) >= 3 * LAYERS and max(seen) - before == done.peak_over_end <= one_layer
    assert Bar.made == [f"prepack {4 * LAYERS}"]


def live_bytes() -> int:
    """Of all tensors that Python knows, memory that several share counted once."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    return storage_bytes([tensor for tensor in tensors if tensor.device.type == "cpu"])


@pytest.mark.parametrize("terminal", [False, True])
def test_a_small_model_has_no_bar(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(prepack, "import_module", lambda _: type("tqdm", (), {"tqdm": Bar}))
    monkeypatch.setattr(Bar, "made", [])
    several: Callable[[int], Any] = lambda count: prepack._with_progress([None] * count)  # type: ignore[list-item]  # noqa: E731
    several(4)
    assert not Bar.made
    several(100)
    assert bool(Bar.made) == terminal
    monkeypatch.setattr(prepack, "find_spec", lambda _: None)
    assert len(list(several(100))) == 100 and len(Bar.made) == int(terminal)
