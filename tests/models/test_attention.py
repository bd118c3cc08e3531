"""Paged latent attention against torch's own attention."""

from __future__ import annotations

import pytest
import torch
from mla_fusion.meta import ContractError

import mla_fusion as mf
from mla_fusion.models.attention import mla_paged_attention
from tests.models.paged import BLOCK, BLOCKS, DR, HCKV, LENGTHS, SCALE, N, Paged, close, dense


class TestReference:
    @pytest.mark.parametrize("counts", [[3, 1, 20, 16], [0, 1, 5, 0], [1, 1, 1, 1]])
    @pytest.mark.parametrize("as_tensor", [True, False])
    def test_several_tokens_are_causal_at_the_end(self, counts: list[int], as_tensor: bool) -> None:
        paged = Paged()
        query, query_rope = paged.queries(sum(counts))
        lens = torch.tensor(counts) if as_tensor else counts
        out, lse = paged.attend(query, query_rope, query_lens=lens, return_lse=True)
        for index, (count, length) in enumerate(zip(counts, LENGTHS, strict=True)):
            tokens = slice(sum(counts[:index]), sum(counts[: index + 1]))
            visible = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            want, want_lse = dense(query[tokens], query_rope[tokens], *paged.keys(index), visible)
            close(out[tokens], want)
            close(lse[tokens], want_lse)

    def test_nothing_to_see_is_the_empty_state(self) -> None:
        paged = Paged(torch.float32, [5, 0])
        query, query_rope = paged.queries(2)
        out, lse = paged.attend(query, query_rope, return_lse=True)
        assert torch.equal(out[1], torch.zeros(N, HCKV))
        assert torch.equal(lse[1], torch.full((N,), float("-inf")))
        assert out[0].isfinite().all() and lse[0].isfinite().all()

    def test_tables_of_other_systems(self) -> None:
        """FlashInfer's triple names the same pages, only those in use."""
        paged = Paged()
        query, query_rope = paged.queries(4)
        ours = mf.paging.PageTable.from_block_table(paged.tables, torch.tensor(LENGTHS), BLOCK)
        theirs = mf.paging.PageTable.from_flashinfer(*ours.to_flashinfer(), BLOCK)
        tables, lengths = theirs.to_block_table()
        found = paged.attend(query, query_rope, block_tables=tables, seq_lens=lengths)
        assert torch.equal(found, paged.attend(query, query_rope))

    @pytest.mark.parametrize("counts", [None, [3, 1, 20, 16]])
    def test_compiles_to_one_graph(self, counts: list[int] | None) -> None:
        paged = Paged(torch.float32)
        query, query_rope = paged.queries(4 if counts is None else sum(counts))
        lens = None if counts is None else torch.tensor(counts)
        torch._dynamo.reset()
        compiled = torch.compile(mla_paged_attention, backend="aot_eager", fullgraph=True)
        arguments = (query, query_rope, paged.kv, paged.kr, paged.tables, torch.tensor(LENGTHS))
        found = compiled(*arguments, scale=SCALE, query_lens=lens, return_lse=True)
        wanted = mla_paged_attention(*arguments, scale=SCALE, query_lens=lens, return_lse=True)
        torch._dynamo.reset()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        ("changed", "code"),
        [
            ({"query": torch.zeros(4, HCKV)}, "attention.query"),
            ({"query_rope": torch.zeros(4, N + 1, DR)}, "attention.query_rope"),
            ({"kv_cache": torch.zeros(9, BLOCK, 1, HCKV + 1)}, "attention.kv_cache"),
            ({"kv_cache": torch.zeros(9, BLOCK, 2, HCKV)}, "attention.kv_cache"),
            ({"kr_cache": torch.zeros(8, BLOCK, 1, DR)}, "attention.kr_cache"),
            ({"block_tables": torch.zeros(4, dtype=torch.int64)}, "attention.block_tables"),
            ({"seq_lens": [1, 2, 3]}, "attention.seq_lens"),
            (
                {"block_tables": torch.zeros(3, BLOCKS, dtype=torch.int64), "seq_lens": [1] * 3},
                "attention.query_lens",
            ),
            ({"query_lens": [1, 3]}, "attention.query_lens"),
            ({"query_lens": [1, 1, 1, 2]}, "attention.query_lens"),
        ],
    )
    def test_shapes_that_do_not_belong_together(
        self, changed: dict[str, object], code: str
    ) -> None:
        arguments = {
            "query": torch.zeros(4, N, HCKV),
            "query_rope": torch.zeros(4, N, DR),
            "kv_cache": torch.zeros(9, BLOCK, 1, HCKV),
            "kr_cache": torch.zeros(9, BLOCK, 1, DR),
            "block_tables": torch.zeros(4, BLOCKS, dtype=torch.int64),
            "seq_lens": [1, 2, 3, 4],
        }
        mla_paged_attention(**arguments, scale=1.0)
        with pytest.raises(ContractError) as error:
            mla_paged_attention(**{**arguments, **changed}, scale=1.0)
        assert error.value.code == code
