"""Declares the prologue operators: their schemas in torch, and the GE operators that they become.

The signature of an operator, and the inputs and attributes of its GE node, derive from its schema.
`mla_fusion.ops` registers the schema where torch_npu does not.
Read from torch_npu 2.13's `npu_native_functions.yaml` and from `mla_prolog_def.cpp`,
`mla_prolog_v2_def.cpp` and `mla_prolog_v3_def.cpp`.
"""

from __future__ import annotations

from mla_fusion.compat import parse_schema


class Operator:
    """An operator of torch, and the GE operator that it becomes.

    schema         ``name(arguments) -> (results)``
    version        as the limits of `mla_fusion.meta.limits` name it
    results        in torch's order
    ge_results     in GE's order, by default torch's. GE names a written cache as it names the cache
                   that it reads: that marks a reference
    functional     the operator that returns the caches which this operator writes, behind the same
                   results; or ""

    required       names of the positional arguments: tensors that a call must have, by position or
                   by name
    defaults       defaults of the arguments that a call has by name alone
    ge_inputs      every tensor, in the schema's order
    ge_attributes  name to kind in ``torchair.ge.attr``. (The dtypes that some arguments name are on
                   GE's tensors.)
    written        caches that the schema says are written in place
    """

    def __init__(
        self,
        schema: str,
        version: str,
        results: tuple[str, ...],
        ge_type: str = "",
        ge_results: tuple[str, ...] = (),
        functional: str = "",
    ) -> None:
        self.schema, self.version, self.results = schema, version, results
        self.ge_type, self.ge_results = ge_type, ge_results or results
        self.functional = functional
        parsed = parse_schema(schema)
        arguments = parsed.arguments
        self.name = parsed.name
        self.required = tuple(a.name for a in arguments if not a.kwarg_only)
        self.defaults = {a.name: a.default_value for a in arguments if a.kwarg_only}
        self.ge_inputs = tuple(a.name for a in arguments if "Tensor" in str(a.type))
        self.ge_attributes = {
            name: type(default).__name__.capitalize()
            for name, default in self.defaults.items()
            if default is not None
        }
        self.written = tuple(a.name for a in arguments if a.alias_info and a.alias_info.is_write)

    def places(self, *names: str) -> tuple[int, ...]:
        """Returns the positions of these among the positional arguments."""
        return tuple(map(self.required.index, names))


CACHES = ("kv_cache", "kr_cache")
_WEIGHTS = """Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor weight_uk,
Tensor weight_dkv_kr, Tensor rmsnorm_gamma_cq, Tensor rmsnorm_gamma_ckv, Tensor rope_sin,
Tensor rope_cos"""
_SCALES = """Tensor? dequant_scale_x=None, Tensor? dequant_scale_w_dq=None,
Tensor? dequant_scale_w_uq_qr=None, Tensor? dequant_scale_w_dkv_kr=None,
Tensor? quant_scale_ckv=None, Tensor? quant_scale_ckr=None, Tensor? smooth_scales_cq=None"""
_NORM = 'float rmsnorm_epsilon_cq=1e-05, float rmsnorm_epsilon_ckv=1e-05, str cache_mode="PA_BSND"'
_V1 = f"({_WEIGHTS}, Tensor cache_index, Tensor kv_cache, Tensor kr_cache, *, {_SCALES}, {_NORM})"
_V3 = (
    f"Tensor? cache_index=None, {_SCALES}, Tensor? actual_seq_len=None, "
    f"Tensor? k_nope_clip_alpha=None, {_NORM}, bool query_norm_flag=False, "
    "int weight_quant_mode=0, int kv_cache_quant_mode=0, int query_quant_mode=0, "
    "int ckvkr_repo_mode=0, int quant_scale_repo_mode=0, int tile_size=128, "
    "float qc_qr_scale=1.0, float kc_scale=1.0, "
    "int? token_x_dtype=None, int? weight_dq_dtype=None, int? weight_uq_qr_dtype=None, "
    "int? weight_dkv_kr_dtype=None, int? kv_cache_dtype=None"
)
_QUERY = ("query", "query_rope")
_OF_QUERY = ("dequant_scale_q_nope", "query_norm", "dequant_scale_q_norm")

V1 = Operator(
    f"npu_mla_prolog{_V1} -> (Tensor, Tensor, Tensor, Tensor)",
    "v1",
    results=(*_QUERY, *CACHES),
    ge_type="MlaProlog",
)
V2 = Operator(
    f"npu_mla_prolog_v2{_V1} -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "v2",
    results=(*V1.results, "dequant_scale_q_nope"),
    ge_type="MlaPrologV2",
)
V3_FUNCTIONAL = Operator(
    f"npu_mla_prolog_v3_functional({_WEIGHTS}, Tensor kv_cache, Tensor kr_cache, *, "
    f"{_V3}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "v3",
    results=(*_QUERY, *_OF_QUERY, *CACHES),
    ge_type="MlaPrologV3",
    ge_results=(*_QUERY, *CACHES, *_OF_QUERY),
)
V3 = Operator(
    f"npu_mla_prolog_v3({_WEIGHTS}, Tensor(a!) kv_cache, Tensor(b!) kr_cache, *, "
    f"{_V3}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "v3",
    results=(*_QUERY, *_OF_QUERY),
    ge_type=V3_FUNCTIONAL.ge_type,
    ge_results=V3_FUNCTIONAL.ge_results,
    functional=V3_FUNCTIONAL.name,
)

PROLOGS = {operator.name: operator for operator in (V1, V2, V3, V3_FUNCTIONAL)}
