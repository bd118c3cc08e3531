"""The step that stands between two parts of a prologue is named for what it is."""

from __future__ import annotations

from torch import Tensor, nn

from tests.catalogue.base import Base, D, HfNorm, paged_args
from tests.harness import graph_of, refused


class Dropped(Base):
    """Dropout of c_q, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = nn.Sequential(nn.Dropout(0.1), self.q_b_proj)  # type: ignore[assignment]


def test_random_numbers_behind_the_norm_of_the_query() -> None:
    rejection = refused(graph_of(Dropped().train().requires_grad_(False), *paged_args()))
    assert rejection.code == "step.random" and "model.eval()" in rejection.remedy


class NormedHeads(Base):
    """Each head of q_nope is normed once more."""

    def __init__(self) -> None:
        super().__init__()
        self.of_heads = HfNorm(D)

    def absorb(self, q_nope: Tensor) -> Tensor:
        return super().absorb(self.of_heads(q_nope))


def test_a_step_in_front_of_the_absorbed_product() -> None:
    rejection = refused(graph_of(NormedHeads(), *paged_args()))
    assert rejection.code == "absorb.absent"
    assert "bmm multiplies of_heads's mul, not q_nope" in rejection.message
