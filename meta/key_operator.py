"""The contract of ``npu_kv_rmsnorm_rope_cache`` (v1, v2), which makes and writes the rows of both
caches.

Axes: B and S tokens, C the latent (512), R the rotated part (64). Read from
`kv_rms_norm_rope_cache_def.cpp` and the tilings beside it (`.._base_tiling.cpp`, `.._ds_tiling.cpp`
of A2 and A3, `.._regbase_full_load_tiling.cpp` of A5) at 8.5.0, 9.0.0, 9.1.0 and master 2026-08
("latest"), and the documents of aclnnKvRmsNormRopeCacheV2. MLA has no use for the form with a
separate ``v``, which these tables leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mla_fusion.meta.binder import Binder, Result
from mla_fusion.meta.layout import different, known
from mla_fusion.meta.limits import RELEASES, known_releases
from mla_fusion.meta.prolog import Operator

HOST = "kv_rms_norm_rope_cache tiling"
_KEY = "Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index"
_OPTIONS = """Tensor? k_rope_scale=None, Tensor? c_kv_scale=None, Tensor? k_rope_offset=None,
Tensor? c_kv_offset=None, Tensor? v=None, float epsilon=1e-05, str cache_mode="Norm",
bool is_output_kv=False"""
_DTYPES = "int? k_cache_dtype=None, int? ckv_cache_dtype=None"
SCALES = {"k_rope_scale": "R", "c_kv_scale": "C"}  # the axis of the rows that they scale
OFFSETS = {"k_rope_offset": "R", "c_kv_offset": "C"}
# the caches by their names in the prologue, and the arguments of these operators
ARGUMENTS = {"kr_cache": "k_cache", "kv_cache": "ckv_cache"}
CACHES, _CACHES = tuple(ARGUMENTS), tuple(ARGUMENTS.values())
_ROWS = ("k_pe", "c_kv")
_GE = "KvRmsNormRopeCache"

V1 = Operator(
    f"npu_kv_rmsnorm_rope_cache({_KEY}, Tensor k_cache, Tensor ckv_cache, *, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "v1",
    (*CACHES, *_ROWS),
    ge_type=_GE,
)
V2_FUNCTIONAL = Operator(
    f"npu_kv_rmsnorm_rope_cache_v2_functional({_KEY}, Tensor k_cache, Tensor ckv_cache, *, "
    f"{_OPTIONS}, {_DTYPES}) -> (Tensor, Tensor, Tensor, Tensor)",
    "v2",
    (*_ROWS, *CACHES),
    ge_type=_GE,
    ge_results=V1.ge_results,
)
V2 = Operator(
    f"npu_kv_rmsnorm_rope_cache_v2({_KEY}, Tensor(a!) k_cache, Tensor(b!) ckv_cache, *, "
    f"{_OPTIONS}, {_DTYPES}) -> (Tensor, Tensor)",
    "v2",
    _ROWS,
    ge_type=_GE,
    ge_results=V1.ge_results,
    functional=V2_FUNCTIONAL.name,
)
OPERATORS = (V1, V2, V2_FUNCTIONAL)

PAGED = ("PA", "PA_BNSD", "PA_NZ")  # a slot for each token
BLOCKS = ("PA_BLK_BNSD", "PA_BLK_NZ")  # a slot for each block of a sequence
MODES = ("Norm", *PAGED, *BLOCKS)
SINCE = {"A2": RELEASES[0], "A3": RELEASES[0], "A5": "8.5"}
FROM_BLOCKS = "latest"  # the release that requires the blocks of all sequences, each rounded up


class KeyCall(Binder):
    """A call of one of these operators."""

    def __init__(self, operator: Operator, full: Mapping[str, Any]) -> None:
        super().__init__(operator, HOST, full)
        self.operator, self.mode = operator, full["cache_mode"]

    def check(self, soc: str, cann: str, values: bool) -> None:
        """Refuses a call that the operator does not take.

        values  True to read the slots too
        """
        if SINCE.get(soc) not in known_releases(cann):
            self.refuse("soc", "soc", "A2, A3, or A5 from CANN 8.5 on", f"{soc}, CANN {cann}")
        self.check_form()
        self.check_tensors(soc)
        self.check_sizes(soc, cann)
        self.one_device()
        self.caches(_CACHES)
        if values:
            self.check_values()

    def results(self) -> list[Result]:
        """Returns the caches, and the new rows of all tokens, whatever ``is_output_kv`` says."""
        for name, rank in (("kv", 4), ("gamma", 1), ("cos", 4)):
            self.rank(name, rank)
        full, lead, kind = self.full, self.full["kv"].shape[:-1], self.full["kv"].dtype
        results: dict[str, Result] = {
            "k_pe": ((*lead, full["cos"].shape[-1]), kind),
            "c_kv": ((*lead, full["gamma"].shape[0]), kind),
        }
        for name, argument in ARGUMENTS.items():
            results[name] = tuple(full[argument].shape), full[argument].dtype
        return [results[name] for name in self.operator.results]

    def check_form(self) -> None:
        """Refuses an unknown cache_mode, and the form with a separate ``v``."""
        self.pick("cache_mode", MODES, code="cache_mode.unknown")
        if self.full["v"] is not None:
            self.refuse("v", "v", "nothing: keys and values of one latent", "a tensor")

    def check_tensors(self, soc: str) -> None:
        """Checks dtypes, presence and shapes, and binds the axes."""
        full, mode = self.full, self.mode
        for scale, offset in zip(SCALES, OFFSETS, strict=True):
            if full[offset] is not None and (soc != "A5" or full[scale] is None):
                expected = f"nothing without {scale}" if soc == "A5" else f"nothing on {soc}"
                self.refuse(f"quant.{offset}", offset, expected, "a tensor")
        scales = [full[name] for name in SCALES if full[name] is not None]
        if mode == "Norm" and soc != "A5" and scales:
            expected = f"a paged mode for int8 caches on {soc}"
            self.refuse("quant.norm", "cache_mode", expected, "Norm")
        kind = self.dtype("kv", torch.bfloat16, torch.float16)
        self.tensor("gamma", "C", kind)
        self.rank("cos", 4, where=", [B, 1, S, R]")
        self.bind("R", full["cos"].shape[-1], "cos")
        self.tensor("kv", "B 1 S C+R", kind)
        rows = full["cos"].shape[2]
        for name in ("cos", "sin"):  # a single row of a sequence serves all of its tokens
            self.tensor(name, "B 1 1 R" if known(rows == 1) else "B 1 S R", kind)
        lead = "B 1 Scache" if mode == "Norm" else "BlockNum BlockSize 1"
        for name, (scale, width) in zip(_CACHES, SCALES.items(), strict=True):
            self.sizes(name, f"{lead} {width}")
            if full[scale] is None and full[name].dtype == torch.int8:
                self.presence(scale, True, f"with an int8 {name}")
            self.dtype(name, kind if full[scale] is None else torch.int8)
        for name, width in (SCALES | OFFSETS).items():
            if full[name] is not None:
                self.tensor(name, width if full[name].dim() == 1 else f"1 {width}", torch.float32)
        if len(scales) == 2:
            self.rank("c_kv_scale", scales[0].dim(), where=", as k_rope_scale")
        self.dtype("index", torch.int64)

    def check_sizes(self, soc: str, cann: str) -> None:
        """Checks the sizes of the axes, and the number of slots."""
        dims, index = self.dims, self.full["index"]
        if soc != "A5":
            self.within("C", "512", f" on {soc}")
            self.within("R", "64", f" on {soc}")
        self.within("R", "2../2")
        for axis in dims:
            self.within(axis, "1..")
        paged = self.mode != "Norm"
        blocks = -(-dims["S"] // dims["BlockSize"]) if paged else 0  # of a sequence
        slot_count = dims["B"] * (blocks if self.mode in BLOCKS else dims["S"])
        if different(index.numel(), slot_count):
            self.refuse("shape.index", "index", f"{slot_count} slots", list(index.shape))
        if not paged:
            self.sizes("index", "B S")
            return
        step = 32 if torch.int8 in {self.full[name].dtype for name in _CACHES} else 16
        self.within("BlockSize", f"{step}../{step}")
        least_blocks = blocks * dims["B"]
        if cann == FROM_BLOCKS and type(least_blocks) is int:
            self.within("BlockNum", f"{least_blocks}..", ", which is B*ceil(S/BlockSize)")

    def check_values(self) -> None:
        """Refuses slots that are no rows of the cache, or that name a row twice. A negative slot
        skips its token.
        """
        index, dims = self.readable("index"), self.dims
        paged = self.mode != "Norm"
        end = dims["BlockNum"] * dims["BlockSize"] if paged else dims["Scache"]
        for sequence in [index.reshape(-1)] if paged else index:
            self.rows("index", sequence, end, "rows below the cache's")
