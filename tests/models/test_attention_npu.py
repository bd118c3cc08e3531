"""The NPU's form of paged latent attention."""

from __future__ import annotations

import pytest
import torch
from mla_fusion.meta import ContractError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_fusion as mf
from mla_fusion.models.attention import mla_paged_attention
from tests.exhaustive import one_in
from tests.models.paged import SCALE


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
    strided: bool = False,
    seq_lens: list[int] | None = None,
    **options: object,
):
    """A call over fake tensors on device npu, which has torch_npu's shapes and no memory."""
    mf.offline.activate()
    shapes = {
        "query": (4, 16, 512),
        "query_rope": (4, 16, 64),
        "kv_cache": (20, 128, 1, 512),
        "kr_cache": (20, 128, 1, 64),
    }
    with FakeTensorMode():
        tensors = {
            name: torch.empty(shape, dtype=dtype, device="npu")
            for name, shape in {**shapes, **changed}.items()
        }
        if strided:  # columns of wider rows, as a cache that holds latent and rotated key together
            tensors["kr_cache"] = torch.empty(20, 128, 1, 576, dtype=dtype, device="npu")[..., 512:]
        tables = torch.empty(4, 5, dtype=torch.int32, device="npu")
        return mla_paged_attention(
            **tensors, block_tables=tables, seq_lens=seq_lens or [1] * 4, scale=SCALE, **options
        )


class TestOnNpu:
    """What the real torchair makes of it; torch_npu's own meta function has accepted the shapes."""

    def test_decode_with_lengths_in_a_tensor(self) -> None:
        lowered = mf.lower(
            lambda *given: mla_paged_attention(*given, scale=SCALE),
            *on_npu(),
            meta(4, dtype=torch.int64),
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
                lambda *given: mla_paged_attention(*given, [5, 6, 7, 640], scale=SCALE),
                *on_npu(),
                mode=mode,
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

    def test_several_tokens_a_sequence(self) -> None:
        def ragged(*given: Tensor) -> tuple[Tensor, Tensor]:
            *rest, query_lens = given
            return mla_paged_attention(*rest, scale=SCALE, query_lens=query_lens, return_lse=True)

        lowered = mf.lower(
            ragged, *on_npu(tokens=9), meta(4, dtype=torch.int64), meta(4, dtype=torch.int64)
        )
        attributes = kernel(lowered).attr
        assert (attributes["input_layout"].s, attributes["sparse_mode"].i) == (b"TND", 3)
        assert lowered.ge_ops["Cumsum"] == 1
        shapes = [node.meta["val"].shape for node in output_of(lowered.fx_before)]
        assert shapes == [(9, 16, 512), (9, 16)]

    @pytest.mark.parametrize(
        ("changed", "options", "code"),
        [
            ({"query": (4, 129, 512), "query_rope": (4, 129, 64)}, {}, "dims.n"),
            ({"query": (4, 16, 256), "kv_cache": (20, 128, 1, 256)}, {}, "dims.d"),
            ({"query_rope": (4, 16, 32), "kr_cache": (20, 128, 1, 32)}, {}, "dims.r"),
            ({"kv_cache": (20, 24, 1, 512), "kr_cache": (20, 24, 1, 64)}, {}, "dims.blocksize"),
            ({}, {"dtype": torch.float32}, "dtype.query"),
            ({}, {"strided": True}, "contiguous.key_rope"),
            ({}, {"query_lens": [1, 2, 0, 1]}, "lengths.actual_seq_kvlen"),
            ({}, {"query_lens": [1, 1, 1, 2], "seq_lens": [2] * 4}, "lengths.actual_seq_qlen"),
            ({}, {"seq_lens": [1, 1, 1, 641]}, "lengths.actual_seq_kvlen"),
        ],
    )
    def test_what_the_kernel_has_no_form_for(self, changed: dict, options: dict, code: str) -> None:
        with pytest.raises(ContractError) as error:
            eagerly(changed, **options)
        assert error.value.code == code

    @pytest.mark.parametrize("dynamic", one_in(1, [False, True]))
    def test_a_refusal_in_a_compiled_function_says_what_it_is(self, dynamic: bool) -> None:
        query, query_rope, *_, tables = on_npu()
        caches = meta(20, 24, 1, 512), meta(20, 24, 1, 64)
        given = (query, query_rope, *caches, tables, meta(4, dtype=torch.int64))
        with pytest.raises(RuntimeError, match=r"dims\.blocksize.*16\.\.1024.*BlockSize 24"):
            mf.lower(lambda *g: mla_paged_attention(*g, scale=SCALE), *given, dynamic=dynamic)

    @pytest.mark.parametrize(("query_lens", "return_lse"), [(None, False), ([1, 1, 1, 1], True)])
    def test_heads_first(self, query_lens: list[int] | None, return_lse: bool) -> None:
        def ntd(*given: Tensor) -> tuple[Tensor, Tensor]:
            options = {"query_lens": query_lens, "return_lse": return_lse}
            return mla_paged_attention(*given, scale=SCALE, out_layout="NTD", **options)

        lowered = mf.lower(ntd, *on_npu(), meta(4, dtype=torch.int64))
        assert kernel(lowered).attr["input_layout"].s == b"TND_NTD"
        assert "Transpose" not in lowered.ge_ops
        shapes = [node.meta["val"].shape for node in output_of(lowered.fx_before)]
        assert shapes == [(16, 4, 512), (4, 16)][: 1 + return_lse]

    def test_nz_caches_go_in_as_they_are(self) -> None:
        query, query_rope, *_, tables = on_npu()
        caches = meta(20, 1, 32, 128, 16), meta(20, 1, 4, 128, 16)
        lowered = mf.lower(
            lambda *given: mla_paged_attention(*given, scale=SCALE),
            *(query, query_rope, *caches, tables, meta(4, dtype=torch.int64)),
        )
        assert kernel(lowered).attr["block_size"].i == 128
        assert "Transpose" not in lowered.ge_ops and "Squeeze" not in lowered.ge_ops

    @pytest.mark.parametrize("out_layout", one_in(1, ["TND", "NTD"]))
    def test_int8_with_the_scales_of_the_prologue(self, out_layout: str) -> None:
        def int8(*given: Tensor) -> Tensor:
            *rest, query_scale, kv_scale = given
            scales = {"query_scale": query_scale, "kv_scale": kv_scale}
            return mla_paged_attention(*rest, scale=SCALE, out_layout=out_layout, **scales)

        _, query_rope, _, kr_cache, tables = on_npu()
        quantised = meta(4, 16, 512, dtype=torch.int8), meta(20, 128, 1, 512, dtype=torch.int8)
        scales = meta(4, 16, 1, dtype=torch.float32), meta(1, dtype=torch.float32)
        lengths = meta(4, dtype=torch.int64)
        lowered = mf.lower(
            int8, quantised[0], query_rope, quantised[1], kr_cache, tables, lengths, *scales
        )
        attributes = kernel(lowered).attr
        names = ("query_quant", "key_antiquant", "value_antiquant")
        assert [attributes[f"{name}_mode"].i for name in names] == [3, 0, 0]
        (out,) = (node.meta["val"] for node in output_of(lowered.fx_before))
        assert out.dtype == torch.bfloat16

    def test_other_numbers_of_heads_are_padded_and_cut(self) -> None:
        given = *on_npu(heads=12), meta(4, dtype=torch.int64)
        lowered = mf.lower(lambda *given: mla_paged_attention(*given, scale=SCALE), *given)
        assert kernel(lowered).attr["num_heads"].i == 16
        assert lowered.ge_ops["PadV3"] == 2  # of query and of query_rope
        (out,) = (node.meta["val"] for node in output_of(lowered.fx_before))
        assert out.shape == (4, 12, 512)


def output_of(gm: torch.fx.GraphModule) -> tuple:
    (output,) = [node for node in gm.graph.nodes if node.op == "output"]
    return output.args[0]
