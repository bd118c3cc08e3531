"""The fused cache operator reads cos and sin as columns of one table."""

import pytest
import torch
from torch import Tensor

import mla_fusion as mf
from tests.catalogue.base import DR, HCKV, Base, attend, npu, paged_args
from tests.harness import outcome, refused, traced_graph


class Joined(Base):
    """A table [T, 2 Dr]: cos, then sin."""

    def of_key(self, table: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = table.chunk(2, -1)
        return cos, sin

    of_query = of_key

    def forward(  # type: ignore[override]
        self, x: Tensor, table: Tensor, kv_cache: Tensor, kr_cache: Tensor, slots: Tensor
    ) -> Tensor:
        q_nope, q_pe = self.split(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        cos, sin = self.of_query(table)
        query_rope = self.rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))
        npu.npu_kv_rmsnorm_rope_cache_v2(
            self.kv_a_proj_with_mqa(x).view(-1, 1, 1, HCKV + DR),
            self.kv_a_layernorm.weight,
            *(part.reshape(-1, 1, 1, DR) for part in self.of_key(table)),
            slots,
            kr_cache,
            kv_cache,
            epsilon=1e-6,
            cache_mode="PA_BNSD",
        )
        query = self.absorb(q_nope)
        return attend(query, query_rope, kv_cache.view(-1, HCKV), kr_cache.view(-1, DR))


class Interleaved(Joined):
    """cos and sin by turns."""

    def of_key(self, table: Tensor) -> tuple[Tensor, Tensor]:
        return table[..., ::2], table[..., 1::2]

    of_query = of_key


class Swapped(Joined):
    def of_key(self, table: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = table.chunk(2, -1)
        return sin, cos


class Otherwise(Joined):
    """The key's table is read as one by turns."""

    of_key = Interleaved.of_key


def arguments() -> tuple[Tensor, ...]:
    x, cos, sin, *others = paged_args()
    return (x, torch.cat([cos, sin], -1), *others)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", [Joined, Interleaved])
def test_columns_of_one_table(kind: type[Joined], dynamic: bool) -> None:
    report = mf.fuse(
        traced_graph(kind(), *arguments(), dynamic=dynamic), mf.Config(strict=True, verify="all")
    )
    assert outcome(report) == ("in place",), str(report)


@pytest.mark.parametrize("kind", [Swapped, Otherwise])
def test_other_columns_of_one_table(kind: type[Joined]) -> None:
    assert refused(traced_graph(kind(), *arguments())).code == "rope.tables_differ"
