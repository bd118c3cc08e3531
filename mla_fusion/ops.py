"""The operators of MLA graphs, ``npu::`` and one ``atb::``: schemas where torch_npu has none, CPU
and Meta kernels.

``provide()`` adds what is missing at that moment: schemas (the strings of torch_npu), CPU kernels
(torch_npu has none), Meta kernels where absent, and for the two in-place operators a Functionalize
kernel which makes AOT graphs hold the ``_functional`` operator plus ``copy_`` into the caches, as
torch_npu's own does. ``withdraw()`` removes all of it, because a second definition of a schema is
an error in torch: a finder on ``sys.meta_path`` (``_lazy``) calls it just before a later ``import
torch_npu`` runs and ``provide()`` just after. Graphs compiled before that import hold the withdrawn
operators: these run (``provide()`` makes them those of now), but what is registered for the new
ones does not know them, so such graphs must be compiled again for an NPU.

Kernels live in `mla_fusion.reference` and `mla_fusion.meta` and are imported on their first call.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from mla_fusion import compat
from mla_fusion.meta import key_operator
from mla_fusion.meta.key_operator import V2
from mla_fusion.meta.preprocess import ATB, OUT_SCHEMA
from mla_fusion.meta.prolog import PROLOGS, V3


def _by_name(*schemas: str) -> dict[str, str]:
    """Returns schemas by the operator's name."""
    return {text.partition("(")[0]: text for text in schemas}


_OTHERS = """
npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)

npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) \
-> (Tensor, Tensor, Tensor)

npu_interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor

npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', \
Tensor? rotate=None) -> Tensor

npu_transpose_batchmatmul(Tensor input, Tensor weight, *, Tensor? bias=None, \
Tensor? scale=None, int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None, \
int? batch_split_factor=1) -> Tensor

npu_scatter_nd_update(Tensor input, Tensor indices, Tensor updates) -> Tensor

npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)

scatter_update(Tensor input, Tensor indices, Tensor updates, int axis) -> Tensor

scatter_update_(Tensor(a!) input, Tensor indices, Tensor updates, int axis) -> Tensor(a!)

npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, \
Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, \
Tensor? seq_lens=None, str? cache_mode="PA_NZ") -> ()

npu_scatter_pa_kv_cache_functional(Tensor key, Tensor value, Tensor key_cache, \
Tensor value_cache, Tensor slot_mapping, *, Tensor? compress_lens=None, \
Tensor? compress_seq_offsets=None, Tensor? seq_lens=None, str? cache_mode="PA_NZ") \
-> (Tensor, Tensor)

npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, \
int? dst_type=None, str quant_mode="pertoken", float dst_type_max=0.0) -> (Tensor, Tensor)

npu_dynamic_mx_quant(Tensor input, *, int axis=-1, str round_mode="rint", int dst_type=296, \
int block_size=32, int? scale_alg=0, float dst_type_max=0.0, float max_low_bound=0.0) \
-> (Tensor, Tensor)

npu_dynamic_block_quant(Tensor x, *, float min_scale=0.0, str round_mode="rint", \
int dst_type=1, int row_block_size=1, int col_block_size=128, float dst_type_max=0.0) \
-> (Tensor y, Tensor scale)

npu_quantize(Tensor input, Tensor scales, Tensor? zero_points, int dtype, int axis=1, \
bool div_mode=True) -> Tensor

npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, \
Tensor? pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, \
int? x2_dtype=None, int? pertoken_scale_dtype=None, int? scale_dtype=None, \
int[]? group_sizes=None, Tensor? y_scale=None) -> Tensor

npu_format_cast(Tensor input, int acl_format, *, int? customize_dtype=None, \
int? input_dtype=None) -> Tensor
"""
# exactly as torch_npu 2.13 defines them
_NPU = _by_name(
    *(operator.schema for operator in (*PROLOGS.values(), *key_operator.OPERATORS)),
    *_OTHERS.strip().split("\n\n"),
)
_ATB = _by_name(ATB.schema, OUT_SCHEMA)
OPERATORS, ATB_OPERATORS = tuple(_NPU), tuple(_ATB)

# operators of torch_npu that get a CPU kernel where they are, and no schema where they are not
_KERNELS_ALONE = ("npu_sparse_flash_attention", "npu_fused_infer_attention_score_v2")

# in-place operator -> its functional form, among whose results the new values of the mutated
# arguments come last
_IN_PLACE = {
    V3.name: V3.functional,
    V2.name: V2.functional,
    "npu_scatter_nd_update_": "npu_scatter_nd_update",
    "scatter_update_": "scatter_update",
    "npu_scatter_pa_kv_cache": "npu_scatter_pa_kv_cache_functional",
}

_libraries: list[torch.library.Library] = []
_withdrawn: list[Any] = []  # operators that graphs and callers may still refer to


def provide() -> None:
    """Adds every schema and kernel that is missing. A second call changes nothing."""
    for namespace, schemas in (("npu", _NPU), ("atb", _ATB)):
        library = torch.library.Library(namespace, "FRAGMENT")
        _libraries.append(library)
        missing = [name for name in schemas if not compat.has_schema(f"{namespace}::{name}")]
        for name in missing:
            library.define(schemas[name])
        for name in schemas:
            _add_kernel(library, name, "Meta", _lazy("mla_fusion.reference.shapes", name))
            if name in _IN_PLACE and name in missing:
                _add_kernel(library, name, "Functionalize", _functionalize(name))
        for name in (*schemas, *_KERNELS_ALONE):
            if compat.has_schema(f"{namespace}::{name}"):
                _add_kernel(library, name, "CPU", _lazy("mla_fusion.reference", name))
    for packet in _withdrawn:
        compat.renew(packet)


def withdraw() -> None:
    """Removes every schema and kernel of ours, so that torch_npu can define its own."""
    while _libraries:
        _withdrawn.extend(compat.withdraw(_libraries.pop()))


def _add_kernel(
    library: torch.library.Library, name: str, key: str, kernel: Callable[..., Any]
) -> None:
    """Registers a kernel, unless the operator has one for this dispatch key."""
    if not compat.has_kernel(f"{library.ns}::{name}", key):
        library.impl(name, kernel, key)


def _lazy(module: str, name: str) -> Callable[..., Any]:
    """Returns a kernel of a module, which is imported on the first call."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name.replace(".", "_"))(*args, **kwargs)

    return kernel


def _functionalize(name: str) -> Callable[..., Any]:
    """Returns a Functionalize kernel of an operator that writes its arguments.

    The kernel calls the functional form, and gives the last results to the written arguments.
    """
    schema = compat.parse_schema(_NPU[name])
    positions = [
        position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        plain_args, plain_kwargs = compat.tree_map_only(
            torch.Tensor, compat.content_of, (args, kwargs)
        )
        is_functional = all(compat.is_functional(args[position]) for position in positions)
        operator = getattr(torch.ops.npu, _IN_PLACE[name] if is_functional else name).default
        with compat.below_functionalisation():
            results = operator(*plain_args, **plain_kwargs)
        if not is_functional:
            return results
        values = list(results) if isinstance(results, tuple | list) else [results]
        new_values = [values.pop() for _ in positions]
        for position, value in zip(positions, reversed(new_values), strict=True):
            compat.set_content(args[position], value)
        if not values:
            return args[positions[0]] if schema.returns else None
        return tuple(map(compat.functional, values))

    return kernel


provide()
