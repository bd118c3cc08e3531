"""``mf.prepack`` of a model of 61 layers: memory added and memory held meanwhile."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.weights import prepack
from tests.catalogue import prologues
from tests.weights.own import OwnAbsorb, storage_bytes

pytestmark = pytest.mark.usefixtures("fresh")
LAYERS = 61


@pytest.mark.exhaustive
@pytest.mark.slow
def test_sixty_one_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every live storage of a float counts, whoever holds it, each time that a weight is laid
    out.
    """
    model = prologues.Layers(OwnAbsorb, LAYERS)
    args = prologues.layers_args(count=LAYERS)
    one_layer = storage_bytes(model.layers[0].parameters())  # type: ignore[union-attr,operator,arg-type]
    usual, seen = prepack.Without.run, list[int]()

    def run(self: Any, *given: Any) -> Any:
        found = usual(self, *given)
        if isinstance(found, Tensor) and not found.is_meta:
            seen.append(storage_bytes([*model.parameters(), found]))
        return found

    monkeypatch.setattr(prepack.Without, "run", run)
    before, alive = storage_bytes(model.parameters()), live_bytes()
    done = mf.prepack(model, *args)
    assert done.laid_out == 3 * LAYERS and done.bytes_copied == 0
    assert storage_bytes(model.parameters()) == before == done.bytes_after
    assert live_bytes() <= alive + 2**16, "nothing that was made meanwhile is held"
    assert len(seen) >= 3 * LAYERS and max(seen) - before == done.peak_over_end <= one_layer


def live_bytes() -> int:
    """Of all tensors that Python knows, memory that several share counted once."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    return storage_bytes([tensor for tensor in tensors if tensor.device.type == "cpu"])
