"""``npu_fused_infer_attention_score_v2`` in its form for absorbed MLA over paged latents: tables.

Axes: B sequences of S tokens, or T tokens of all of them; N heads, D the latent (512), R the part
that is rotated (64). Read from the documents of torch_npu 2.13 and of op-plugin 2026-08, and from
the tiling checks of ops-transformer, fused_infer_attention_score (float16, bfloat16) and
incre_flash_attention (int8), at 2025-11 (before 8.5), 8.5.0, 9.0.0 and 9.1.0. They describe A2 and
A3; A5 has another page. `attention_check.py` applies the tables to a call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.limits import Sizes, newest, only
from mla_fusion.meta.prolog import Operator

HOST = "fused_infer_attention_score tiling"
LENGTHS = ("actual_seq_qlen", "actual_seq_kvlen")
SCALES = ("dequant_scale_query", "dequant_scale_key", "dequant_scale_value")

ATTENTION = Operator(
    "npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *, "
    "Tensor? query_rope=None, Tensor? key_rope=None, Tensor? pse_shift=None, "
    "Tensor? atten_mask=None, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None, "
    "Tensor? block_table=None, Tensor? dequant_scale_query=None, Tensor? dequant_scale_key=None, "
    "Tensor? dequant_offset_key=None, Tensor? dequant_scale_value=None, "
    "Tensor? dequant_offset_value=None, Tensor? dequant_scale_key_rope=None, "
    "Tensor? quant_scale_out=None, Tensor? quant_offset_out=None, Tensor? quant_scale_p=None, "
    "Tensor? learnable_sink=None, int num_query_heads=1, int num_key_value_heads=0, "
    "float softmax_scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647, "
    'str input_layout="BSH", int sparse_mode=0, int block_size=0, int query_quant_mode=0, '
    "int key_quant_mode=0, int value_quant_mode=0, int inner_precise=0, "
    "bool return_softmax_lse=False, int? query_dtype=None, int? key_dtype=None, "
    "int? value_dtype=None, int? query_rope_dtype=None, int? key_rope_dtype=None, "
    "int? key_shared_prefix_dtype=None, int? value_shared_prefix_dtype=None, "
    "int? dequant_scale_query_dtype=None, int? dequant_scale_key_dtype=None, "
    "int? dequant_scale_value_dtype=None, int? dequant_scale_key_rope_dtype=None, "
    "int? out_dtype=None) -> (Tensor, Tensor)",
    "v2",
    results=("attention_out", "softmax_lse"),
    ge_type="FusedInferAttentionScore",
    ge_results=("attention_out", "softmax_lse"),
)
OP = ATTENTION.name
TENSORS = ATTENTION.ge_inputs
NOT_OF_MLA = """pse_shift dequant_offset_key dequant_offset_value dequant_scale_key_rope
    quant_scale_out quant_offset_out quant_scale_p learnable_sink""".split()

SOCS = ("A2", "A3")
# query's axes, and behind "_" those of attention_out where they differ; H is N*D
LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_NBSD", "BSND_NBSD", "BSH_NBSD", "TND", "TND_NTD")
HEADS = Sizes(frozenset(2**power for power in range(8)))
LATENT, ROPE = 512, 64
FLOATS = (torch.bfloat16, torch.float16)
MOST = {"B": 4096, "T": 1 << 20}  # of TND
MASK_WIDTH = 2048  # of sparse_mode 3 and 4, however long the sequences are
MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)
NO_MASK, CAUSAL_AT_THE_END, BAND, TREE = 0, 3, 4, 9  # sparse_mode
PER_TOKEN_AND_HEAD, PER_TENSOR = 3, 0  # query_quant_mode; key_quant_mode and value_quant_mode


@dataclass(frozen=True)
class Release:
    """What the operator takes from one CANN release on, until the next row.

    blocks, nz_blocks  rows of a block of an ND and of an NZ cache
    tokens             most tokens of a sequence; None: any number
    lse                whether return_softmax_lse is taken
    tied               whether the layout and the number of tokens decide sparse_mode and the form
                       of the caches
    """

    blocks: Sizes
    nz_blocks: Sizes
    sparse_modes: tuple[int, ...]
    tokens: int | None = 16
    lse: bool = True
    tied: bool = False


_128 = only(128)
_TO_1024 = Sizes(low=16, high=1024, step=16)
_MASKS = (NO_MASK, CAUSAL_AT_THE_END, BAND)
SINCE = {
    "8.3": Release(only(16, 128), _128, _MASKS, lse=False, tied=True),
    "8.5": Release(_TO_1024, _TO_1024, _MASKS),
    "9.1": Release(_TO_1024, _TO_1024, (*_MASKS, TREE)),
    "latest": Release(_TO_1024, _TO_1024, (*_MASKS, TREE), tokens=None),
}
# the form of int8 is narrower, in every release
INT8_BLOCKS = _128
INT8_TOKENS = 16
INT8_LAYOUTS = tuple(name for name in LAYOUTS if not name.startswith("BNSD"))


def axes_of(layout: str) -> tuple[str, str]:
    """The axes of query and of attention_out, one letter each: ("BSND", "NBSD") of BSND_NBSD."""
    query, _, out = layout.partition("_")
    return query, out or query


def release(cann: str) -> Release:
    """What a CANN release takes. ContractError ``cann`` before 8.3, which brought the operator."""
    taken: Release | None = newest(SINCE, cann)
    if taken is None:
        expected = "8.3 or newer, which has the operator"
        raise ContractError("cann", "cann", expected, cann, source=HOST, op=OP)
    return taken


def padded_heads(heads: int) -> int:
    """The least number of heads, no fewer than ``heads``, that the operator takes: 16 of 12.

    Raises ContractError ``dims.n`` past 128.
    """
    for count in sorted(HEADS.listed):
        if count >= heads >= 1:
            return count
    raise ContractError("dims.n", "num_query_heads", "1 to 128", str(heads), source=HOST, op=OP)
