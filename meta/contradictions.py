"""Where the official pages disagree with what the operator enforces, and what holds.

Each row was decided by the source that runs: the host checks (`mla_prolog_tiling_check.cpp`), the
kernels (`mla_prolog/op_kernel`), torch_npu's meta and eager code, and the operator's own host
tests.
"""

from __future__ import annotations

from dataclasses import dataclass

V3_PAGE = "torch_npu.npu_mla_prolog_v3"
OLD_PAGES = "torch_npu.npu_mla_prolog, _v2"
ACLNN_PAGE = "aclnnMlaPrologV3WeightNz"
DESIGN_PAGE = "MlaProlog operator design"
ATB_PAGE = "ATB MlaPreprocess"
EVERY_V3_PAGE = f"{V3_PAGE}, {ACLNN_PAGE}"


@dataclass(frozen=True)
class Contradiction:
    """One statement of an official page, what holds instead, and where that is read from."""

    page: str
    says: str
    holds: str
    source: str


_CHECK = "mla_prolog_tiling_check.cpp"
_META = "torch_npu meta and eager code"

CONTRADICTIONS = (
    Contradiction(
        V3_PAGE,
        "partial quantisation with a per-channel cache is weight_quant_mode 2, "
        "kv_cache_quant_mode 2",
        "it is weight_quant_mode 1, kv_cache_quant_mode 2; (2, 2) does not exist",
        _CHECK,
    ),
    Contradiction(
        V3_PAGE,
        "per-tile caches go with weight_quant_mode 3 and query_quant_mode 1",
        "(1, 3) and (2, 3) with query_quant_mode 0 on A2/A3; weight_quant_mode 3 is mxfp8 and A5 "
        "only",
        _CHECK,
    ),
    Contradiction(
        V3_PAGE,
        "a per-tile cache needs quant_scale_ckv",
        "quant_scale_ckv is forbidden and k_nope_clip_alpha [1] is required (A2/A3 int8 tiles)",
        _CHECK,
    ),
    Contradiction(
        EVERY_V3_PAGE,
        "with a per-tile cache the query is quantised per token and head",
        "the query is bfloat16; only kv_cache_quant_mode 1 quantises it",
        _CHECK,
    ),
    Contradiction(
        EVERY_V3_PAGE,
        "dequant_scale_q_nope is valid for every fully quantised weight mode",
        "only with kv_cache_quant_mode 1; otherwise absent",
        _META,
    ),
    Contradiction(
        EVERY_V3_PAGE,
        "k_nope_clip_alpha is optional",
        "required with kv_cache_quant_mode 3 and int8 weights, forbidden with the A5 formats and "
        "elsewhere",
        _CHECK,
    ),
    Contradiction(
        EVERY_V3_PAGE,
        "nothing is said about query_rope under kv_cache_quant_mode 1",
        "it is multiplied by quant_scale_ckv / dequant_scale_q_nope and rounded a second time",
        "service_dynamic_quant_qn_mul_qr_arch22.h",
    ),
    Contradiction(
        DESIGN_PAGE,
        "static quantisation is round(x / scale)",
        "the kernel multiplies: quant_scale_ckv is the reciprocal of the scale",
        "mla_prolog_vector_comm_arch22.h",
    ),
    Contradiction(
        V3_PAGE,
        "dequant_scale_x may be [T]",
        "[T, 1] or [B*S, 1] only",
        _CHECK,
    ),
    Contradiction(V3_PAGE, "smooth_scales_cq may be [1]", "[1, Hcq] only", _CHECK),
    Contradiction(
        V3_PAGE,
        "Dtile is 512 where the cache is not per tensor",
        "a cache row is 512 wide where it is not per tile, and 656 bytes where it is",
        _CHECK,
    ),
    Contradiction(
        V3_PAGE,
        "dequant_scale_q_norm is 1-D or 3-D",
        "[T, 1] float32 ([T, Hcq/32] e8m0 for mxfp8), [0] when absent",
        _META,
    ),
    Contradiction(
        V3_PAGE,
        "weight_uq_qr is quantised per token",
        "per output channel: dequant_scale_w_uq_qr [1, N*(D+Dr)]",
        _CHECK,
    ),
    Contradiction(
        V3_PAGE,
        "weight_uk is quantised",
        "weight_uk is bfloat16 in every scenario",
        _CHECK,
    ),
    Contradiction(
        EVERY_V3_PAGE,
        "absent outputs are null",
        "torch returns [0] from CANN 8.5 on and [1] before; v2's dequant_scale_q_nope is always "
        "[1]",
        _META,
    ),
    Contradiction(
        ACLNN_PAGE,
        "qc_qr_scale multiplies the query after the up-projections",
        "it multiplies c_q right after RMSNorm, before quantisation, so query_norm carries it too",
        "service_rms_norm_arch22.h",
    ),
    Contradiction(
        V3_PAGE,
        "the formulas have no qc_qr_scale and no kc_scale",
        "both are applied",
        "rms_norm.h",
    ),
    Contradiction(
        EVERY_V3_PAGE,
        "N is a power of two; A3 only; He is 7168 or 7680",
        "see the sizes by release above: N is 1..128 in the newest operator, He has nine values",
        _CHECK,
    ),
    Contradiction(
        OLD_PAGES,
        "He is 7168 and BlockSize 16 or 128",
        "the sizes of the release hold for them too",
        _CHECK,
    ),
    Contradiction(
        "the host check of v2",
        "quant_scale_ckv is a row [1, Hckv]",
        "the kernel reads its first float; v3 takes [1]",
        "kernel_mla_prolog_split_n_arch22.h",
    ),
    Contradiction(
        "schemas of npu_mla_prolog and _v2",
        "pure: no argument is written",
        "the kernel writes the input caches; use v3 in compiled graphs",
        "MlaPrologV2KernelNpuOpApi.cpp",
    ),
    Contradiction(
        EVERY_V3_PAGE,
        "only contiguous tensors are supported",
        "a cache that is not contiguous is copied without a word and its rows go to the copy; "
        "since 2026-08 its first "
        "axis may be strided and other strides are refused",
        "mla_prolog_v3_def.cpp",
    ),
    Contradiction(
        EVERY_V3_PAGE,
        "cache_index lies in [0, BlockNum*BlockSize)",
        "a negative entry skips its token; an entry past the cache is written, out of bounds and "
        "unchecked",
        "service_scatter_cache_arch22.h",
    ),
    Contradiction(
        DESIGN_PAGE,
        "static quantisation is per channel only",
        "per tensor and per tile exist as well",
        _CHECK,
    ),
    Contradiction(
        DESIGN_PAGE,
        "[W_UQ | W_QR] is the argument weightDkvKr",
        "it is weight_uq_qr; weight_dkv_kr is [W_DKV | W_KR]",
        "mla_prolog_v3_def.cpp",
    ),
    Contradiction(
        DESIGN_PAGE,
        "QUANT_MODE 0 and 1, CACHE_MODE 0..2 are all there is",
        "six cache modes, per-tensor and per-tile caches exist; the numbers of each release are "
        "above",
        _CHECK,
    ),
    Contradiction(
        ATB_PAGE,
        "NZ caches are [BlockNum, headNum*512/32, BlockSize, 32]",
        "[BlockNum, 512/32, BlockSize, 32]: the cache has one head",
        "mla_preprocess_mix_bf16.cce",
    ),
    Contradiction(
        ATB_PAGE,
        "epsilon is an attribute",
        "all three norms use 1e-6 whatever is passed",
        "mla_preprocess_mix_bf16.cce",
    ),
    Contradiction(
        ATB_PAGE,
        "ctkv_scale and q_nope_scale are both scales",
        "the query is multiplied by q_nope_scale, the latent is divided by ctkv_scale",
        "mla_preprocess_mix_bf16.cce",
    ),
    Contradiction(
        ATB_PAGE,
        "quantMode 1 and 3 take no bias",
        "2 and 3 are refused when the operation is created",
        "ATB",
    ),
)
