"""CPU reference kernels of the MLA prologue, and of the NPU operators in unfused MLA graphs.

`mla_fusion.ops` registers the kernels by operator name.
"""

# ruff: noqa: F401

from mla_fusion.reference.formats import chip
from mla_fusion.reference.kv_rmsnorm_rope_cache import (
    npu_kv_rmsnorm_rope_cache,
    npu_kv_rmsnorm_rope_cache_v2,
    npu_kv_rmsnorm_rope_cache_v2_functional,
)
from mla_fusion.reference.matmul_scatter_quant import (
    npu_format_cast,
    npu_quant_matmul,
    npu_scatter_nd_update,
    npu_scatter_nd_update_,
    npu_scatter_pa_kv_cache,
    npu_scatter_pa_kv_cache_functional,
    npu_transpose_batchmatmul,
    scatter_update,
    scatter_update_,
)
from mla_fusion.reference.norm_rope import (
    npu_add_rms_norm,
    npu_interleave_rope,
    npu_rms_norm,
    npu_rotary_mul,
)
from mla_fusion.reference.paged_attention import npu_fused_infer_attention_score_v2
from mla_fusion.reference.preprocess import (
    mla_preprocess,
    npu_mla_preprocess,
    npu_mla_preprocess_out,
)
from mla_fusion.reference.prolog import (
    npu_mla_prolog,
    npu_mla_prolog_v2,
    npu_mla_prolog_v3,
    npu_mla_prolog_v3_functional,
)
from mla_fusion.reference.quant_operators import (
    npu_dynamic_block_quant,
    npu_dynamic_mx_quant,
    npu_dynamic_quant,
    npu_quantize,
)
from mla_fusion.reference.sparse_attention import npu_sparse_flash_attention

__all__ = [
    "chip",
    "mla_preprocess",
    "npu_mla_prolog",
    "npu_mla_prolog_v2",
    "npu_mla_prolog_v3",
    "npu_mla_prolog_v3_functional",
]
