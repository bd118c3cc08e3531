"""One call against the tables: modes first, then presence, dtypes, shapes, sizes, ranks and
memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

import torch
from mla_fusion.meta import layout, spec
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.infer import implied_quant_modes
from mla_fusion.meta.limits import VERSIONS, Limits, limits, taken_by
from mla_fusion.meta.prolog import CACHES
from mla_fusion.meta.spec import (
    ACTIVATION,
    CACHE_MODES,
    CACHE_QUANTS,
    ELEMENT,
    TILING,
    WEIGHT_MODES,
)
from mla_fusion.meta.symbolic import different as _different

_SCALE_NAMES = (
    *spec._CHANNEL_SCALES,
    "quant_scale_ckv",
    "quant_scale_ckr",
    "smooth_scales_cq",
    "k_nope_clip_alpha",
)
_DTYPE_ARGUMENTS = ("token_x_dtype", "weight_dq_dtype", "weight_uq_qr_dtype", "weight_dkv_kr_dtype")
_MODES = ("weight_quant_mode", "kv_cache_quant_mode")
_PADDED = "; FRACTAL_NZ storage is padded, so the operator itself may not notice"
_WIDTH_UNCHECKED = (
    "; the operator itself does not compare the width, and its kernel writes rows of Hckv"
)


class Call:
    """One call being checked: its arguments by name, and the axes bound so far."""

    def __init__(self, op: str, full: dict[str, Any], allowed: Limits | None) -> None:
        self.op, self.full, self.allowed, self.version = op, full, allowed, VERSIONS[op]
        self.dims: dict[str, Any] = {}
        for name in _tensor_names(op):
            value = full[name]
            if value is not None and layout.not_strided(value):
                self.refuse(f"type.{name}", name, "a strided tensor", layout.kind_of(value))

    def refuse(
        self, code: str, argument: str, expected: str, found: object, source: str = TILING
    ) -> NoReturn:
        raise ContractError(code, argument, expected, str(found), self.dims, source, self.op)

    # -- modes

    def modes(self, where: str) -> None:
        full, allowed = self.full, self.allowed
        if allowed and allowed.absent:
            expected = f"an operator that can be called on {where}: {allowed.absent}"
            self.refuse("quant.weight_quant_mode", "soc", expected, self.op, "")
        if self.version == "v3":
            self.wq, self.kv = full["weight_quant_mode"], full["kv_cache_quant_mode"]
        else:
            self.wq, self.kv = implied_quant_modes(full)
        known = allowed.quant_modes if allowed else _every_quant_pair()
        if (self.wq, self.kv) not in known:
            self._refuse_quant(known, where)
        if allowed and not allowed.reads_modes:
            self._same_modes(where)
        self.weights, self.cache = WEIGHT_MODES[self.wq], CACHE_QUANTS[self.kv]
        if self.version == "v3":
            self._dependent_modes()
        mode = full["cache_mode"]
        if not isinstance(mode, str) or mode not in CACHE_MODES:
            self.refuse(
                "cache_mode.unknown", "cache_mode", "one of " + ", ".join(CACHE_MODES), repr(mode)
            )
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
            self.refuse(
                "quant.weight_quant_mode",
                "weight_quant_mode",
                f"one of {weight_modes}{where}",
                self.wq,
            )
        legal = sorted(kv for wq, kv in known if wq == self.wq)
        expected = f"one of {legal} with weight_quant_mode {self.wq}{where}"
        self.refuse("quant.combination", "kv_cache_quant_mode", expected, self.kv)

    def _same_modes(self, where: str) -> None:
        """A release that reads the scenario off the dtypes would compute another one than the modes
        say.
        """
        for name, given, implied in zip(
            _MODES, (self.wq, self.kv), implied_quant_modes(self.full), strict=True
        ):
            if given != implied:
                expected = f"{implied}, which is what {where} reads off the dtypes"
                self.refuse("quant.dtypes", name, expected, given)

    def _dependent_modes(self) -> None:
        repo = self.cache.repo_mode
        wanted = {
            "query_quant_mode": self.cache.query_quant_mode,
            "ckvkr_repo_mode": repo,
            "quant_scale_repo_mode": repo,
        }
        if self.allowed:
            wanted["tile_size"] = spec.TILE_SIZE
        for name, value in wanted.items():
            if self.full[name] != value:
                expected = f"{value} with kv_cache_quant_mode {self.kv}{self._unread()}"
                self.refuse(f"quant.{name}", name, expected, self.full[name])
        if self.wq == 5:
            names = (*_DTYPE_ARGUMENTS, "kv_cache_dtype") if self.kv in (1, 3) else _DTYPE_ARGUMENTS
            for name in names:
                if self.full[name] != spec.HIFLOAT8:
                    expected = f"{spec.HIFLOAT8} (hifloat8) with weight_quant_mode 5"
                    self.refuse(f"quant.{name}", name, expected, self.full[name], "torch_npu meta")

    def _unread(self) -> str:
        """What to add where a release does not look at an argument that every later one does."""
        read = self.allowed is None or self.allowed.reads_modes
        return "" if read else ": this release ignores it, later ones do not"

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
            self._tensor(
                tensor.name, tensor.shape, roles.get(tensor.dtype, tensor.dtype), tensor.nz
            )
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
        note = _WIDTH_UNCHECKED if self.version != "v3" else ""
        self._tensor(
            "kv_cache",
            f"{self.mode.cache} {width}",
            roles.get(self.cache.kv, self.cache.kv),
            note=note,
        )
        if self.cache.kr is not None:
            self._tensor(
                "kr_cache", f"{self.mode.cache} Dr", roles.get(self.cache.kr, self.cache.kr)
            )
        elif _different(self.full["kr_cache"].numel(), 0):
            found = list(self.full["kr_cache"].shape)
            self.refuse(
                "shape.kr_cache", "kr_cache", "an empty tensor: the rope part is in kv_cache", found
            )
        elif self.allowed:
            kinds = (
                [torch.bfloat16, torch.int8]
                if self.wq in self.allowed.empty_kr_int8
                else [torch.bfloat16]
            )
            kind = self.full["kr_cache"].dtype
            if kind not in kinds:
                expected = (
                    " or ".join(map(str, kinds))
                    + ", empty or not: the operator's definition has no other"
                )
                self.refuse("dtype.kr_cache", "kr_cache", expected, kind, spec.DEFINITION)

    def _index(self, rank: int) -> None:
        mode, shape = self.full["cache_mode"], self.mode.index[rank]
        self._presence("cache_index", shape is not None, f"with cache_mode {mode}")
        if shape is not None:
            self._tensor("cache_index", self._block_list() if shape == "*" else shape, torch.int64)
        if self.version == "v3":
            needed = self.mode.actual_seq_len and rank == 2
            why = f"with cache_mode {mode} and a {rank}-D token_x"
            self._presence("actual_seq_len", needed, why + ("" if needed else self._unread()))
            if needed:
                self._tensor("actual_seq_len", "B", torch.int32)

    def _block_list(self) -> str:
        """cache_index of a block-wise mode with a 2-D token_x: any number of blocks, once in any
        shape.
        """
        rank = self.full["cache_index"].dim()
        any_rank = self.allowed is not None and not self.allowed.block_index_ranks
        return " ".join("*" * rank) if any_rank else "*"

    def _scales(self) -> None:
        required = {**self.weights.required, **self.cache.required}
        if self.wq not in spec.CLIP_WEIGHT_MODES:
            required.pop("k_nope_clip_alpha", None)
        if self.kv == 1:
            required["quant_scale_ckv"] = self._kv_scale()
        why = f"with weight_quant_mode {self.wq}, kv_cache_quant_mode {self.kv}"
        for name in _SCALE_NAMES:
            if name in required:
                self._presence(name, True, why)
            elif name not in self.weights.optional or self.full.get(name) is None:
                self._presence(
                    name, False, why + (self._unread() if name == "k_nope_clip_alpha" else "")
                )
                continue
            shape = required.get(name) or self.weights.optional[name]
            dtype = self.weights.scale_dtype if name in spec._BLOCK_SCALES else torch.float32
            self._tensor(name, shape, dtype)

    def _kv_scale(self) -> str:
        """The kernel reads one float of it; which shape the host check wants differs, and the
        reference takes both.
        """
        if self.allowed:
            return self.allowed.kv_scale
        scale = self.full["quant_scale_ckv"]
        row = self.version == "v2" or (scale is not None and scale.dim() == 2)
        return spec.QUANT_SCALE_CKV_ROW if row else "1"

    def _presence(self, name: str, needed: bool, why: str) -> None:
        if needed == (self.full.get(name) is not None):
            return
        if needed:
            self.refuse(f"required.{name}", name, f"a tensor {why}", "nothing")
        self.refuse(f"forbidden.{name}", name, f"nothing {why}", "a tensor")

    def _tensor(
        self, name: str, shape: str, dtype: torch.dtype, nz: bool = False, note: str = ""
    ) -> None:
        tensor = self.full[name]
        if tensor.dtype != dtype:
            self.refuse(f"dtype.{name}", name, str(dtype), tensor.dtype)
        axes = _axes(shape, self.lead)
        sizes = tuple(tensor.shape)
        if nz and len(sizes) == 4:
            sizes = self._from_nz(name, sizes, tensor.element_size())
        if len(sizes) != len(axes):
            self.refuse(
                f"rank.{name}", name, f"[{', '.join(axes)}]", f"{len(sizes)}-D {list(tensor.shape)}"
            )
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
                shown = ", ".join(
                    f"{axis} = {self._size(axis)}" if axis != "1" else "1" for axis in axes
                )
                note = note or (_PADDED if nz and tensor.dim() == 2 else "")
                self.refuse(f"shape.{name}", name, f"[{shown}]{note}", list(tensor.shape))

    def _size(self, axis: str) -> Any:
        return spec.DERIVED[axis](self.dims) if axis in spec.DERIVED else self.dims.get(axis, "any")

    def _from_nz(self, name: str, sizes: tuple[Any, ...], item: int) -> tuple[Any, Any]:
        """(k, n) of FRACTAL_NZ storage ``[n/C0, k/16, 16, C0]``, C0 being 32 bytes."""
        c0 = 32 // item
        if _different(sizes[2], 16) or _different(sizes[3], c0):
            self.refuse(f"shape.{name}", name, f"[n/{c0}, k/16, 16, {c0}] or [k, n]", list(sizes))
        return sizes[1] * 16, sizes[0] * c0

    # -- sizes

    def sizes(self, where: str) -> None:
        assert self.allowed
        for axis, sizes in self.allowed.dims.items():
            size = self.dims.get(axis)
            if type(size) is int and size not in sizes:
                argument = (
                    "actual_seq_len" if axis == "B" and len(self.lead) == 1 else _AXIS_OWNER[axis]
                )
                found = f"{axis} {size}, {taken_by(self.op, axis, size, where)}"
                self.refuse(f"dims.{axis.lower()}", argument, f"{axis} {sizes} on {where}", found)

    # -- ranks

    def ranks(self, where: str) -> None:
        """Ranks that a release or a path takes where the sizes would do: of 4-D weights and of
        empty caches.
        """
        assert self.allowed
        rank, taken = self.full["weight_dq"].dim(), self.allowed.weight_dq_4d
        if rank == 4 and taken != "always" and (not taken or self.full["query_norm_flag"]):
            expected = f"2-D [He, Hcq] on {where}" + (" with query_norm_flag" if taken else "")
            self.refuse("rank.weight_dq", "weight_dq", expected, "4-D", spec.INFERSHAPE)
        rank, ranks = self.full["kr_cache"].dim(), self.allowed.empty_kr_ranks
        if self.cache.kr is None and ranks and rank not in ranks:
            expected = " or ".join(f"{n}-D" for n in sorted(ranks)) + f" on {where}"
            self.refuse("rank.kr_cache", "kr_cache", expected, f"{rank}-D")

    # -- memory

    def memory(self, where: str) -> None:
        """Devices, storage formats and strides."""
        assert self.allowed
        names = _tensor_names(self.op)
        elsewhere = layout.elsewhere(self.full, names)
        if elsewhere is not None:
            name, expected, found = elsewhere
            self.refuse(
                f"device.{name}", name, f"a tensor on {expected}, as those before it", found
            )
        for tensor in spec.INPUTS:
            form = layout.npu_format(self.full[tensor.name]) if tensor.nz else None
            if form not in (None, layout.FRACTAL_NZ):
                expected = (
                    f"format FRACTAL_NZ: torch_npu.npu_format_cast({tensor.name}, "
                    f"{layout.FRACTAL_NZ})"
                )
                self.refuse(f"format.{tensor.name}", tensor.name, expected, f"format {form}")
        for name in names:
            given = self.full[name]
            if given is not None and name not in CACHES and not layout.contiguous(given):
                self._refuse_strides(name, "a contiguous tensor")
        free = self.allowed.strided_caches
        for name in CACHES:
            if not layout.writable(
                self.full[name], first_axis_free=free, ones_free=not self.allowed.compares_strides
            ):
                if free:
                    self._refuse_strides(name, f"contiguous axes, the first excepted, on {where}")
                self._refuse_strides(
                    name, f"a contiguous tensor on {where}: rows written to others do not arrive"
                )

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
    "tokens": "token_x",
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
    return frozenset(
        pair
        for soc in ("A3", "A5")
        for pair in limits("npu_mla_prolog_v3", soc, "latest").quant_modes
    )
