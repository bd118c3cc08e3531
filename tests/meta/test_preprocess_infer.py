"""`mla_preprocess`: results and argument order as torch_npu's own meta function has them."""

from __future__ import annotations

import os
import subprocess
import sys

_AGAINST_TORCH_NPU = """
import inspect
import mla_fusion as mf
import torch
mf.offline.activate()
import torch_npu
from torch_npu.op_plugin.atb import _atb_meta_registrations as theirs

required, optional = mf.meta.signature("mla_preprocess")
names = list(inspect.signature(theirs.npu_mla_preprocess_meta).parameters)
assert names == [*required, *optional], names
assert names == list(inspect.signature(mf.reference.mla_preprocess).parameters)

def sized(*sizes, dtype=torch.bfloat16):
    return torch.empty(sizes, dtype=dtype, device="meta")

caches = {
    "krope_ctkv": (sized(9, 128, 1, 512), sized(9, 128, 1, 64)),
    "int8_nzcache": (sized(9, 16, 128, 32, dtype=torch.int8), sized(9, 4, 128, 16)),
    "nzcache": (sized(9, 32, 128, 16), sized(9, 4, 128, 16)),
}
compared = 0
for (mode, (kv, kr)), tokens, heads in ((c, t, n) for c in caches.items() for t in (1, 33) for n in (2, 128)):
    up = heads * 192
    call = dict(
        input=sized(tokens, 7168), gamma0=sized(7168), beta0=sized(7168),
        wdqkv=sized(1, 224, 2112, 32, dtype=torch.int8), descale0=sized(2112, dtype=torch.float32),
        gamma1=sized(1536), beta1=sized(1536), wuq=sized(1, 48, up, 32, dtype=torch.int8),
        descale1=sized(up, dtype=torch.float32), gamma2=sized(512), cos=sized(tokens, 64), sin=sized(tokens, 64),
        wuk=sized(heads, 128, 512), kv_cache=kv, kv_cache_rope=kr,
        slotmapping=sized(tokens, dtype=torch.int32), cache_mode=mode,
        ctkv_scale=sized(1), q_nope_scale=sized(heads),
    )
    mf.meta.check("mla_preprocess", **call)
    found = [(tuple(t.shape), t.dtype) for t in theirs.npu_mla_preprocess_meta(**call)]
    assert found == mf.meta.infer("mla_preprocess", **call), (mode, found)
    compared += 1
print("compared", compared)
"""


def test_torch_npu_infers_the_same() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run(
        [sys.executable, "-c", _AGAINST_TORCH_NPU],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compared 12" in done.stdout
