"""`check`: one call against the specification, first the modes, then presence, dtypes, shapes and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NoReturn

import torch
from mla_fusion.meta import layout, preprocess, preprocess_csrc, spec
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.infer import implied_quant_modes
from mla_fusion.meta.limits import VERSIONS, Limits, limits
from mla_fusion.meta.prolog import CACHES
from mla_fusion.meta.signature import complete, named
from mla_fusion.meta.spec import ACTIVATION, CACHE_MODES, CACHE_QUANTS, ELEMENT, TILING, WEIGHT_MODES
from mla_fusion.meta.symbolic import different as _different
from mla_fusion.meta.values import check_values

_VALIDATION = (torch.bfloat16, torch.float32, torch.float64)
_SCALE_NAMES = (
    *spec._CHANNEL_SCALES,
    "quant_scale_ckv",
    "quant_scale_ckr",
    "smooth_scales_cq",
    "k_nope_clip_alpha",
)
_DTYPE_ARGUMENTS = ("token_x_dtype", "weight_dq_dtype", "weight_uq_qr_dtype", "weight_dkv_kr_dtype")


def check(op: str, *, soc: str = "A3", cann: str = "latest", values: bool = False, **arguments: Any) -> None:
    """Raise ContractError unless the operator takes this call on ``soc`` with CANN ``cann``.

    ``arguments`` are the operator's own, by name; tensors may be meta or fake, sizes symbolic: a symbolic
    size is never specialised, only what is statically known to be wrong is refused. ``values=True`` also
    reads cache_index and actual_seq_len, which the device does not check (see `mla_fusion.meta.values`).
    ``op`` is an operator of torch_npu: ``npu_mla_prolog``, ``_v2``, ``_v3``, ``_v3_functional``,
    ``npu_mla_preprocess`` (also ``mla_preprocess``), or ``mla_preprocess_csrc``, vllm-ascend's fork of the last.
    """
    name = named(op)
    if name == preprocess.OP:
        return preprocess.check_preprocess(soc, cann, values, arguments)
    if name == preprocess_csrc.OP:
        return preprocess_csrc.check_csrc(soc, cann, values, arguments)
    call = checked(op, soc, cann, arguments)
    if values:
        check_values(op, call.full, call.dims)


def checked(op: str, soc: str, cann: str, arguments: Mapping[str, Any]) -> _Call:
    """A call that has passed `check`, with its modes and the sizes of its axes."""
    allowed = limits(op, soc, cann)
    call = _Call(op, complete(op, arguments))
    call.modes(allowed, f"{soc}, CANN {cann}")
    call.tensors(torch.bfloat16)
    call.sizes(allowed, f"{soc}, CANN {cann}")
    call.memory(allowed, f"{soc}, CANN {cann}")
    return call


def check_structure(op: str, arguments: Mapping[str, Any]) -> None:
    """`check` without the tables of sizes and the strides, and with float32 or float64 in place of bfloat16.

    What the CPU reference kernel asks of a call: modes that exist, tensors that fit together.
    """
    call = _Call(op, complete(op, arguments))
    call.modes(None, "")
    gamma = call.full["rmsnorm_gamma_cq"]
    call.tensors(gamma.dtype if gamma.dtype in _VALIDATION else torch.bfloat16)


class _Call:
    """One call being checked: its arguments by name, and the axes bound so far."""

    def __init__(self, op: str, full: dict[str, Any]) -> None:
        self.op, self.full, self.version = op, full, VERSIONS[op]
        self.dims: dict[str, Any] = {}
        for name in _tensor_names(op):
            value = full[name]
            if value is not None and layout.not_strided(value):
                self.refuse(f"type.{name}", name, "a strided tensor", layout.kind_of(value))

    def refuse(self, code: str, argument: str, expected: str, found: object, source: str = TILING) -> NoReturn:
        raise ContractError(code, argument, expected, str(found), self.dims, source, self.op)

    # -- modes

    def modes(self, allowed: Limits | None, where: str) -> None:
        full = self.full
        if self.version == "v3":
            self.wq, self.kv = full["weight_quant_mode"], full["kv_cache_quant_mode"]
        else:
            self.wq, self.kv = implied_quant_modes(full)
        known = allowed.quant_modes if allowed else _every_quant_pair()
        if (self.wq, self.kv) not in known:
            self._refuse_quant(known, where)
        self.weights, self.cache = WEIGHT_MODES[self.wq], CACHE_QUANTS[self.kv]
        if self.version == "v3":
            self._dependent_modes(allowed is not None)
        mode = full["cache_mode"]
        if not isinstance(mode, str) or mode not in CACHE_MODES:
            self.refuse("cache_mode.unknown", "cache_mode", "one of " + ", ".join(CACHE_MODES), repr(mode))
        if allowed and mode not in allowed.cache_modes:
            self.refuse(
                "cache_mode.release",
                "cache_mode",
                f"one of {', '.join(allowed.cache_modes)} on {where}",
                mode,
            )
        if mode not in self.cache.cache_modes:
            self.refuse(
                "cache_mode.quant",
                "cache_mode",
                f"one of {', '.join(self.cache.cache_modes)} with kv_cache_quant_mode {self.kv}",
                mode,
            )
        self.mode = CACHE_MODES[mode]

    def _refuse_quant(self, known: frozenset[tuple[int, int]], where: str) -> NoReturn:
        weight_modes = sorted({wq for wq, _ in known})
        where = f" on {where}" if where else ""
        if self.wq not in weight_modes:
            expected = f"one of {weight_modes}{where}" if weight_modes else f"an operator that exists{where}"
            self.refuse("quant.weight_quant_mode", "weight_quant_mode", expected, self.wq)
        legal = sorted(kv for wq, kv in known if wq == self.wq)
        expected = f"one of {legal} with weight_quant_mode {self.wq}{where}"
        self.refuse("quant.combination", "kv_cache_quant_mode", expected, self.kv)

    def _dependent_modes(self, device: bool) -> None:
        repo = self.cache.repo_mode
        wanted = {
            "query_quant_mode": self.cache.query_quant_mode,
            "ckvkr_repo_mode": repo,
            "quant_scale_repo_mode": repo,
        }
        if device:
            wanted["tile_size"] = spec.TILE_SIZE
        for name, value in wanted.items():
            if self.full[name] != value:
                expected = f"{value} with kv_cache_quant_mode {self.kv}"
                self.refuse(f"quant.{name}", name, expected, self.full[name])
        if self.wq == 5:
            names = (*_DTYPE_ARGUMENTS, "kv_cache_dtype") if self.kv in (1, 3) else _DTYPE_ARGUMENTS
            for name in names:
                if self.full[name] != spec.HIFLOAT8:
                    expected = f"{spec.HIFLOAT8} (hifloat8) with weight_quant_mode 5"
                    self.refuse(f"quant.{name}", name, expected, self.full[name], "torch_npu meta")

    # -- tensors

    def tensors(self, activation: torch.dtype) -> None:
        roles: dict[Any, Any] = {ACTIVATION: activation}
        element = self.weights.element
        roles[ELEMENT] = roles.get(element, element)
        for role, kind in self.weights.dtypes.items():
            roles[role] = roles.get(kind, kind)
        self.roles = roles
        rank = self.full["token_x"].dim()
        if rank not in (2, 3):
            self.refuse("rank.token_x", "token_x", "2-D [T, He] or 3-D [B, S, He]", f"{rank}-D")
        if rank not in self.mode.index:
            shape = "3-D [B, S, He]" if rank == 2 else "2-D [T, He]"
            expected = f"{shape} with cache_mode {self.full['cache_mode']}"
            self.refuse("cache_mode.rank", "token_x", expected, f"{rank}-D")
        self.lead = ("T",) if rank == 2 else ("B", "S")
        for tensor in spec.INPUTS:
            self._tensor(tensor.name, tensor.shape, roles.get(tensor.dtype, tensor.dtype), tensor.nz)
            if tensor.name == "token_x":
                self._count_tokens()
        self._caches()
        self._index(rank)
        self._scales()

    def _count_tokens(self) -> None:
        dims = self.dims
        dims["tokens"] = dims["T"] if len(self.lead) == 1 else dims["B"] * dims["S"]

    def _caches(self) -> None:
        width = self.cache.width
        if width == "Dtile":
            self.dims["tile"] = tile = self.full["tile_size"]
            if tile <= 0 or _different(self.dims["Hckv"] % tile, 0):
                self.refuse("quant.tile_size", "tile_size", "a divisor of Hckv", tile)
        roles = self.roles
        self._tensor("kv_cache", f"{self.mode.cache} {width}", roles.get(self.cache.kv, self.cache.kv))
        if self.cache.kr is not None:
            self._tensor("kr_cache", f"{self.mode.cache} Dr", roles.get(self.cache.kr, self.cache.kr))
        elif _different(self.full["kr_cache"].numel(), 0):
            found = list(self.full["kr_cache"].shape)
            self.refuse("shape.kr_cache", "kr_cache", "an empty tensor: the rope part is in kv_cache", found)

    def _index(self, rank: int) -> None:
        mode, shape = self.full["cache_mode"], self.mode.index[rank]
        self._presence("cache_index", shape is not None, f"with cache_mode {mode}")
        if shape is not None:
            self._tensor("cache_index", shape, torch.int64)
        if self.version == "v3":
            needed = self.mode.actual_seq_len and rank == 2
            self._presence("actual_seq_len", needed, f"with cache_mode {mode} and a {rank}-D token_x")
            if needed:
                self._tensor("actual_seq_len", "*", torch.int32)

    def _scales(self) -> None:
        required = {**self.weights.required, **self.cache.required}
        if self.wq not in spec.CLIP_WEIGHT_MODES:
            required.pop("k_nope_clip_alpha", None)
        if self.version == "v2" and self.kv == 1:
            required["quant_scale_ckv"] = spec.QUANT_SCALE_CKV_V2
        why = f"with weight_quant_mode {self.wq}, kv_cache_quant_mode {self.kv}"
        for name in _SCALE_NAMES:
            if name in required:
                self._presence(name, True, why)
            elif name not in self.weights.optional or self.full.get(name) is None:
                self._presence(name, False, why)
                continue
            shape = required.get(name) or self.weights.optional[name]
            dtype = self.weights.scale_dtype if name in spec._BLOCK_SCALES else torch.float32
            self._tensor(name, shape, dtype)

    def _presence(self, name: str, needed: bool, why: str) -> None:
        if needed == (self.full.get(name) is not None):
            return
        if needed:
            self.refuse(f"required.{name}", name, f"a tensor {why}", "nothing")
        self.refuse(f"forbidden.{name}", name, f"nothing {why}", "a tensor")

    def _tensor(self, name: str, shape: str, dtype: torch.dtype, nz: bool = False) -> None:
        tensor = self.full[name]
        if tensor.dtype != dtype:
            self.refuse(f"dtype.{name}", name, str(dtype), tensor.dtype)
        axes = _axes(shape, self.lead)
        sizes = tuple(tensor.shape)
        if nz and len(sizes) == 4:
            sizes = self._from_nz(name, sizes, tensor.element_size())
        if len(sizes) != len(axes):
            self.refuse(f"rank.{name}", name, f"[{', '.join(axes)}]", f"{len(sizes)}-D {list(tensor.shape)}")
        dims = self.dims
        for axis, size in zip(axes, sizes, strict=True):
            if axis == "*":
                continue
            if axis in spec.DERIVED:
                wanted = spec.DERIVED[axis](dims)
            elif axis in dims:
                wanted = dims[axis]
            else:
                dims[axis] = size
                continue
            if size is not wanted and _different(size, wanted):
                shown = ", ".join(f"{axis} = {self._size(axis)}" if axis != "1" else "1" for axis in axes)
                self.refuse(f"shape.{name}", name, f"[{shown}]", list(tensor.shape))

    def _size(self, axis: str) -> Any:
        return spec.DERIVED[axis](self.dims) if axis in spec.DERIVED else self.dims.get(axis, "any")

    def _from_nz(self, name: str, sizes: tuple[Any, ...], item: int) -> tuple[Any, Any]:
        """(k, n) of FRACTAL_NZ storage ``[n/C0, k/16, 16, C0]``, C0 being 32 bytes."""
        c0 = 32 // item
        if _different(sizes[2], 16) or _different(sizes[3], c0):
            self.refuse(f"shape.{name}", name, f"[n/{c0}, k/16, 16, {c0}] or [k, n]", list(sizes))
        return sizes[1] * 16, sizes[0] * c0

    # -- sizes

    def sizes(self, allowed: Limits, where: str) -> None:
        for axis, sizes in allowed.dims.items():
            size = self.dims.get(axis)
            if type(size) is int and size not in sizes:
                argument = _AXIS_OWNER[axis]
                self.refuse(f"dims.{axis.lower()}", argument, f"{axis} {sizes} on {where}", f"{axis} {size}")

    # -- memory

    def memory(self, allowed: Limits, where: str) -> None:
        """Devices, storage formats and strides."""
        names = _tensor_names(self.op)
        elsewhere = layout.elsewhere(self.full, names)
        if elsewhere is not None:
            name, expected, found = elsewhere
            self.refuse(f"device.{name}", name, f"a tensor on {expected}, as those before it", found)
        for tensor in spec.INPUTS:
            form = layout.npu_format(self.full[tensor.name]) if tensor.nz else None
            if form not in (None, layout.FRACTAL_NZ):
                expected = f"format FRACTAL_NZ: torch_npu.npu_format_cast({tensor.name}, {layout.FRACTAL_NZ})"
                self.refuse(f"format.{tensor.name}", tensor.name, expected, f"format {form}")
        for name in names:
            given = self.full[name]
            if given is not None and name not in CACHES and not layout.contiguous(given):
                self._refuse_strides(name, "a contiguous tensor")
        free = allowed.strided_caches
        for name in CACHES:
            if not layout.writable(self.full[name], first_axis_free=free, ones_free=not free):
                axes = "contiguous axes, the first excepted," if free else "a contiguous tensor"
                self._refuse_strides(name, f"{axes} on {where}")

    def _refuse_strides(self, name: str, expected: str) -> NoReturn:
        found = f"{list(self.full[name].shape)} with strides {list(self.full[name].stride())}"
        self.refuse(f"contiguous.{name}", name, expected, found, spec.DEFINITION)


_AXIS_OWNER = {
    "He": "token_x",
    "Hcq": "weight_dq",
    "D": "weight_uk",
    "Dr": "rope_sin",
    "Hckv": "weight_uk",
    "N": "weight_uk",
    "Nkv": "kv_cache",
    "BlockSize": "kv_cache",
    "B": "token_x",
    "S": "token_x",
    "T": "token_x",
}


@cache
def _axes(shape: str, lead: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for word in shape.split() for axis in (lead if word == "lead" else (word,)))


@cache
def _tensor_names(op: str) -> tuple[str, ...]:
    from mla_fusion.meta.signature import signature

    required, defaults = signature(op)
    tensors = set(_SCALE_NAMES) | {"cache_index", "actual_seq_len"}
    return (*required, *(name for name in defaults if name in tensors))


@cache
def _every_quant_pair() -> frozenset[tuple[int, int]]:
    return frozenset(pair for soc in ("A3", "A5") for pair in limits("npu_mla_prolog_v3", soc, "latest").quant_modes)
