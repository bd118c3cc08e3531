"""The prologue operators, one table each: arguments in the schema's order, results in torch's order
and in GE's.

From it derive the schemas that `mla_fusion.ops` registers, the signatures that calls are bound by,
the names of the results wherever a call is made or read, and the GE node that a converter writes.
Read from torch_npu 2.13's `npu_native_functions.yaml` and from `mla_prolog_def.cpp`,
`mla_prolog_v2_def.cpp` and `mla_prolog_v3_def.cpp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

# torchair.ge.attr has one class for each
_GE_KINDS = {"float": "Float", "int": "Int", "bool": "Bool", "str": "Str"}


@dataclass(frozen=True)
class Argument:
    """``kind`` is the schema's: a tensor, one that may be left out ("Tensor?"), or an attribute.

    ``default`` is None where there is none to give: a required tensor, or a tensor or dtype that
    may be left out.
    """

    name: str
    kind: str = "Tensor"
    default: Any = None

    @property
    def is_tensor(self) -> bool:
        return self.kind.startswith("Tensor")


@dataclass(frozen=True)
class Operator:
    """One operator of torch and the GE operator that it becomes.

    version       as the limits of `mla_fusion.meta.limits` name it
    positional    tensors that a call must give, by position or by name
    keywords      what a call gives by name alone
    results       in torch's order
    ge_results    in GE's, which names a written cache as it names the cache it reads: that marks a
                  reference
    written       caches that the schema says are written in place
    functional    the operator that returns them instead, its results being this one's and then the
                  caches; or ""
    """

    name: str
    version: str
    positional: tuple[Argument, ...]
    keywords: tuple[Argument, ...]
    results: tuple[str, ...]
    ge_type: str = ""
    ge_results: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    functional: str = ""

    @cached_property
    def required(self) -> tuple[str, ...]:
        """The names of the positional arguments."""
        return tuple(argument.name for argument in self.positional)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Every argument that may be left out, with what stands for it."""
        return {argument.name: argument.default for argument in self.keywords}

    @property  # not cached: Dynamo traces the check of mla_paged_attention, and enters no lock
    def ge_inputs(self) -> tuple[str, ...]:
        """Every tensor, in the schema's order."""
        return tuple(
            argument.name for argument in (*self.positional, *self.keywords) if argument.is_tensor
        )

    @cached_property
    def ge_attributes(self) -> dict[str, str]:
        """Name to kind in ``torchair.ge.attr``. (The dtypes that some arguments name are on GE's
        tensors.)
        """
        return {
            argument.name: _GE_KINDS[argument.kind]
            for argument in self.keywords
            if argument.kind in _GE_KINDS
        }

    @property
    def schema(self) -> tuple[str, str]:
        """Arguments and results as torch's schema language has them."""
        given = [self._declared(argument) for argument in self.positional]
        named = [
            f"{argument.kind} {argument.name}={_literal(argument.default)}"
            for argument in self.keywords
        ]
        return ", ".join([*given, "*", *named]), "(" + ", ".join(
            ["Tensor"] * len(self.results)
        ) + ")"

    def _declared(self, argument: Argument) -> str:
        if argument.name not in self.written:
            return f"{argument.kind} {argument.name}"
        return f"{argument.kind}({'ab'[self.written.index(argument.name)]}!) {argument.name}"

    def places(self, *names: str) -> tuple[int, ...]:
        """The positions of these among the positional arguments."""
        return tuple(map(self.required.index, names))


def _literal(default: Any) -> str:
    return f'"{default}"' if isinstance(default, str) else str(default)


def _tensors(*names: str, kind: str = "Tensor") -> tuple[Argument, ...]:
    return tuple(Argument(name, kind) for name in names)


CACHES = ("kv_cache", "kr_cache")
_CACHES = _tensors(*CACHES)
_WEIGHTS = _tensors(
    "token_x",
    "weight_dq",
    "weight_uq_qr",
    "weight_uk",
    "weight_dkv_kr",
    "rmsnorm_gamma_cq",
    "rmsnorm_gamma_ckv",
    "rope_sin",
    "rope_cos",
)
_SCALES = _tensors(
    "dequant_scale_x",
    "dequant_scale_w_dq",
    "dequant_scale_w_uq_qr",
    "dequant_scale_w_dkv_kr",
    "quant_scale_ckv",
    "quant_scale_ckr",
    "smooth_scales_cq",
    kind="Tensor?",
)
_NORM = (
    Argument("rmsnorm_epsilon_cq", "float", 1e-05),
    Argument("rmsnorm_epsilon_ckv", "float", 1e-05),
    Argument("cache_mode", "str", "PA_BSND"),
)
_MODES = (
    Argument("query_norm_flag", "bool", False),
    Argument("weight_quant_mode", "int", 0),
    Argument("kv_cache_quant_mode", "int", 0),
    Argument("query_quant_mode", "int", 0),
    Argument("ckvkr_repo_mode", "int", 0),
    Argument("quant_scale_repo_mode", "int", 0),
    Argument("tile_size", "int", 128),
    Argument("qc_qr_scale", "float", 1.0),
    Argument("kc_scale", "float", 1.0),
)
_DTYPES = _tensors(
    "token_x_dtype",
    "weight_dq_dtype",
    "weight_uq_qr_dtype",
    "weight_dkv_kr_dtype",
    "kv_cache_dtype",
    kind="int?",
)
_V1 = (*_WEIGHTS, Argument("cache_index"), *_CACHES), (*_SCALES, *_NORM)
_V3 = (
    (*_WEIGHTS, *_CACHES),
    (
        Argument("cache_index", "Tensor?"),
        *_SCALES,
        Argument("actual_seq_len", "Tensor?"),
        Argument("k_nope_clip_alpha", "Tensor?"),
        *_NORM,
        *_MODES,
        *_DTYPES,
    ),
)
_QUERY = ("query", "query_rope")
_OF_QUERY = ("dequant_scale_q_nope", "query_norm", "dequant_scale_q_norm")

V1 = Operator(
    "npu_mla_prolog",
    "v1",
    *_V1,
    results=(*_QUERY, *CACHES),
    ge_type="MlaProlog",
    ge_results=(*_QUERY, *CACHES),
)
V2 = Operator(
    "npu_mla_prolog_v2",
    "v2",
    *_V1,
    results=(*V1.results, "dequant_scale_q_nope"),
    ge_type="MlaPrologV2",
    ge_results=(*V1.results, "dequant_scale_q_nope"),
)
V3_FUNCTIONAL = Operator(
    "npu_mla_prolog_v3_functional",
    "v3",
    *_V3,
    results=(*_QUERY, *_OF_QUERY, *CACHES),
    ge_type="MlaPrologV3",
    ge_results=(*_QUERY, *CACHES, *_OF_QUERY),
)
V3 = Operator(
    "npu_mla_prolog_v3",
    "v3",
    *_V3,
    results=(*_QUERY, *_OF_QUERY),
    ge_type=V3_FUNCTIONAL.ge_type,
    ge_results=V3_FUNCTIONAL.ge_results,
    written=CACHES,
    functional=V3_FUNCTIONAL.name,
)

PROLOGS = {operator.name: operator for operator in (V1, V2, V3, V3_FUNCTIONAL)}
