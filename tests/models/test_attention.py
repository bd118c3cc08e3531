"""Paged latent attention against torch's own attention, the algebra of its states, and the NPU's form of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from mla_fusion.meta import ContractError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_fusion as mf
from mla_fusion.models.attention import mla_paged_attention
from mla_fusion.models.attention.merge import merge_state, merge_states
from mla_fusion.models.hf import random_decoder

N, HCKV, DR, BLOCK, BLOCKS = 2, 32, 8, 16, 4
SCALE = 0.2
LENGTHS = [37, 1, 64, 16]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


class Paged:
    """Four sequences scattered over a pool whose other rows are NaN."""

    def __init__(self, dtype: torch.dtype = torch.float64, lengths: list[int] | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = lengths or LENGTHS
        sequences = len(self.lengths)
        pool = sequences * BLOCKS + 1
        order = torch.randperm(pool, generator=generator)[: sequences * BLOCKS].view(sequences, BLOCKS)
        self.kv = torch.full((pool, BLOCK, 1, HCKV), float("nan"), dtype=dtype)
        self.kr = torch.full((pool, BLOCK, 1, DR), float("nan"), dtype=dtype)
        self.tables = torch.full((sequences, BLOCKS), -7)  # vLLM leaves anything behind the last block
        for index, length in enumerate(self.lengths):
            used = -(-length // BLOCK)
            self.tables[index, :used] = order[index, :used]
            for position in range(length):
                block, row = order[index, position // BLOCK], position % BLOCK
                self.kv[block, row].normal_(generator=generator)
                self.kr[block, row].normal_(generator=generator)
        self.generator, self.dtype = generator, dtype

    def queries(self, tokens: int) -> tuple[Tensor, Tensor]:
        shapes = ((tokens, N, HCKV), (tokens, N, DR))
        return tuple(torch.empty(shape, dtype=self.dtype).normal_(generator=self.generator) for shape in shapes)

    def keys(self, index: int) -> tuple[Tensor, Tensor]:
        """(key [L, Hckv + Dr], value [L, Hckv]) of one sequence, in order."""
        table = self.tables[index, : -(-self.lengths[index] // BLOCK)]
        c_kv, k_pe = (cache[table].flatten(0, 2)[: self.lengths[index]] for cache in (self.kv, self.kr))
        return torch.cat((c_kv, k_pe), dim=-1), c_kv

    def attend(self, query: Tensor, query_rope: Tensor, **options: object):
        options.setdefault("seq_lens", torch.tensor(self.lengths))
        options.setdefault("block_tables", self.tables)
        return mla_paged_attention(query, query_rope, self.kv, self.kr, scale=SCALE, **options)


def dense(query: Tensor, query_rope: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """torch's attention of [Q, N, ..] over [L, ..], with the log-sum-exp of the same scores."""
    q = torch.cat((query, query_rope), dim=-1).transpose(0, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, key.expand(N, -1, -1), value.expand(N, -1, -1), attn_mask=visible, scale=SCALE
    )
    scores = (q @ key.T * SCALE).masked_fill(~visible, float("-inf"))
    return out.transpose(0, 1), scores.logsumexp(-1).T


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


class TestReference:
    def test_one_token_a_sequence_equals_torch(self) -> None:
        paged = Paged()
        query, query_rope = paged.queries(4)
        out, lse = paged.attend(query, query_rope, return_lse=True)
        for index, length in enumerate(LENGTHS):
            everything = torch.ones(1, length, dtype=torch.bool)
            one = slice(index, index + 1)
            want, want_lse = dense(query[one], query_rope[one], *paged.keys(index), everything)
            close(out[one], want)
            close(lse[one], want_lse)

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

    def test_mask_restricts_further(self) -> None:
        paged = Paged()
        query, query_rope = paged.queries(4)
        mask = torch.rand(4, BLOCKS * BLOCK, generator=paged.generator) < 0.5
        mask[:, 0] = True
        out, lse = paged.attend(query, query_rope, mask=mask, return_lse=True)
        for index, length in enumerate(LENGTHS):
            one = slice(index, index + 1)
            want, want_lse = dense(query[one], query_rope[one], *paged.keys(index), mask[one, :length])
            close(out[one], want)
            close(lse[one], want_lse)

    def test_nothing_to_see_is_the_empty_state(self) -> None:
        paged = Paged(torch.float32, [5, 0])
        query, query_rope = paged.queries(2)
        out, lse = paged.attend(query, query_rope, return_lse=True)
        assert torch.equal(out[1], torch.zeros(N, HCKV))
        assert torch.equal(lse[1], torch.full((N,), float("-inf")))
        assert out[0].isfinite().all() and lse[0].isfinite().all()
        hidden, hidden_lse = paged.attend(
            query, query_rope, mask=torch.zeros(2, BLOCKS * BLOCK, dtype=torch.bool), return_lse=True
        )
        assert torch.equal(hidden, torch.zeros_like(hidden))
        assert torch.equal(hidden_lse, torch.full((2, N), float("-inf")))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_computes_in_float32_and_rounds_once(self, dtype: torch.dtype) -> None:
        paged = Paged(dtype)
        query, query_rope = paged.queries(4)
        out, lse = paged.attend(query, query_rope, return_lse=True)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        paged.kv, paged.kr = paged.kv.float(), paged.kr.float()
        exact, exact_lse = paged.attend(query.float(), query_rope.float(), return_lse=True)
        assert torch.equal(bits(out), bits(exact.to(dtype)))
        assert torch.equal(lse, exact_lse)

    def test_tables_of_other_systems(self) -> None:
        """FlashInfer's triple names the same pages, only those in use."""
        paged = Paged()
        query, query_rope = paged.queries(4)
        ours = mf.paging.PageTable.from_block_table(paged.tables, torch.tensor(LENGTHS), BLOCK)
        theirs = mf.paging.PageTable.from_flashinfer(*ours.to_flashinfer(), BLOCK)
        tables, lengths = theirs.to_block_table()
        found = paged.attend(query, query_rope, block_tables=tables, seq_lens=lengths)
        assert torch.equal(found, paged.attend(query, query_rope))

    def test_host_lengths_are_the_same(self) -> None:
        paged = Paged()
        query, query_rope = paged.queries(4)
        assert torch.equal(paged.attend(query, query_rope, seq_lens=LENGTHS), paged.attend(query, query_rope))

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
            ({"block_tables": torch.zeros(3, BLOCKS, dtype=torch.int64), "seq_lens": [1] * 3}, "attention.query_lens"),
            ({"query_lens": [1, 3]}, "attention.query_lens"),
            ({"query_lens": [1, 1, 1, 2]}, "attention.query_lens"),
            ({"mask": torch.zeros(4, BLOCKS * BLOCK)}, "attention.mask"),
            ({"mask": torch.zeros(4, BLOCK, dtype=torch.bool)}, "attention.mask"),
        ],
    )
    def test_shapes_that_do_not_belong_together(self, changed: dict[str, object], code: str) -> None:
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


def state(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    v = torch.empty(5, N, HCKV).normal_(generator=generator).to(dtype)
    return v, torch.empty(5, N).normal_(0, 8, generator=generator)


class TestMerging:
    @pytest.mark.parametrize("cut", [0, BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK])
    def test_split_at_every_block_equals_the_whole(self, cut: int) -> None:
        """The context cut behind `cut` positions: each part is an attention over a part of the block table."""
        paged = Paged()
        query, query_rope = paged.queries(4)
        lengths = torch.tensor(LENGTHS)
        blocks = cut // BLOCK
        first = paged.attend(
            query, query_rope, block_tables=paged.tables[:, :blocks], seq_lens=lengths.clamp(max=cut), return_lse=True
        )
        second = paged.attend(
            query,
            query_rope,
            block_tables=paged.tables[:, blocks:],
            seq_lens=(lengths - cut).clamp(min=0),
            return_lse=True,
        )
        for found, wanted in zip(
            merge_state(*first, *second), paged.attend(query, query_rope, return_lse=True), strict=True
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
        suffix = paged.attend(query, query_rope, block_tables=paged.tables[1:], seq_lens=[37, 1, 64], return_lse=True)
        joined = torch.cat((prefix.expand(3, -1), paged.tables[1:]), dim=1)
        want = paged.attend(query, query_rope, block_tables=joined, seq_lens=[64 + 37, 64 + 1, 128], return_lse=True)
        for found, wanted in zip(merge_state(*whole_prefix, *suffix), want, strict=True):
            close(found, wanted)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("garbage", [0.0, float("nan"), float("inf")])
    def test_the_empty_state_is_the_identity_bit_by_bit(self, dtype: torch.dtype, garbage: float) -> None:
        v, s = state(torch.Generator().manual_seed(1), dtype)
        v[0, 0, :3] = torch.tensor([-0.0, 0.0, 1e-30], dtype=dtype)
        empty = torch.full_like(v, garbage), torch.full_like(s, float("-inf"))
        for merged in (merge_state(v, s, *empty), merge_state(*empty, v, s)):
            assert merged[0].dtype == dtype
            assert torch.equal(bits(merged[0]), bits(v))
            assert torch.equal(bits(merged[1]), bits(s))
        several = merge_states(torch.stack((empty[0], v, empty[0]), dim=1), torch.stack((empty[1], s, empty[1]), dim=1))
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
            torch.stack([v.double() for v, _ in states], 1), torch.stack([s.double() for _, s in states], 1)
        )
        assert exact[0].dtype == exact[1].dtype == torch.float64
        for order in itertools.permutations(states):
            a, b, c, d = order
            left = merge_state(*merge_state(*merge_state(*a, *b), *c), *d)
            right = merge_state(*a, *merge_state(*b, *merge_state(*c, *d)))
            at_once = merge_states(torch.stack([v for v, _ in order], 1), torch.stack([s for _, s in order], 1))
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


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def on_npu(tokens: int = 4, sequences: int = 4, heads: int = 16) -> tuple[Tensor, ...]:
    """Arguments that the kernel has a form for, as they come from a serving stack."""
    return (
        meta(tokens, heads, 512),
        meta(tokens, heads, 64),
        meta(20, 128, 1, 512),
        meta(20, 128, 1, 64),
        meta(sequences, 5, dtype=torch.int32),
    )


def kernel(lowered: mf.Lowering) -> object:
    (found,) = [op for op in lowered.ge_graph.op if op.type == "FusedInferAttentionScore"]
    return found


def eagerly(
    changed: dict[str, tuple[int, ...]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    masked: bool = False,
    seq_lens: list[int] | None = None,
    **options: object,
):
    """A call over fake tensors on device npu, which has torch_npu's shapes and allocates nothing."""
    mf.offline.activate()
    shapes = {
        "query": (4, 16, 512),
        "query_rope": (4, 16, 64),
        "kv_cache": (20, 128, 1, 512),
        "kr_cache": (20, 128, 1, 64),
    }
    with FakeTensorMode():
        tensors = {name: torch.empty(shape, dtype=dtype, device="npu") for name, shape in {**shapes, **changed}.items()}
        tables = torch.empty(4, 5, dtype=torch.int32, device="npu")
        if masked:
            options["mask"] = torch.empty(4, 5 * 128, dtype=torch.bool, device="npu")
        return mla_paged_attention(**tensors, block_tables=tables, seq_lens=seq_lens or [1] * 4, scale=SCALE, **options)


class TestOnNpu:
    """What the real torchair makes of it; torch_npu's own meta function has accepted the shapes then."""

    def test_decode_with_lengths_in_a_tensor(self) -> None:
        lowered = mf.lower(
            lambda *given: mla_paged_attention(*given, scale=SCALE), *on_npu(), meta(4, dtype=torch.int64)
        )
        attributes = kernel(lowered).attr
        assert attributes["input_layout"].s == b"BSND"
        assert (attributes["num_heads"].i, attributes["num_key_value_heads"].i) == (16, 1)
        assert (attributes["block_size"].i, attributes["softmax_lse_flag"].b) == (128, False)
        assert attributes["scale"].f == pytest.approx(SCALE)
        assert set(lowered.ge_ops) <= {
            "Data",
            "Const",
            "Unsqueeze",
            "Squeeze",
            "Reshape",
            "FusedInferAttentionScore",
            "NetOutput",
        }

    def test_decode_with_host_lengths(self) -> None:
        """In GE a constant; in captured ACL graphs torchair's own list of what a replay updates."""
        for mode, name in (
            ("ge", "FusedInferAttentionScore"),
            ("npugraph_ex", "npu.npu_fused_infer_attention_score_v2.out"),
        ):
            lowered = mf.lower(
                lambda *given: mla_paged_attention(*given, [5, 6, 7, 640], scale=SCALE), *on_npu(), mode=mode
            )
            assert (lowered.ge_ops if mode == "ge" else lowered.fx_ops)[name] == 1

    def test_lse_has_the_shape_of_the_reference(self) -> None:
        def both(*given: Tensor) -> tuple[Tensor, Tensor]:
            return mla_paged_attention(*given, scale=SCALE, return_lse=True)

        lowered = mf.lower(both, *on_npu(), meta(4, dtype=torch.int64))
        assert kernel(lowered).attr["softmax_lse_flag"].b is True
        out, lse = (node.meta["val"] for node in output_of(lowered.fx_before))
        assert (out.shape, out.dtype) == ((4, 16, 512), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((4, 16), torch.float32)

    @pytest.mark.parametrize("return_lse", [False, True])
    def test_several_tokens_a_sequence(self, return_lse: bool) -> None:
        def ragged(*given: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            *rest, query_lens = given
            return mla_paged_attention(*rest, scale=SCALE, query_lens=query_lens, return_lse=return_lse)

        lowered = mf.lower(ragged, *on_npu(tokens=9), meta(4, dtype=torch.int64), meta(4, dtype=torch.int64))
        attributes = kernel(lowered).attr
        assert (attributes["input_layout"].s, attributes["sparse_mode"].i) == (b"TND", 3)
        assert lowered.ge_ops["Cumsum"] == 1
        shapes = [node.meta["val"].shape for node in output_of(lowered.fx_before)]
        assert shapes == [(9, 16, 512), (9, 16)][: 1 + return_lse]

    def test_several_tokens_with_host_lengths_and_lse(self) -> None:
        def ragged(*given: Tensor) -> tuple[Tensor, Tensor]:
            return mla_paged_attention(*given, [20, 30, 40, 50], scale=SCALE, query_lens=[1, 2, 3, 3], return_lse=True)

        lowered = mf.lower(ragged, *on_npu(tokens=9), mode="npugraph_ex")
        (call,) = [node for node in lowered.fx_after.graph.nodes if str(node.target).endswith("score_v2.out")]
        assert call.kwargs["actual_seq_qlen"] == [1, 3, 6, 9]
        assert call.kwargs["actual_seq_kvlen"] == [20, 30, 40, 50]

    @pytest.mark.parametrize(
        ("changed", "options", "code"),
        [
            ({"query": (4, 20, 512), "query_rope": (4, 20, 64)}, {}, "attention.query"),
            ({"query": (4, 16, 256), "kv_cache": (20, 128, 1, 256)}, {}, "attention.query"),
            ({"query_rope": (4, 16, 32), "kr_cache": (20, 128, 1, 32)}, {}, "attention.query_rope"),
            ({"kv_cache": (20, 64, 1, 512), "kr_cache": (20, 64, 1, 64)}, {}, "attention.kv_cache"),
            ({}, {"dtype": torch.float32}, "attention.query"),
            ({}, {"masked": True}, "attention.mask"),
            (
                {"query": (20, 16, 512), "query_rope": (20, 16, 64)},
                {"query_lens": [17, 1, 1, 1]},
                "attention.query_lens",
            ),
            ({}, {"query_lens": [1, 2, 0, 1]}, "attention.seq_lens"),
        ],
    )
    def test_what_the_kernel_has_no_form_for(self, changed: dict, options: dict, code: str) -> None:
        with pytest.raises(ContractError) as error:
            eagerly(changed, **options)
        assert error.value.code == code
        assert "on an NPU" in str(error.value)

    def test_eager_call(self) -> None:
        """The operator's own meta function takes what an eager call gives it."""
        for query_lens, tokens in ((None, 4), ([1, 16, 2, 1], 20)):
            sizes = {"query": (tokens, 16, 512), "query_rope": (tokens, 16, 64)}
            out, lse = eagerly(sizes, seq_lens=[20, 30, 40, 640], query_lens=query_lens, return_lse=True)
            assert (out.shape, out.dtype, out.device.type) == ((tokens, 16, 512), torch.bfloat16, "npu")
            assert (lse.shape, lse.dtype) == ((tokens, 16), torch.float32)

    @pytest.mark.parametrize("mode", ["ge", "npugraph_ex"])
    def test_a_decode_step_is_two_kernels(self, mode: str) -> None:
        """Prologue, attention and output of Hugging Face's layer: the caches are written in place, then read."""
        layer = random_decoder(layers=1, heads=16, hidden=1024, intermediate=64).layers[0].self_attn

        def step(hidden, cos, sin, slots, tables, seq_lens, kv_cache, kr_cache):
            query, query_rope = layer.prologue(hidden, cos, sin, slots, kv_cache, kr_cache)
            lengths = [5, 6, 7, 8] if mode == "npugraph_ex" else seq_lens
            context = mla_paged_attention(
                query, query_rope, kv_cache, kr_cache, tables, lengths, scale=layer.attention.scaling
            )
            _, w_uv = layer._up_projections()
            values = torch.bmm(context.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)
            return layer.attention.o_proj(values.reshape(4, -1))

        integers = [meta(4, dtype=torch.int64), meta(4, 5, dtype=torch.int32), meta(4, dtype=torch.int64)]
        lowered = mf.lower(
            step,
            meta(4, 1024),
            meta(4, 64),
            meta(4, 64),
            *integers,
            meta(20, 128, 1, 512),
            meta(20, 128, 1, 64),
            mode=mode,
        )
        assert [(fusion.code, fusion.message) for fusion in lowered.report.rejected] == []
        if mode == "npugraph_ex":
            assert lowered.fx_ops["npu.npu_mla_prolog_v3.default"] == 1
            assert lowered.fx_ops["npu.npu_fused_infer_attention_score_v2.out"] == 1
            assert lowered.fx_ops["aten.copy_.default"] == 0
            return
        assert lowered.ge_ops["MlaPrologV3"] == lowered.ge_ops["FusedInferAttentionScore"] == 1
        assert not {"TensorMove", "Assign"} & set(lowered.ge_ops)
        producers = {op.name: op for op in lowered.ge_graph.op}
        prolog = next(op for op in lowered.ge_graph.op if op.type == "MlaPrologV3")
        # query, key, value and the ropes all come from the prologue, the caches by its results 2 and 3
        assert sources(kernel(lowered), producers) >= {f"{prolog.name}:{index}" for index in range(4)}


def output_of(gm: torch.fx.GraphModule) -> tuple:
    (output,) = [node for node in gm.graph.nodes if node.op == "output"]
    return output.args[0]


def sources(op, producers) -> set[str]:
    """What an operator reads, behind reshapes."""
    found = set()
    for name in op.input:
        while name and producers[name.rsplit(":", 1)[0]].type in ("Reshape", "Unsqueeze"):
            name = producers[name.rsplit(":", 1)[0]].input[0]
        found.add(name)
    return found
