"""The NPU's form of paged latent attention."""

from __future__ import annotations

import pytest
import torch
from mla_fusion.meta import ContractError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_fusion as mf
from mla_fusion.models.attention import mla_paged_attention
from mla_fusion.models.hf import random_decoder
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
