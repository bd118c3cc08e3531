"""CPU reference kernels of the MLA prologue, and of the NPU operators in unfused MLA graphs."""

from mla_fusion.reference.formats import chip
from mla_fusion.reference.preprocess import mla_preprocess
from mla_fusion.reference.prolog import (
    npu_mla_prolog,
    npu_mla_prolog_v2,
    npu_mla_prolog_v3,
    npu_mla_prolog_v3_functional,
)

__all__ = [
    "chip",
    "mla_preprocess",
    "npu_mla_prolog",
    "npu_mla_prolog_v2",
    "npu_mla_prolog_v3",
    "npu_mla_prolog_v3_functional",
]
