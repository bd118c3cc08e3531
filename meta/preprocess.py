"""The contract of ATB's MlaPreprocess (``torch.ops.atb.npu_mla_preprocess``): its signature, the
checks of a call, and its results.

Read from the operation's kernels (`mla_preprocess_mix_bf16.cce`, `mla_preprocess_mix.cce`), its
host check and torch_npu's entry `MLAPreprocessAtb.cpp`. Axes: T tokens, H hidden, Q query rank, C
KV rank, R rope head dim, D nope head dim, N heads. wdqkv holds, transposed, the columns ``[C | R |
Q]`` of the down-projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from mla_fusion.meta.binder import Binder, Result
from mla_fusion.meta.errors import known_name
from mla_fusion.meta.layout import different, known
from mla_fusion.meta.limits import known_releases
from mla_fusion.meta.prolog import Operator

OP = "npu_mla_preprocess"
HOST = "MlaPreprocess operation"
SOCS = ("A2", "A3")
DOWN, UP = "C+R+Q", "N*D+N*R"  # columns of the two projections
EPSILON = 1e-6  # of its norms, whatever the caller passes: fixed in the kernel


class CacheForm(NamedTuple):
    """A cacheMode: the shapes of both caches, where None is for a cache that ATB does not use."""

    kv: str
    kr: str | None
    int8: bool = False
    nz: bool = False


NZ_BLOCK = 128  # rows of a block of an NZ cache, fixed in ATB's kernel
CACHE_FORMS: Mapping[str, CacheForm] = {  # in the order of ATB's numbers
    "kvcache": CacheForm("BlockNum BlockSize 1 C+R", None),
    "krope_ctkv": CacheForm("BlockNum BlockSize 1 C", "BlockNum BlockSize 1 R"),
    "int8_nzcache": CacheForm("BlockNum C/32 128 32", "BlockNum R/16 128 16", int8=True, nz=True),
    "nzcache": CacheForm("BlockNum C/16 128 16", "BlockNum R/16 128 16", nz=True),
}
QUANT_MODES = ("per_tensor_quant_asymm", "per_token_quant_symm")
DEFAULTS = {"cache_mode": "krope_ctkv", "quant_mode": "per_token_quant_symm"}
MAX_TOKENS = 1024
STATIC = "per_tensor_quant_asymm"
ATB_HIDDEN = 7168  # the only hidden size of ATB's own kernel; others go to another kernel
CACHES = ("kv_cache", "kv_cache_rope")
RESULTS = ("q_out0", "kv_cache_out0", "q_out1", "kv_cache_out1")

_ARGUMENTS = """Tensor input, Tensor gamma0, Tensor beta0, Tensor wdqkv, Tensor descale0,
Tensor gamma1, Tensor beta1, Tensor wuq, Tensor descale1, Tensor gamma2, Tensor cos, Tensor sin,
Tensor wuk, Tensor kv_cache, Tensor kv_cache_rope, Tensor slotmapping, *,
Tensor? quant_scale0=None, Tensor? quant_offset0=None, Tensor? bias0=None,
Tensor? quant_scale1=None, Tensor? quant_offset1=None, Tensor? bias1=None,
Tensor? ctkv_scale=None, Tensor? q_nope_scale=None, str? cache_mode=None, str? quant_mode=None"""
ATB = Operator(f"{OP}({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)", "atb", RESULTS)
OPTIONAL = ATB.ge_inputs[len(ATB.required) :]
# of the overload that writes its results into the caller's tensors, which it also returns
OUT_SCHEMA = (
    f"{OP}.out({_ARGUMENTS}, Tensor(a!) q_out0, Tensor(b!) kv_cache_out0, Tensor(c!) q_out1, "
    "Tensor(d!) kv_cache_out1) -> (Tensor(a!), Tensor(b!), Tensor(c!), Tensor(d!))"
)


class Preprocess(Binder):
    """A call. A mode of None is its default, and an optional tensor of shape [0] is like None."""

    def __init__(self, full: Mapping[str, Any]) -> None:
        super().__init__(ATB, HOST, full)
        self.full = {**full}
        for name in OPTIONAL:
            if full[name] is not None and tuple(full[name].shape) == (0,):
                self.full[name] = None
        for name, names in (("cache_mode", CACHE_FORMS), ("quant_mode", QUANT_MODES)):
            if full[name] is None:
                self.full[name] = DEFAULTS[name]
            self.pick(name, names, code=f"{name}.unknown")
        self.form = CACHE_FORMS[self.full["cache_mode"]]

    def check(self, soc: str, cann: str, values: bool) -> None:
        known_releases(cann)
        known_name("soc", soc, SOCS, source=HOST, op=self.op)
        self.bind_tensors()
        self.check_sizes()
        self.one_device()
        self.caches(CACHES)
        if values:
            self.check_slots()

    def results(self) -> list[Result]:
        """Returns q_out0, kv_cache_out0, q_out1, kv_cache_out1. In mode "kvcache" the third is
        empty.
        """
        for name, ranks in (("input", (2,)), ("wuk", (3, 4)), ("gamma2", (1,)), ("cos", (2,))):
            self.rank(name, *ranks)
        full = self.full
        lead, kind = (full["input"].shape[0], full["wuk"].shape[0]), full["input"].dtype
        latent, rope = full["gamma2"].shape[0], full["cos"].shape[-1]
        kv, kr = ((tuple(full[name].shape), full[name].dtype) for name in CACHES)
        if self.form.kr is None:
            return [((*lead, latent + rope), kind), kv, ((0,), kind), kr]
        return [((*lead, latent), kv[1]), kv, ((*lead, rope), kind), kr]

    def bind_tensors(self) -> None:
        """Checks dtypes, presence and all shapes, and binds the axes."""
        full, form = self.full, self.form
        kind = self.dtype("input", torch.bfloat16, torch.float16)
        for name, shape in SHAPES.items():
            self.tensor(name, shape, kind)
        self._check_weight("wuk", "N D C", kind)
        quantised = full["wdqkv"].dtype == torch.int8
        weight = torch.int8 if quantised else kind
        self._check_weight("wdqkv", f"{DOWN} H", weight)
        self._check_weight("wuq", f"{UP} Q", weight)
        # with float16 the low 32 bits of an int64 are the float32
        descale = torch.float32 if kind == torch.bfloat16 else torch.int64
        self.tensor("descale0", DOWN, descale)
        self.tensor("descale1", UP, descale)
        modes = f"with {full['quant_mode']}, {full['cache_mode']}"

        def require(name: str, shape: str, dtype: torch.dtype) -> None:
            self.presence(name, True, modes)
            self.tensor(name, shape, dtype)

        if quantised and full["quant_mode"] == STATIC:
            for stage, width in (("0", DOWN), ("1", UP)):
                require(f"quant_scale{stage}", "1", kind)
                require(f"quant_offset{stage}", "1", torch.int8)
                require(f"bias{stage}", width, torch.int32)
        if form.int8:
            require("ctkv_scale", "1", kind)
            require("q_nope_scale", "N", kind)
        if form.nz:
            self.dims["BlockSize"] = NZ_BLOCK
        self.tensor("kv_cache", form.kv, torch.int8 if form.int8 else kind)
        if form.kr is not None:
            self.tensor("kv_cache_rope", form.kr, kind)
        self.tensor("slotmapping", "T", torch.int32)

    def _check_weight(self, name: str, shape: str, dtype: torch.dtype) -> None:
        """Checks a weight, or its FRACTAL_NZ storage: [.., k/C0, n, C0] for [.., n, k], C0 being 32
        bytes, and [1, k/C0, n, C0] for [n, k].
        """
        self.dtype(name, dtype)
        tensor, axes, sizes = self.full[name], shape.split(), None
        if tensor.dim() == 4:
            first, blocks, n, c0 = tensor.shape
            if different(c0, 32 // dtype.itemsize) or (len(axes) == 2 and different(first, 1)):
                expected = f"[{', '.join(axes)}] or its FRACTAL_NZ storage"
                self.refuse(f"shape.{name}", name, expected, list(tensor.shape))
            sizes = (first, n, blocks * c0)[3 - len(axes) :]
        self.sizes(name, shape, sizes)

    def check_sizes(self) -> None:
        full = self.full
        if full["cache_mode"] == "kvcache":
            expected = "krope_ctkv, int8_nzcache or nzcache: torch does not offer mode 0"
            self.refuse("cache_mode.torch", "cache_mode", expected, "kvcache")
        for row in _SIZES.strip().splitlines():
            self.within(*row.split())
        # the kernel for other hidden sizes and unquantised weights has a single mode
        if different(self.dims["H"], ATB_HIDDEN) or full["wdqkv"].dtype != torch.int8:
            why = f" with H other than {ATB_HIDDEN} or weights that are not int8"
            self.pick("quant_mode", (STATIC,), why, "quant_mode.kernel")
        if not known(self.dims["BlockSize"] == 256):
            self.within("BlockSize", "1..128", ", or 256")

    def check_slots(self) -> None:
        """Refuses a slotmapping that names a row twice. -1 skips a token; every other number is a
        row.
        """
        slots, rows = self.readable("slotmapping"), self.dims["BlockNum"] * self.dims["BlockSize"]
        self.rows("slotmapping", slots, rows, "-1 or rows below BlockNum*BlockSize", -1)


_SHAPES = """
input   T H
gamma0  H
beta0   H
gamma1  Q
beta1   Q
gamma2  C
cos     T R
sin     T R
"""
SHAPES = dict(row.split(maxsplit=1) for row in _SHAPES.strip().splitlines())
_SIZES = f"""
Q  1536
C  512
R  64
D  128
N  1..
H  2048..8192/32
T  1..{MAX_TOKENS}
"""
