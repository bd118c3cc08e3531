"""The algebra of attention states: parts of a context merged into the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from mla_fusion.meta import ContractError
from torch import Tensor

from mla_fusion.models.attention.merge import merge_state, merge_states
from tests.models.paged import BLOCK, BLOCKS, HCKV, LENGTHS, N, Paged, bits, close


def state(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    v = torch.empty(5, N, HCKV).normal_(generator=generator).to(dtype)
    return v, torch.empty(5, N).normal_(0, 8, generator=generator)


class TestMerging:
    @pytest.mark.parametrize("cut", [0, BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK])
    def test_split_at_every_block_equals_the_whole(self, cut: int) -> None:
        """The context cut behind `cut` positions: each part is an attention over a part of the
        block table.
        """
        paged = Paged()
        query, query_rope = paged.queries(4)
        lengths = torch.tensor(LENGTHS)
        blocks = cut // BLOCK
        first = paged.attend(
            query,
            query_rope,
            block_tables=paged.tables[:, :blocks],
            seq_lens=lengths.clamp(max=cut),
            return_lse=True,
        )
        second = paged.attend(
            query,
            query_rope,
            block_tables=paged.tables[:, blocks:],
            seq_lens=(lengths - cut).clamp(min=0),
            return_lse=True,
        )
        for found, wanted in zip(
            merge_state(*first, *second),
            paged.attend(query, query_rope, return_lse=True),
            strict=True,
        ):
            close(found, wanted)

    def test_every_position_as_a_boundary(self) -> None:
        paged = Paged()
        query, query_rope = paged.queries(4)
        positions = torch.arange(BLOCKS * BLOCK).expand(4, -1)
        whole = paged.attend(query, query_rope, return_lse=True)
        for cut in range(0, BLOCKS * BLOCK + 1, 3):
            parts = [
                paged.attend(query, query_rope, mask=mask, return_lse=True)
                for mask in (positions < cut, positions >= cut)
            ]
            for found, wanted in zip(merge_state(*parts[0], *parts[1]), whole, strict=True):
                close(found, wanted)

    def test_shared_prefix(self) -> None:
        """Cascade: every token over the one prefix, and over its own suffix; merged."""
        paged = Paged(lengths=[64, 37, 1, 64])
        prefix = paged.tables[:1]
        query, query_rope = paged.queries(3)
        whole_prefix = paged.attend(
            query, query_rope, block_tables=prefix.expand(3, -1), seq_lens=[64] * 3, return_lse=True
        )
        suffix = paged.attend(
            query, query_rope, block_tables=paged.tables[1:], seq_lens=[37, 1, 64], return_lse=True
        )
        joined = torch.cat((prefix.expand(3, -1), paged.tables[1:]), dim=1)
        want = paged.attend(
            query, query_rope, block_tables=joined, seq_lens=[64 + 37, 64 + 1, 128], return_lse=True
        )
        for found, wanted in zip(merge_state(*whole_prefix, *suffix), want, strict=True):
            close(found, wanted)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("garbage", [0.0, float("nan"), float("inf")])
    def test_the_empty_state_is_the_identity_bit_by_bit(
        self, dtype: torch.dtype, garbage: float
    ) -> None:
        v, s = state(torch.Generator().manual_seed(1), dtype)
        v[0, 0, :3] = torch.tensor([-0.0, 0.0, 1e-30], dtype=dtype)
        empty = torch.full_like(v, garbage), torch.full_like(s, float("-inf"))
        for merged in (merge_state(v, s, *empty), merge_state(*empty, v, s)):
            assert merged[0].dtype == dtype
            assert torch.equal(bits(merged[0]), bits(v))
            assert torch.equal(bits(merged[1]), bits(s))
        several = merge_states(
            torch.stack((empty[0], v, empty[0]), dim=1), torch.stack((empty[1], s, empty[1]), dim=1)
        )
        assert torch.equal(several[0], v) and torch.equal(several[1], s)

    def test_nothing_with_nothing_is_nothing(self) -> None:
        v, s = torch.full((5, N, HCKV), float("nan")), torch.full((5, N), float("-inf"))
        for merged in (merge_state(v, s, v, s), merge_states(v.unsqueeze(1), s.unsqueeze(1))):
            assert torch.equal(merged[0], torch.zeros_like(v)) and torch.equal(merged[1], s)

    def test_order_and_grouping_do_not_matter(self) -> None:
        """float32 against float64 of the same states; rtol 1e-5."""
        generator = torch.Generator().manual_seed(2)
        states = [state(generator) for _ in range(4)]
        exact = merge_states(
            torch.stack([v.double() for v, _ in states], 1),
            torch.stack([s.double() for _, s in states], 1),
        )
        assert exact[0].dtype == exact[1].dtype == torch.float64
        for order in itertools.permutations(states):
            a, b, c, d = order
            left = merge_state(*merge_state(*merge_state(*a, *b), *c), *d)
            right = merge_state(*a, *merge_state(*b, *merge_state(*c, *d)))
            at_once = merge_states(
                torch.stack([v for v, _ in order], 1), torch.stack([s for _, s in order], 1)
            )
            for merged in (left, right, at_once):
                torch.testing.assert_close(merged[0].double(), exact[0], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(merged[1].double(), exact[1], rtol=1e-6, atol=1e-6)

    def test_merging_is_commutative_exactly(self) -> None:
        generator = torch.Generator().manual_seed(3)
        a, b = state(generator), state(generator)
        for one, other in zip(merge_state(*a, *b), merge_state(*b, *a), strict=True):
            assert torch.equal(one, other)

    def test_large_scores_do_not_overflow(self) -> None:
        v = torch.stack((torch.zeros(1, N, HCKV), torch.ones(1, N, HCKV)))
        for offset in (-1e4, 0.0, 1e4):
            s = torch.full((1, N), offset)
            merged, lse = merge_state(v[0], s, v[1], s)
            assert torch.equal(merged, torch.full_like(merged, 0.5))
            torch.testing.assert_close(lse, s + torch.tensor(2.0).log())

    def test_shapes_are_checked(self) -> None:
        v, s = torch.zeros(3, N, HCKV), torch.zeros(3, N)
        refused = {
            "merge.v_b": lambda: merge_state(v, s, v[:2], s),
            "merge.s_a": lambda: merge_state(v, s[:, :1], v, s),
            "merge.s_b": lambda: merge_state(v, s, v, s.unsqueeze(-1)),
            "merge.v": lambda: merge_states(v, s),
            "merge.s": lambda: merge_states(v.unsqueeze(1), s),
        }
        for code, call in refused.items():
            with pytest.raises(ContractError) as error:
                call()
            assert error.value.code == code
