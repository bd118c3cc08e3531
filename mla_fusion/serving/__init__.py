"""Plug-ins for serving stacks, and a search for operators that hide a prologue from the pass.

`docs/serving.md` says which stack needs what.
"""

from mla_fusion.serving.opaque import hidden_prologues, opaque_operators
from mla_fusion.serving.vllm_ascend import vllm_ascend_pass

__all__ = ["hidden_prologues", "opaque_operators", "vllm_ascend_pass"]
