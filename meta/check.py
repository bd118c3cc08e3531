"""Checks a call against the specification.

For the prologue it checks modes first, then presence, dtypes, shapes, sizes, ranks and memory, and
on request the values that the device does not check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mla_fusion.meta import layout, spec
from mla_fusion.meta.binder import Binder
from mla_fusion.meta.infer import implied_quant_modes, quant_modes
from mla_fusion.meta.layout import different, known
from mla_fusion.meta.limits import QUANT_RELEASES, Limits, known_path, limits, taken_by
from mla_fusion.meta.prolog import CACHES, PROLOGS
from mla_fusion.meta.signature import OTHERS, complete, operator_named
from mla_fusion.meta.spec import CACHE_MODES, CACHE_QUANTS, TILING, WEIGHT_MODES

_WQ, _KV = "weight_quant_mode", "kv_cache_quant_mode"


class Call(Binder):
    """A call of the prologue.

    allowed  the limits of a release, or None for the CPU kernel
    """

    full: dict[str, Any]

    def __init__(self, op: str, full: dict[str, Any], allowed: Limits | None) -> None:
        super().__init__(PROLOGS[op], TILING, full)
        self.allowed, self.version = allowed, PROLOGS[op].version

    # -- modes

    def modes(self, where: str) -> None:
        """Checks that the modes exist and go together, on ``where`` ("A3, CANN 8.5")."""
        full, allowed = self.full, self.allowed
        if allowed and allowed.absent:
            expected = f"an operator that can be called on {where}: {allowed.absent}"
            self.refuse("quant.weight_quant_mode", "soc", expected, self.op)
        self.wq, self.kv = full[_WQ], full[_KV] = quant_modes(PROLOGS[self.op], full)
        on = f" on {where}" if where else ""
        every = {pair for row in QUANT_RELEASES for pair in row.value}
        pairs = allowed.quant_modes if allowed else every
        self.pick(_WQ, sorted({wq for wq, _ in pairs}), on, f"quant.{_WQ}")
        kv_modes = sorted(kv for wq, kv in pairs if wq == self.wq)
        self.pick(_KV, kv_modes, f" with {_WQ} {self.wq}{on}", "quant.combination")
        if allowed and not allowed.reads_modes:
            # the release would compute another scenario than the modes say
            why = f", which is what {where} reads off the dtypes"
            for name, value in zip((_WQ, _KV), implied_quant_modes(full), strict=True):
                self.pick(name, (value,), why, "quant.dtypes")
        self.weights, self.cache = WEIGHT_MODES[self.wq], CACHE_QUANTS[self.kv]
        with_kv = f" with {_KV} {self.kv}"
        if self.version == "v3":
            for name, value in self.cache.modes.items():
                self.pick(name, (value,), with_kv, f"quant.{name}")
            if allowed:
                self.pick("tile_size", (spec.TILE_SIZE,), with_kv, "quant.tile_size")
            why = f" (hifloat8) with {_WQ} 5"
            for name in spec.named_dtypes(self.kv) if self.wq == 5 else ():
                self.pick(name, (spec.HIFLOAT8,), why, f"quant.{name}", "torch_npu meta")
        self.pick("cache_mode", CACHE_MODES, code="cache_mode.unknown")
        if allowed:
            self.pick("cache_mode", allowed.cache_modes, on, "cache_mode.release")
        self.pick("cache_mode", self.cache.cache_modes, with_kv, "cache_mode.quant")
        self.mode = CACHE_MODES[full["cache_mode"]]

    # -- tensors

    def tensors(self, activation: torch.dtype) -> None:
        """Checks presence, dtypes and shapes, and binds the axes."""
        self.roles = self.weights.roles(activation)
        self.rank("token_x", 2, 3, where=": [T, He] or [B, S, He]")
        rank = self.full["token_x"].dim()
        if rank not in self.mode.index:
            shape = "3-D [B, S, He]" if rank == 2 else "2-D [T, He]"
            expected = f"{shape} with cache_mode {self.full['cache_mode']}"
            self.refuse("cache_mode.rank", "token_x", expected, f"{rank}-D")
        self.lead = "T" if rank == 2 else "B S"
        for tensor in spec.INPUTS:
            self._check_tensor(tensor.name, tensor.shape, tensor.dtype, tensor.nz)
            if tensor.name == "token_x":
                dims = self.dims
                dims["tokens"] = dims["T"] if rank == 2 else dims["B"] * dims["S"]
        self._check_caches()
        self._check_index(rank)
        self._check_scales()

    def _check_caches(self) -> None:
        width = self.cache.width
        if width == spec.TILED_ROW:
            self.dims["tile"] = tile = self.full["tile_size"]
            if tile <= 0 or different(self.dims["Hckv"] % tile, 0):
                self.refuse("quant.tile_size", "tile_size", "a divisor of Hckv", tile)
        self._check_tensor("kv_cache", f"{self.mode.cache} {width}", self.cache.kv)
        if self.cache.kr is not None:
            self._check_tensor("kr_cache", f"{self.mode.cache} Dr", self.cache.kr)
        elif different(self.full["kr_cache"].numel(), 0):
            expected = "an empty tensor: the rope part is in kv_cache"
            self.refuse("shape.kr_cache", "kr_cache", expected, list(self.full["kr_cache"].shape))
        elif self.allowed:
            int8 = [torch.int8] if self.wq in self.allowed.empty_kr_int8 else []
            self.dtype("kr_cache", torch.bfloat16, *int8)

    def _check_index(self, rank: int) -> None:
        mode, shape = self.full["cache_mode"], self.mode.index[rank]
        self.presence("cache_index", shape is not None, f"with cache_mode {mode}")
        if shape == "*" and self.allowed and not self.allowed.block_index_ranks:
            shape = " ".join("*" * self.full["cache_index"].dim())
        if shape == "B Blocks":
            size = self.dims["BlockSize"]
            # another rule refuses a BlockSize of 0
            self.dims["Blocks"] = -(-self.dims["S"] // (1 if known(size == 0) else size))
        if shape is not None:
            self._check_tensor("cache_index", shape, torch.int64)
        if self.version == "v3":
            is_required = self.mode.actual_seq_len and rank == 2
            why = f"with cache_mode {mode} and a {rank}-D token_x"
            self.presence("actual_seq_len", is_required, why)
            if is_required:
                self.tensor("actual_seq_len", "B", torch.int32)

    def _check_scales(self) -> None:
        required = {**self.weights.required, **self.cache.required}
        if self.wq not in spec.CLIP_WEIGHT_MODES:
            required.pop("k_nope_clip_alpha", None)
        if self.kv == 1:
            # the kernel reads the first float; the CPU kernel takes both shapes
            scale = self.full["quant_scale_ckv"]
            is_row = self.version == "v2" or (scale is not None and scale.dim() == 2)
            either = spec.QUANT_SCALE_CKV_ROW if is_row else "1"
            required["quant_scale_ckv"] = self.allowed.kv_scale if self.allowed else either
        why = f"with weight_quant_mode {self.wq}, kv_cache_quant_mode {self.kv}"
        for name in self.names[len(PROLOGS[self.op].required) :]:
            if name in ("cache_index", "actual_seq_len"):
                continue
            shape = required.get(name) or self.weights.optional.get(name)
            if name in required or shape is None:
                self.presence(name, name in required, why)
            if shape is not None and self.full[name] is not None:
                dtype = self.weights.scale_dtype if name in spec.BLOCK_SCALES else torch.float32
                self._check_tensor(name, shape, dtype)

    def _check_tensor(self, name: str, shape: str, role: spec.Dtype, nz: bool = False) -> None:
        """Checks dtype and shape.

        role  a dtype, or a role that stands for a dtype in these modes
        """
        self.dtype(name, self.roles.get(role, role))
        tensor, sizes = self.full[name], None
        if nz and tensor.dim() == 4:  # FRACTAL_NZ storage of [k, n]: C0 elements are 32 bytes
            (n1, k1, k0, n0), c0 = tensor.shape, 32 // tensor.element_size()
            if different(k0, 16) or different(n0, c0):
                expected = f"[n/{c0}, k/16, 16, {c0}] or [k, n]"
                self.refuse(f"shape.{name}", name, expected, list(tensor.shape))
            sizes = k1 * 16, n1 * c0
        self.sizes(name, shape.replace("lead", self.lead), sizes)

    # -- limits of a release

    def on_device(self, where: str, in_graph: str) -> None:
        """Checks the sizes and ranks that a release takes on a path, then devices, storage formats
        and strides.
        """
        assert self.allowed
        for axis, sizes in self.allowed.dims.items():
            self.within(axis, sizes, f" on {where}")
        rank, when = self.full["weight_dq"].dim(), self.allowed.weight_dq_4d
        if rank == 4 and when != "always" and (not when or self.full["query_norm_flag"]):
            expected = f"2-D [He, Hcq] on {in_graph}" + (" with query_norm_flag" if when else "")
            self.refuse("rank.weight_dq", "weight_dq", expected, "4-D", spec.INFERSHAPE)
        ranks = self.allowed.empty_kr_ranks
        if self.cache.kr is None and ranks:
            self.rank("kr_cache", *ranks, where=f" on {in_graph}")
        self.one_device()
        for name in [tensor.name for tensor in spec.INPUTS if tensor.nz]:
            storage = layout.npu_format(self.full[name])
            if storage not in (None, layout.FRACTAL_NZ):
                cast = f"torch_npu.npu_format_cast({name}, {layout.FRACTAL_NZ})"
                expected = f"format FRACTAL_NZ: {cast}"
                self.refuse(f"format.{name}", name, expected, f"format {storage}")
        self.contiguous_but(CACHES, spec.DEFINITION)
        is_free = self.allowed.strided_caches
        expected = f"a contiguous tensor on {where}: rows written to others do not arrive"
        if is_free:
            expected = f"contiguous axes, the first excepted, on {where}"
        ones_free = not self.allowed.compares_strides
        self.caches(CACHES, expected, first_axis_free=is_free, ones_free=ones_free)

    def size_text(self, axis: str, size: Any, where: str) -> str:
        text = super().size_text(axis, size, where)
        if type(size) is not int:
            return text
        return f"{text}, {taken_by(self.op, axis, size, where.removeprefix(' on '))}"

    # -- values

    def values(self) -> None:
        """Refuses an index past the cache, a repeated index, and lengths that are no prefix sums.

        cache_index: slots below BlockNum*BlockSize (PA_BSND, PA_NZ) or blocks below BlockNum
        (PA_BLK_*), each at most once; negative entries are legal, and the kernel skips them.
        actual_seq_len: inclusive prefix sums, that is non-decreasing from >= 0 and ending at T;
        cache_index then lists at least sum(ceil(S_i/BlockSize)) blocks. Codes:
        ``values.cache_index.range|duplicate|blocks``, ``values.actual_seq_len``, ``values.meta``
        when a tensor holds no data.
        """
        self.source, full = spec.SCATTER, self.full
        for name in ("cache_index", "actual_seq_len"):
            if full.get(name) is not None:
                self.readable(name)
        if full["cache_index"] is None:
            return
        entries, ends = full["cache_index"].reshape(-1), full.get("actual_seq_len")
        block_num, block_size = full["kv_cache"].shape[:2]
        if ends is not None:
            lengths = torch.diff(ends.long(), prepend=ends.new_zeros(1, dtype=torch.int64))
            if len(lengths) == 0 or (lengths < 0).any() or int(ends[-1]) != self.dims["T"]:
                expected = f"inclusive prefix sums ending at T = {self.dims['T']}"
                self.refuse("values.actual_seq_len", "actual_seq_len", expected, ends.tolist())
            blocks = int(((lengths + block_size - 1) // block_size).sum())
            if len(entries) < blocks:
                code = "values.cache_index.blocks"
                self.refuse(code, "cache_index", f"at least {blocks} blocks", len(entries))
        if not block_num:
            return
        end, expected = block_num * block_size, "slots below BlockNum*BlockSize"
        if "BLK" in full["cache_mode"]:
            end, expected = block_num, "blocks below BlockNum"
        self.rows("cache_index", entries, end, expected)


_CPU_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def check(
    op: str,
    *,
    soc: str = "A3",
    cann: str = "latest",
    path: str = "eager",
    values: bool = False,
    **arguments: Any,
) -> None:
    """Raises ContractError unless the operator takes this call on ``soc`` with CANN ``cann``.

    op         an operator of torch_npu: ``npu_mla_prolog``, ``_v2``, ``_v3``, ``_v3_functional``,
               ``npu_kv_rmsnorm_rope_cache``, ``_v2``, ``_v2_functional``, ``npu_mla_preprocess``
               (also ``mla_preprocess``), or ``npu_fused_infer_attention_score_v2`` in its form for
               absorbed MLA
    soc, cann  whose limits hold
    path       how the call reaches the device: "eager", by hand through torch_npu, or "graph",
               where GE infers the shapes of the results first and takes less: no 4-D storage of
               weight_dq from 9.1 on, for example
    values     also read cache_index and actual_seq_len, which the device does not check, and
               lengths that are tensors
    arguments  the operator's own, by name; tensors may be meta or fake, sizes symbolic: a symbolic
               size is never specialised, only what is statically known to be wrong is refused

    What "graph" takes, "eager" takes too. The default is for calls made by hand; ask "graph" of a
    call that is compiled, as the pass does.
    """
    bound(op, soc, cann, path, values, arguments)


def bound(
    op: str, soc: str, cann: str, path: str, values: bool, arguments: Mapping[str, Any]
) -> Binder:
    """Returns a call that `check` takes, with the sizes on which this depends (``undecided``)."""
    known_path(path)
    name = operator_named(op).name
    if name in OTHERS:
        other = OTHERS[name](complete(name, arguments))
        other.check(soc, cann, values)
        return other
    call = checked(op, soc, cann, path, arguments)
    if values:
        call.values()
    return call


def checked(op: str, soc: str, cann: str, path: str, arguments: Mapping[str, Any]) -> Call:
    """Returns a call of the prologue that `check` takes, with its modes and axes."""
    allowed = limits(op, soc, cann, path)
    where = f"{soc}, CANN {cann}"
    call = Call(op, complete(op, arguments), allowed)
    call.modes(where)
    call.tensors(torch.bfloat16)
    call.on_device(where, where if path == "eager" else f"{where} in a graph")
    return call


def check_structure(op: str, arguments: Mapping[str, Any]) -> None:
    """Raises ContractError for a call that the CPU kernel does not take: for modes that do not
    exist, or tensors that do not fit together.

    It takes any sizes and strides, and float32 or float64 in place of bfloat16.
    """
    call = Call(op, complete(op, arguments), None)
    call.modes("")
    dtype = call.full["rmsnorm_gamma_cq"].dtype
    call.tensors(dtype if dtype in _CPU_DTYPES else torch.bfloat16)
