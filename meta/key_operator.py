"""``npu_kv_rmsnorm_rope_cache`` (v1, v2): RMSNorm, RoPE and both cache writes of the key's side;
tables and checks.

Axes: B and S tokens, C the latent (512), R its rotated part (64). Read from
`kv_rms_norm_rope_cache_def.cpp` and the tilings beside it (`.._base_tiling.cpp`, `.._ds_tiling.cpp`
of A2 and A3, `.._regbase_full_load_tiling.cpp` of A5) at 8.5.0, 9.0.0, 9.1.0 and master 2026-08
("latest"), and the documents of aclnnKvRmsNormRopeCacheV2. The form with a separate ``v`` is none
of multi-head latent attention and is not described here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mla_fusion.meta.binder import Binder
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.layout import elsewhere, kind_of, not_strided, writable
from mla_fusion.meta.limits import RELEASES, SOCS, known_releases
from mla_fusion.meta.prolog import Argument, Operator
from mla_fusion.meta.values import holds_data

HOST = "kv_rms_norm_rope_cache tiling"
_TENSORS = tuple(map(Argument, "kv gamma cos sin index k_cache ckv_cache".split()))
SCALES = {"k_rope_scale": "R", "c_kv_scale": "C"}  # of which cache's rows
OFFSETS = {"k_rope_offset": "R", "c_kv_offset": "C"}
_OPTIONS = (
    *(Argument(name, "Tensor?") for name in (*SCALES, *OFFSETS, "v")),
    Argument("epsilon", "float", 1e-05),
    Argument("cache_mode", "str", "Norm"),
    Argument("is_output_kv", "bool", False),
)
_DTYPES = tuple(Argument(name, "int?") for name in ("k_cache_dtype", "ckv_cache_dtype"))
# as the whole prologue's operator calls them; here k_cache and ckv_cache
CACHES = ("kr_cache", "kv_cache")
_ROWS = ("k_pe", "c_kv")
_GE = "KvRmsNormRopeCache"

V1 = Operator(
    "npu_kv_rmsnorm_rope_cache",
    "v1",
    _TENSORS,
    _OPTIONS,
    (*CACHES, *_ROWS),
    ge_type=_GE,
    ge_results=(*CACHES, *_ROWS),
)
V2_FUNCTIONAL = Operator(
    "npu_kv_rmsnorm_rope_cache_v2_functional",
    "v2",
    _TENSORS,
    (*_OPTIONS, *_DTYPES),
    results=(*_ROWS, *CACHES),
    ge_type=_GE,
    ge_results=V1.ge_results,
)
V2 = Operator(
    "npu_kv_rmsnorm_rope_cache_v2",
    "v2",
    *(V2_FUNCTIONAL.positional, V2_FUNCTIONAL.keywords),
    results=_ROWS,
    ge_type=_GE,
    ge_results=V1.ge_results,
    written=("k_cache", "ckv_cache"),
    functional=V2_FUNCTIONAL.name,
)
OPERATORS = {operator.name: operator for operator in (V1, V2, V2_FUNCTIONAL)}

PAGED = ("PA", "PA_BNSD", "PA_NZ")  # a slot for each token
BLOCKS = ("PA_BLK_BNSD", "PA_BLK_NZ")  # one for each block of a sequence
MODES = ("Norm", *PAGED, *BLOCKS)
SIZES = {"C": 512, "R": 64}  # of A2 and A3
SINCE = {"A2": RELEASES[0], "A3": RELEASES[0], "A5": "8.5"}
FROM_BLOCKS = "latest"  # the release that asks for as many blocks as the sequences need one by one


def check_key_operator(op: str, soc: str, cann: str, values: bool, full: Mapping[str, Any]) -> None:
    """`mla_fusion.meta.check` of these operators; ``full``: every argument by name."""
    known_releases(cann)
    if soc not in SOCS or RELEASES.index(cann) < RELEASES.index(SINCE[soc]):
        expected = "A2, A3, or A5 from CANN 8.5 on"
        raise ContractError("soc", "soc", expected, f"{soc}, CANN {cann}", source=HOST, op=op)
    bound = _Call(op, HOST, full)
    bound.check_modes(soc)
    bound.check_tensors()
    bound.check_sizes(soc, cann)
    bound.check_memory()
    if values:
        bound.check_values()


class _Call(Binder):
    """One call; every rule that fails raises ContractError."""

    @property
    def mode(self) -> str:
        return str(self.full["cache_mode"])

    def check_modes(self, soc: str) -> None:
        for name in _TENSOR_NAMES:
            value = self.full[name]
            if value is not None and not_strided(value):
                self.refuse(f"type.{name}", name, "a strided tensor", kind_of(value))
        if self.mode not in MODES:
            self.refuse(
                "cache_mode.unknown", "cache_mode", "one of " + ", ".join(MODES), repr(self.mode)
            )
        if self.full["v"] is not None:
            self.refuse("v", "v", "nothing: keys and values of one latent", "a tensor")
        for scale, offset in zip(SCALES, OFFSETS, strict=True):
            if self.full[offset] is not None and (soc != "A5" or self.full[scale] is None):
                expected = f"nothing without {scale}" if soc == "A5" else f"nothing on {soc}"
                self.refuse(f"quant.{offset}", offset, expected, "a tensor")
        if (
            self.mode == "Norm"
            and soc != "A5"
            and any(self.full[name] is not None for name in SCALES)
        ):
            self.refuse(
                "quant.norm", "cache_mode", f"a paged mode for int8 caches on {soc}", "Norm"
            )

    def check_tensors(self) -> None:
        full, dims = self.full, self.dims
        kind = full["kv"].dtype
        if kind not in (torch.bfloat16, torch.float16):
            self.refuse("dtype.kv", "kv", "torch.bfloat16 or torch.float16", kind)
        self.tensor("gamma", "C", kind)
        if full["cos"].dim() != 4:
            self.refuse("rank.cos", "cos", "[B, 1, S, R]", list(full["cos"].shape))
        dims["R"] = full["cos"].shape[-1]
        dims["C+R"] = dims["C"] + dims["R"]
        self.tensor("kv", "B 1 S C+R", kind)
        rows = full["cos"].shape[2]
        for name in ("cos", "sin"):  # one row a sequence serves all of its tokens
            self.tensor(name, "B 1 1 R" if type(rows) is int and rows == 1 else "B 1 S R", kind)
        paged = self.mode != "Norm"
        for name, width, scale in (
            ("k_cache", "R", "k_rope_scale"),
            ("ckv_cache", "C", "c_kv_scale"),
        ):
            if paged:
                self.sizes(name, tuple(full[name].shape), f"BlockNum BlockSize 1 {width}")
            else:
                self.sizes(name, tuple(full[name].shape), f"B 1 Scache {width}")
            quantised = full[scale] is not None
            if quantised or full[name].dtype == torch.int8:
                self.dtype(name, torch.int8)
                if not quantised:
                    self.refuse(
                        f"required.{scale}", scale, f"a tensor with an int8 {name}", "nothing"
                    )
            else:
                self.dtype(name, kind)
        for name, width in (SCALES | OFFSETS).items():
            if full[name] is not None:
                self.tensor(name, width if full[name].dim() == 1 else f"1 {width}", torch.float32)
        given = [name for name in SCALES if full[name] is not None]
        if len(given) == 2 and full[given[0]].dim() != full[given[1]].dim():
            self.refuse(
                "rank.c_kv_scale",
                "c_kv_scale",
                "as many axes as k_rope_scale",
                list(full["c_kv_scale"].shape),
            )
        self.dtype("index", torch.int64)

    def check_sizes(self, soc: str, cann: str) -> None:
        dims = self.dims
        for axis, size in SIZES.items():
            found = dims[axis]
            if soc != "A5" and type(found) is int and found != size:
                owner = "gamma" if axis == "C" else "cos"
                self.refuse(
                    f"dims.{axis.lower()}", owner, f"{axis} {size} on {soc}", f"{axis} {found}"
                )
        if type(dims["R"]) is int and dims["R"] % 2:
            self.refuse("dims.r", "cos", "R even", f"R {dims['R']}")
        for axis, size in dims.items():
            if type(size) is int and size < 1:
                self.refuse(f"dims.{axis.lower()}", "kv", f"{axis} at least 1", f"{axis} {size}")
        tokens, index = dims["B"] * dims["S"], self.full["index"]
        if self.mode in BLOCKS:
            blocks = -(-dims["S"] // dims["BlockSize"])
            self._count_index(index, dims["B"] * blocks)
        else:
            self._count_index(index, tokens)
        if self.mode == "Norm":
            self.sizes("index", tuple(index.shape), "B S")
            return
        block, kinds = (
            dims["BlockSize"],
            {self.full[name].dtype for name in ("k_cache", "ckv_cache")},
        )
        step = 32 if torch.int8 in kinds else 16
        if type(block) is int and block % step:
            self.refuse(
                "dims.blocksize", "k_cache", f"BlockSize a multiple of {step}", f"BlockSize {block}"
            )
        wanted = -(-dims["S"] // block) * dims["B"]
        if (
            cann == FROM_BLOCKS
            and type(wanted) is type(dims["BlockNum"]) is int
            and dims["BlockNum"] < wanted
        ):
            expected = f"BlockNum at least B*ceil(S/BlockSize) = {wanted}"
            self.refuse("dims.blocknum", "k_cache", expected, f"BlockNum {dims['BlockNum']}")

    def _count_index(self, index: torch.Tensor, wanted: Any) -> None:
        if type(wanted) is type(index.numel()) is int and index.numel() != wanted:
            self.refuse("shape.index", "index", f"{wanted} slots", list(index.shape))

    def check_memory(self) -> None:
        found = elsewhere(self.full, _TENSOR_NAMES)
        if found is not None:
            name, expected, device = found
            self.refuse(
                f"device.{name}", name, f"a tensor on {expected}, as those before it", device
            )
        for name in ("k_cache", "ckv_cache"):
            if not writable(self.full[name], first_axis_free=False, ones_free=True):
                strides = f"strides {list(self.full[name].stride())}"
                self.refuse(
                    f"contiguous.{name}",
                    name,
                    "a contiguous tensor: of others a copy is written",
                    strides,
                )

    def check_values(self) -> None:
        """Each slot is a row of the cache, or negative, which skips the token; no row is written
        twice.
        """
        index, dims = self.full["index"], self.dims
        if not holds_data(index):
            self.refuse(
                "values.meta", "index", "a tensor with data, to check its values", index.device
            )
        rows = dims["Scache"] if self.mode == "Norm" else dims["BlockNum"] * dims["BlockSize"]
        bad = index[index >= rows]
        if bad.numel():
            self.refuse(
                "values.index.range", "index", f"rows below {rows}", int(bad.reshape(-1)[0])
            )
        for sequence in index if self.mode == "Norm" else [index.reshape(-1)]:
            written = sequence[sequence >= 0].sort().values
            repeated = written[1:][written.diff() == 0]
            if repeated.numel():
                self.refuse(
                    "values.index.duplicate", "index", "every row at most once", int(repeated[0])
                )


_TENSOR_NAMES = V1.ge_inputs
