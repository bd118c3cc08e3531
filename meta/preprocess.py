"""The contract of ATB's MlaPreprocess (``torch.ops.atb.npu_mla_preprocess``): signature, checks,
results.

Read from the operation's kernels (`mla_preprocess_mix_bf16.cce`, `mla_preprocess_mix.cce`), its
host check and torch_npu's entry `MLAPreprocessAtb.cpp`. Axes: T tokens, H hidden, Q query rank, C
KV rank, R rope head dim, D nope head dim, N heads, W = C+R+Q, U = N*(D+R). wdqkv holds, transposed,
the columns ``[C | R | Q]`` of the down-projection. vllm-ascend's fork of the kernel has a contract
of its own, `mla_fusion.meta.preprocess_csrc`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from mla_fusion.meta.binder import Binder
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.layout import elsewhere, kind_of, not_strided, writable
from mla_fusion.meta.limits import known_releases
from mla_fusion.meta.symbolic import different
from mla_fusion.meta.values import holds_data

OP = "npu_mla_preprocess"
HOST = "MlaPreprocess operation"
SOCS = ("A2", "A3")
EPSILON = 1e-6  # of its norms, whatever the caller passes: fixed in the kernel


@dataclass(frozen=True)
class CacheForm:
    """One cacheMode: its number in ATB, shapes of both caches (None: not used), and of the query
    results.
    """

    number: int
    kv: str
    kr: str | None
    q_out0: str = "T N C"
    int8: bool = False
    nz: bool = False


NZ_BLOCK = 128  # rows of a block of an NZ cache, fixed in ATB's kernel
CACHE_FORMS: Mapping[str, CacheForm] = {
    "kvcache": CacheForm(0, "BlockNum BlockSize 1 C+R", None, "T N C+R"),
    "krope_ctkv": CacheForm(1, "BlockNum BlockSize 1 C", "BlockNum BlockSize 1 R"),
    "int8_nzcache": CacheForm(
        2, "BlockNum C/32 128 32", "BlockNum R/16 128 16", int8=True, nz=True
    ),
    "nzcache": CacheForm(3, "BlockNum C/16 128 16", "BlockNum R/16 128 16", nz=True),
}
# value of the torch argument -> number of the ATB parameter
CACHE_MODES = {name: form.number for name, form in CACHE_FORMS.items()}
QUANT_MODES = {"per_tensor_quant_asymm": 0, "per_token_quant_symm": 1}
DEFAULTS = {"cache_mode": "krope_ctkv", "quant_mode": "per_token_quant_symm"}
MAX_TOKENS = 1024
STATIC = "per_tensor_quant_asymm"
ATB_HIDDEN = 7168  # the one hidden size of ATB's own kernel; others go to another one
CACHES = ("kv_cache", "kv_cache_rope")
RESULTS = ("q_out0", "kv_cache_out0", "q_out1", "kv_cache_out1")


@dataclass(frozen=True)
class Operator:
    """One spelling of the operator: its arguments in the schema's order, and the values of its
    modes.

    ``positional`` are the arguments that a call may give by position. ``empty_is_absent``: an
    optional tensor of shape [0] counts as not passed.
    """

    name: str
    source: str
    positional: tuple[str, ...]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    modes: Mapping[str, tuple[str, ...]]
    flags: Mapping[str, bool] = field(default_factory=dict)
    empty_is_absent: bool = False

    @property
    def defaults(self) -> dict[str, Any]:
        """Every argument that may be left out, with what stands for it."""
        return {
            **dict.fromkeys(self.optional),
            **{name: DEFAULTS[name] for name in self.modes},
            **self.flags,
        }

    @property
    def schema(self) -> tuple[str, str]:
        """Arguments and results as torch's schema language has them; a mode is a string that may be
        None.
        """
        tensors = [f"Tensor {name}" for name in self.positional]
        optional = [f"Tensor? {name}=None" for name in self.optional]
        modes = [f"str? {name}=None" for name in self.modes]
        return ", ".join(
            [*tensors, "*", *optional, *modes]
        ), f"({', '.join(['Tensor'] * len(RESULTS))})"

    @property
    def out_schema(self) -> tuple[str, str]:
        """Those of the overload that writes its results into the caller's tensors, which it also
        returns.
        """
        marks = [f"Tensor({letter}!)" for letter in "abcd"]
        written = [f"{mark} {name}" for mark, name in zip(marks, RESULTS, strict=True)]
        return ", ".join([self.schema[0], *written]), f"({', '.join(marks)})"


REQUIRED = tuple(
    "input gamma0 beta0 wdqkv descale0 gamma1 beta1 wuq descale1 gamma2 cos sin wuk kv_cache "
    "kv_cache_rope slotmapping"
    .split()
)  # fmt: skip
OPTIONAL = tuple(
    "quant_scale0 quant_offset0 bias0 quant_scale1 quant_offset1 bias1 ctkv_scale "
    "q_nope_scale".split()
)
ATB = Operator(
    OP,
    HOST,
    REQUIRED,
    REQUIRED,
    OPTIONAL,
    {"cache_mode": tuple(CACHE_MODES), "quant_mode": tuple(QUANT_MODES)},
    empty_is_absent=True,
)
SIZES = {"Q": 1536, "C": 512, "R": 64, "D": 128}
OWNERS = {"Q": "gamma1", "C": "gamma2", "R": "cos", "D": "wuk"}


def arguments_of(operator: Operator, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument by name; a mode or flag of None is its default.

    Raises ContractError ``argument.unknown``, ``type.<argument>``, ``required.<argument>``,
    ``<mode>.unknown``.
    """

    def refuse(code: str, name: str, expected: str, found: str) -> None:
        raise ContractError(code, name, expected, found, {}, operator.source, operator.name)

    full = operator.defaults
    for name, value in given.items():
        if name not in full and name not in operator.required:
            refuse("argument.unknown", name, f"an argument of {operator.name}", name)
        if name in operator.modes or name in operator.flags:
            full[name] = full[name] if value is None else value
            continue
        if value is not None and not_strided(value):
            refuse(f"type.{name}", name, "a strided tensor", kind_of(value))
        optional = operator.empty_is_absent and name in operator.optional and value is not None
        full[name] = None if optional and tuple(value.shape) == (0,) else value
    for name in operator.required:
        if full.get(name) is None:
            refuse(f"required.{name}", name, "a tensor", "nothing")
    for name, known in operator.modes.items():
        if not isinstance(full[name], str) or full[name] not in known:
            refuse(f"{name}.unknown", name, "one of " + ", ".join(known), repr(full[name]))
    for name in operator.flags:
        if not isinstance(full[name], bool):
            refuse(f"type.{name}", name, "True, False or None", repr(full[name]))
    return full


def check_where(operator: Operator, soc: str, cann: str) -> None:
    """ContractError ``cann`` or ``soc`` for a release or chip that the operator does not run on."""
    known_releases(cann)
    if not isinstance(soc, str) or soc not in SOCS:
        raise ContractError(
            "soc", "soc", " or ".join(SOCS), repr(soc), source=operator.source, op=operator.name
        )


def check_preprocess(soc: str, cann: str, values: bool, given: Mapping[str, Any]) -> None:
    """`mla_fusion.meta.check` of ``npu_mla_preprocess``: structure, then the sizes the device
    takes.
    """
    check_where(ATB, soc, cann)
    full = arguments_of(ATB, given)
    bound = bind_tensors(full)
    if full["cache_mode"] == "kvcache":
        expected = "krope_ctkv, int8_nzcache or nzcache: torch does not offer mode 0"
        bound.refuse("cache_mode.torch", "cache_mode", expected, "kvcache")
    for axis, size in SIZES.items():
        if different(bound.dims[axis], size):
            bound.refuse(
                f"dims.{axis.lower()}", OWNERS[axis], f"{axis} {size}", f"{axis} {bound.dims[axis]}"
            )
    check_ranges(bound, "input")
    _check_aclnn(bound)
    check_devices(bound, (*ATB.required, *ATB.optional))
    for name in CACHES:
        if not writable(full[name], first_axis_free=False, ones_free=True):
            found = f"strides {list(full[name].stride())}"
            bound.refuse(
                f"contiguous.{name}",
                name,
                "a contiguous tensor: of others a copy is written",
                found,
            )
    block = bound.dims["BlockSize"]
    if type(block) is int and not (1 <= block <= 128 or block == 256):
        bound.refuse(
            "dims.blocksize", "kv_cache", "BlockSize at most 128, or 256", f"BlockSize {block}"
        )
    if values:
        check_slots(bound)


def _check_aclnn(bound: Binder) -> None:
    """The kernel that takes other hidden sizes and unquantised weights knows one quantisation
    mode.
    """
    hidden, full = bound.dims["H"], bound.full
    other = type(hidden) is int and hidden != ATB_HIDDEN
    if (other or full["wdqkv"].dtype != torch.int8) and full["quant_mode"] != STATIC:
        expected = f"{STATIC} with H other than {ATB_HIDDEN} or weights that are not int8"
        bound.refuse("quant_mode.kernel", "quant_mode", expected, full["quant_mode"])


def check_devices(bound: Binder, names: Iterable[str]) -> None:
    elsewhere_found = elsewhere(bound.full, names)
    if elsewhere_found is not None:
        name, expected, found = elsewhere_found
        bound.refuse(f"device.{name}", name, f"a tensor on {expected}, as those before it", found)


def check_ranges(bound: Binder, argument: str) -> None:
    """The sizes of the hidden states and the number of heads, alike in both spellings."""
    hidden, tokens, heads = (bound.dims[axis] for axis in ("H", "T", "N"))
    if type(heads) is int and heads < 1:
        bound.refuse("dims.n", "wuk", "N at least 1", f"N {heads}")
    if type(hidden) is int and not (2048 <= hidden <= 8192 and hidden % 32 == 0):
        bound.refuse("dims.h", argument, "H 2048..8192, a multiple of 32", f"H {hidden}")
    if type(tokens) is int and not 1 <= tokens <= MAX_TOKENS:
        bound.refuse("dims.t", argument, f"T 1..{MAX_TOKENS}", f"T {tokens}")


def activation_of(bound: Binder, name: str) -> torch.dtype:
    """The dtype of the hidden states, which most other tensors share."""
    kind = bound.full[name].dtype
    if kind not in (torch.bfloat16, torch.float16):
        bound.refuse(f"dtype.{name}", name, "torch.bfloat16 or torch.float16", kind)
    return kind


def bind_tensors(full: Mapping[str, Any]) -> Binder:
    """Dtypes, presence and agreement of all shapes; the binder holds the sizes of the axes."""
    bound = Binder(OP, HOST, full)
    kind = activation_of(bound, "input")
    shapes = {
        "input": "T H",
        "gamma0": "H",
        "beta0": "H",
        "gamma1": "Q",
        "beta1": "Q",
        "gamma2": "C",
    }
    for name, shape in {**shapes, "cos": "T R", "sin": "T R"}.items():
        bound.tensor(name, shape, kind)
    quantised = full["wdqkv"].dtype == torch.int8
    bind_weights(bound, kind, torch.int8 if quantised else kind)
    bind_descales(bound, kind)
    if quantised and QUANT_MODES[full["quant_mode"]] == 0:
        bind_static_scales(bound, kind)
    form = CACHE_FORMS[full["cache_mode"]]
    if form.int8:
        bind_cache_scales(bound, kind)
    _bind_caches(bound, form, kind)
    bound.tensor("slotmapping", "T", torch.int32)
    return bound


def bind_weights(bound: Binder, kind: torch.dtype, weight: torch.dtype) -> None:
    dims = bound.dims
    bound.absorb("wuk", kind)
    dims["W"] = dims["C"] + dims["R"] + dims["Q"]
    dims["U"] = dims["N"] * (dims["D"] + dims["R"])
    bound.weight("wdqkv", "W", "H", weight)
    bound.weight("wuq", "U", "Q", weight)


def bind_descales(bound: Binder, kind: torch.dtype) -> None:
    """float32 with bfloat16 activations; with float16 an int64 whose low 32 bits are the
    float32.
    """
    scale = torch.float32 if kind == torch.bfloat16 else torch.int64
    for name, shape in (("descale0", "W"), ("descale1", "U")):
        bound.needed(name, shape, scale, bound.full["quant_mode"])


def bind_static_scales(bound: Binder, kind: torch.dtype) -> None:
    for stage, width in (("0", "W"), ("1", "U")):
        rows = (
            ("quant_scale", "1", kind),
            ("quant_offset", "1", torch.int8),
            ("bias", width, torch.int32),
        )
        for name, shape, dtype in rows:
            bound.needed(name + stage, shape, dtype, bound.full["quant_mode"])


def bind_cache_scales(bound: Binder, kind: torch.dtype) -> None:
    bound.needed("ctkv_scale", "1", kind, bound.full["cache_mode"])
    bound.needed("q_nope_scale", "N", kind, bound.full["cache_mode"])


def _bind_caches(bound: Binder, form: CacheForm, kind: torch.dtype) -> None:
    c, r = bound.dims["C"], bound.dims["R"]
    for axis, size in (("C+R", c + r), ("C/32", c // 32), ("C/16", c // 16), ("R/16", r // 16)):
        if axis in f"{form.kv} {form.kr}":
            bound.dims[axis] = size
    if form.nz:
        bound.dims["BlockSize"] = NZ_BLOCK
    bound.tensor("kv_cache", form.kv, torch.int8 if form.int8 else kind)
    if form.kr is not None:
        bound.tensor("kv_cache_rope", form.kr, kind)


def infer_preprocess(given: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], torch.dtype]]:
    """q_out0, kv_cache_out0, q_out1, kv_cache_out1; in mode 0 the third is empty."""
    full = arguments_of(ATB, given)
    bound = Binder(OP, HOST, full)
    for name, rank in (("input", 2), ("wuk", 3), ("gamma2", 1), ("cos", 2)):
        if full[name].dim() not in (rank, rank + (name == "wuk")):
            bound.refuse(f"rank.{name}", name, f"{rank}-D", f"{full[name].dim()}-D")
    tokens, heads, rank = full["input"].shape[0], full["wuk"].shape[0], full["gamma2"].shape[0]
    rope, kind = full["cos"].shape[-1], full["input"].dtype
    kv, kr = full["kv_cache"], full["kv_cache_rope"]
    if full["cache_mode"] == "kvcache":
        query = (tokens, heads, rank + rope)
        return [
            (query, kind),
            (tuple(kv.shape), kv.dtype),
            ((0,), kind),
            (tuple(kr.shape), kr.dtype),
        ]
    results = [((tokens, heads, rank), kv.dtype), (tuple(kv.shape), kv.dtype)]
    return [*results, ((tokens, heads, rope), kind), (tuple(kr.shape), kr.dtype)]


def check_slots(bound: Binder) -> None:
    """slotmapping: -1 exactly skips a token, anything else is a row, each at most once."""
    slots = bound.full["slotmapping"]
    if not holds_data(slots):
        bound.refuse(
            "values.meta", "slotmapping", "a tensor with data, to check its values", slots.device
        )
    rows = bound.dims["BlockNum"] * bound.dims["BlockSize"]
    bad = slots[(slots < -1) | (slots >= rows)]
    if len(bad):
        expected = f"-1 or rows below BlockNum*BlockSize = {rows}"
        bound.refuse("values.slotmapping.range", "slotmapping", expected, int(bad[0]))
    written = slots[slots >= 0].sort().values
    if bool((written.diff() == 0).any()):
        repeated = int(written[1:][written.diff() == 0][0])
        bound.refuse(
            "values.slotmapping.duplicate", "slotmapping", "every row at most once", repeated
        )
