"""A mask beside the new rows is no quantisation of them."""

from torch import Tensor, nn

import mla_fusion as mf
from tests.catalogue.base import Base, paged_args
from tests.harness import traced_graph


class Dropped(Base):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c_kv, k_pe = super().latent(x)
        return self.dropout(c_kv), k_pe


def test_dropout_changes_rows_and_quantises_none() -> None:
    (fusion,) = mf.fuse(traced_graph(Dropped().train(), *paged_args())).fused
    assert "changes the new rows before they are written" in fusion.placement, fusion.placement
