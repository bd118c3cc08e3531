"""The contract of ATB's MlaPreprocess (``torch_npu.atb.npu_mla_preprocess``): signature, checks, results.

Read from the operation's kernels (`mla_preprocess_mix_bf16.cce`, `mla_preprocess_mix.cce`), its host check and
torch_npu's entry `MLAPreprocessAtb.cpp`. Axes: T tokens, H hidden, Q query rank, C KV rank, R rope head dim, D nope
head dim, N heads. wdqkv holds, transposed, the columns ``[C | R | Q]`` of the down-projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.limits import known_releases
from mla_fusion.meta.symbolic import different
from mla_fusion.meta.values import holds_data

OP = "mla_preprocess"
KERNEL, HOST = "mla_preprocess_mix_bf16.cce", "MlaPreprocess operation"
REQUIRED = (
    "input",
    "gamma0",
    "beta0",
    "wdqkv",
    "descale0",
    "gamma1",
    "beta1",
    "wuq",
    "descale1",
    "gamma2",
    "cos",
    "sin",
    "wuk",
    "kv_cache",
    "kv_cache_rope",
    "slotmapping",
)
OPTIONAL = (
    "quant_scale0",
    "quant_offset0",
    "bias0",
    "quant_scale1",
    "quant_offset1",
    "bias1",
    "ctkv_scale",
    "q_nope_scale",
)


@dataclass(frozen=True)
class CacheForm:
    """One cacheMode: its number in ATB, shapes of both caches (None: not used), and of the query results."""

    number: int
    kv: str
    kr: str | None
    q_out0: str = "T N C"
    int8: bool = False


NZ_BLOCK = 128  # rows of a block of an NZ cache, fixed in the kernel
CACHE_FORMS: Mapping[str, CacheForm] = {
    "kvcache": CacheForm(0, "BlockNum BlockSize 1 C+R", None, "T N C+R"),
    "krope_ctkv": CacheForm(1, "BlockNum BlockSize 1 C", "BlockNum BlockSize 1 R"),
    "int8_nzcache": CacheForm(2, "BlockNum C/32 128 32", "BlockNum R/16 128 16", int8=True),
    "nzcache": CacheForm(3, "BlockNum C/16 128 16", "BlockNum R/16 128 16"),
}
# value of the torch argument -> number of the ATB parameter
CACHE_MODES = {name: form.number for name, form in CACHE_FORMS.items()}
QUANT_MODES = {"per_tensor_quant_asymm": 0, "per_token_quant_symm": 1}
DEFAULTS = {"cache_mode": "krope_ctkv", "quant_mode": "per_token_quant_symm"}
MAX_TOKENS = 1024
_SIZES = {"Q": 1536, "C": 512, "R": 64, "D": 128}


def arguments_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument by name; an empty optional tensor is absent, a mode of None the default."""
    full: dict[str, Any] = {**dict.fromkeys(OPTIONAL), **DEFAULTS}
    for name, value in given.items():
        if name not in full and name not in REQUIRED:
            _refuse("argument.unknown", name, f"an argument of {OP}", name, {})
        if name in DEFAULTS:
            full[name] = DEFAULTS[name] if value is None else value
            continue
        if value is not None and not isinstance(value, torch.Tensor):
            _refuse(f"type.{name}", name, "a tensor", type(value).__name__, {})
        absent = name in OPTIONAL and value is not None and value.dim() == 1 and tuple(value.shape) == (0,)
        full[name] = None if absent else value
    for name in REQUIRED:
        if full.get(name) is None:
            _refuse(f"required.{name}", name, "a tensor", "nothing", {})
    for name, known in (("cache_mode", CACHE_MODES), ("quant_mode", QUANT_MODES)):
        if not isinstance(full[name], str) or full[name] not in known:
            _refuse(f"{name}.unknown", name, "one of " + ", ".join(known), repr(full[name]), {})
    return full


def check_preprocess(soc: str, cann: str, values: bool, given: Mapping[str, Any]) -> None:
    """`mla_fusion.meta.check` of ``mla_preprocess``: structure, then the sizes the device takes."""
    known_releases(cann)
    if soc not in ("A2", "A3"):
        raise ContractError("soc", "soc", "A2 or A3", repr(soc), source=HOST, op=OP)
    full = arguments_of(given)
    dims = check_preprocess_structure(full)
    if full["cache_mode"] == "kvcache":
        expected = "krope_ctkv, int8_nzcache or nzcache: torch does not offer mode 0"
        _refuse("cache_mode.torch", "cache_mode", expected, "kvcache", dims)
    for axis, size in _SIZES.items():
        if different(dims[axis], size):
            _refuse(f"dims.{axis.lower()}", _OWNER[axis], f"{axis} {size}", f"{axis} {dims[axis]}", dims)
    hidden, block = dims["H"], dims["BlockSize"]
    if type(hidden) is int and not (2048 <= hidden <= 8192 and hidden % 32 == 0):
        _refuse("dims.h", "input", "H 2048..8192, a multiple of 32", f"H {hidden}", dims)
    if type(dims["T"]) is int and not 1 <= dims["T"] <= MAX_TOKENS:
        _refuse("dims.t", "input", f"T 1..{MAX_TOKENS}", f"T {dims['T']}", dims)
    if type(block) is int and not (1 <= block <= 128 or block == 256):
        _refuse("dims.blocksize", "kv_cache", "BlockSize at most 128, or 256", f"BlockSize {block}", dims)
    if values:
        check_slots(full["slotmapping"], dims)


def check_preprocess_structure(full: Mapping[str, Any]) -> dict[str, Any]:
    """Dtypes, presence and agreement of all shapes; the sizes of the axes."""
    kind = full["input"].dtype
    if kind not in (torch.bfloat16, torch.float16):
        _refuse("dtype.input", "input", "torch.bfloat16 or torch.float16", kind, {})
    dims: dict[str, Any] = {}
    bound = _Binder(full, dims)
    bound("input", "T H", kind)
    bound("gamma0", "H", kind)
    bound("beta0", "H", kind)
    bound("gamma1", "Q", kind)
    bound("beta1", "Q", kind)
    bound("gamma2", "C", kind)
    bound("cos", "T R", kind)
    bound("sin", "T R", kind)
    bound.set("W", dims["C"] + dims["R"] + dims["Q"])
    bound.absorb("wuk", kind)
    bound.set("U", dims["N"] * (dims["D"] + dims["R"]))
    quantised = full["wdqkv"].dtype == torch.int8
    weight = torch.int8 if quantised else kind
    bound.weight("wdqkv", "W", "H", weight)
    bound.weight("wuq", "U", "Q", weight)
    bound("descale0", "W", torch.float32 if kind == torch.bfloat16 else torch.int64)
    bound("descale1", "U", torch.float32 if kind == torch.bfloat16 else torch.int64)
    if quantised and QUANT_MODES[full["quant_mode"]] == 0:
        for stage, width in (("0", "W"), ("1", "U")):
            bound.needed("quant_scale" + stage, "1", kind)
            bound.needed("quant_offset" + stage, "1", torch.int8)
            bound.needed("bias" + stage, width, torch.int32)
    mode = CACHE_MODES[full["cache_mode"]]
    if mode == 2:
        bound.needed("ctkv_scale", "1", kind)
        bound.needed("q_nope_scale", "N", kind)
    bound.caches(CACHE_FORMS[full["cache_mode"]], kind)
    bound("slotmapping", "T", torch.int32)
    return dims


def infer_preprocess(given: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], torch.dtype]]:
    """q_out0, kv_cache_out0, q_out1, kv_cache_out1; in mode 0 the last two are empty."""
    full = arguments_of(given)
    tokens, heads, rank = full["input"].shape[0], full["wuk"].shape[0], full["gamma2"].shape[0]
    rope, kind = full["cos"].shape[-1], full["input"].dtype
    kv, kr = full["kv_cache"], full["kv_cache_rope"]
    if full["cache_mode"] == "kvcache":
        query = (tokens, heads, rank + rope)
        return [(query, kind), (tuple(kv.shape), kv.dtype), ((0,), kind), (tuple(kr.shape), kr.dtype)]
    results = [((tokens, heads, rank), kv.dtype), (tuple(kv.shape), kv.dtype)]
    return [*results, ((tokens, heads, rope), kind), (tuple(kr.shape), kr.dtype)]


def check_slots(slots: torch.Tensor, dims: Mapping[str, Any]) -> None:
    """slotmapping: -1 exactly skips a token, anything else is a row, each at most once."""
    if not holds_data(slots):
        _refuse("values.meta", "slotmapping", "a tensor with data, to check its values", slots.device, dims)
    rows = dims["BlockNum"] * dims["BlockSize"]
    bad = slots[(slots < -1) | (slots >= rows)]
    if len(bad):
        expected = f"-1 or rows below BlockNum*BlockSize = {rows}"
        _refuse("values.slotmapping.range", "slotmapping", expected, int(bad[0]), dims)
    written = slots[slots >= 0].sort().values
    if bool((written.diff() == 0).any()):
        repeated = int(written[1:][written.diff() == 0][0])
        _refuse("values.slotmapping.duplicate", "slotmapping", "every row at most once", repeated, dims)


_OWNER = {"Q": "gamma1", "C": "gamma2", "R": "cos", "D": "wuk"}


class _Binder:
    """Checks tensors against axes, and binds axes that a tensor is the first to have."""

    def __init__(self, full: Mapping[str, Any], dims: dict[str, Any]) -> None:
        self.full, self.dims = full, dims

    def set(self, axis: str, size: Any) -> None:
        self.dims[axis] = size

    def __call__(self, name: str, shape: str, dtype: torch.dtype) -> None:
        tensor = self.full[name]
        if tensor.dtype != dtype:
            _refuse(f"dtype.{name}", name, dtype, tensor.dtype, self.dims)
        self.sizes(name, tuple(tensor.shape), shape)

    def sizes(self, name: str, found: tuple[Any, ...], shape: str) -> None:
        axes = shape.split()
        if len(found) != len(axes):
            _refuse(f"rank.{name}", name, f"[{', '.join(axes)}]", f"{list(found)}", self.dims)
        for axis, size in zip(axes, found, strict=True):
            wanted = int(axis) if axis.isdigit() else self.dims.setdefault(axis, size)
            if size is not wanted and different(size, wanted):
                shown = ", ".join(a if a.isdigit() else f"{a} = {self.dims.get(a, 'any')}" for a in axes)
                _refuse(f"shape.{name}", name, f"[{shown}]", list(found), self.dims)

    def needed(self, name: str, shape: str, dtype: torch.dtype) -> None:
        if self.full[name] is None:
            why = f"{self.full['quant_mode']}, {self.full['cache_mode']}"
            _refuse(f"required.{name}", name, f"a tensor with {why}", "nothing", self.dims)
        self(name, shape, dtype)

    def weight(self, name: str, n: str, k: str, dtype: torch.dtype) -> None:
        """[n, k], or FRACTAL_NZ storage [1, k/C0, n, C0]."""
        tensor = self.full[name]
        if tensor.dtype != dtype:
            _refuse(f"dtype.{name}", name, dtype, tensor.dtype, self.dims)
        sizes = tuple(tensor.shape)
        if len(sizes) == 4:
            c0 = 32 // tensor.element_size()
            if different(sizes[0], 1) or different(sizes[3], c0):
                _refuse(f"shape.{name}", name, f"[1, {k}/{c0}, {n}, {c0}]", list(sizes), self.dims)
            sizes = (sizes[2], sizes[1] * c0)
        self.sizes(name, sizes, f"{n} {k}")

    def absorb(self, name: str, dtype: torch.dtype) -> None:
        """[N, D, C], or FRACTAL_NZ storage [N, C/16, D, 16]."""
        tensor = self.full[name]
        if tensor.dtype != dtype:
            _refuse(f"dtype.{name}", name, dtype, tensor.dtype, self.dims)
        sizes = tuple(tensor.shape)
        if len(sizes) == 4:
            sizes = (sizes[0], sizes[2], sizes[1] * sizes[3])
        self.sizes(name, sizes, "N D C")

    def caches(self, form: CacheForm, kind: torch.dtype) -> None:
        c, r = self.dims["C"], self.dims["R"]
        for axis, size in (("C+R", c + r), ("C/32", c // 32), ("C/16", c // 16), ("R/16", r // 16)):
            if axis in f"{form.kv} {form.kr}":
                self.set(axis, size)
        if "BlockSize" not in form.kv:
            self.set("BlockSize", NZ_BLOCK)
        self("kv_cache", form.kv, torch.int8 if form.int8 else kind)
        if form.kr is not None:
            self("kv_cache_rope", form.kr, kind)


def _refuse(code: str, argument: str, expected: object, found: object, dims: Mapping[str, Any]) -> NoReturn:
    raise ContractError(code, argument, str(expected), str(found), dims, HOST, OP)
