"""The MLA prologue operators of a dump, and what each of their inputs is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mla_fusion.compat import OpOverload, given_by_name, schema_of
from mla_fusion.meta.prolog import V1, V2, V3
from mla_fusion.tools.dumps import Dump, Operator, Value, names
from mla_fusion.tools.dumps.model import Attributes
from mla_fusion.tools.dumps.python_text import edges_in

GE = {operator.ge_type: operator for operator in (V1, V2, V3)}
_FX = re.compile(r"npu\.npu_mla_prolog(_v2|_v3)?(_functional)?(\.\w+)?$")
_SHOWN = """
    cache_mode rmsnorm_epsilon_cq rmsnorm_epsilon_ckv weight_quant_mode kv_cache_quant_mode
    query_quant_mode query_norm_flag ckvkr_repo_mode quant_scale_repo_mode tile_size qc_qr_scale
    kc_scale
""".split()


@dataclass(frozen=True)
class Input:
    """One given input: its role in the operator, the operator that makes it, and the tensor."""

    role: str
    producer: str
    value: Value


@dataclass(frozen=True)
class Prologue:
    """One prologue operator. ``place`` counts them in the order of the dump, which is that of the
    layers.
    """

    place: int
    name: str
    type: str
    inputs: tuple[Input, ...]
    attributes: Attributes
    source: str = ""

    def value(self, role: str) -> Value:
        return next((item.value for item in self.inputs if item.role == role), Value())


def is_prologue(kind: str) -> bool:
    return kind in GE or _FX.match(kind) is not None


def find(dump: Dump) -> list[Prologue]:
    """Every prologue operator of the dump, in order."""
    operators = [operator for operator in dump.operators if is_prologue(operator.type)]
    return [_prologue(dump, place, operator) for place, operator in enumerate(operators)]


def _prologue(dump: Dump, place: int, operator: Operator) -> Prologue:
    inputs = tuple(
        Input(role, str(edge), dump.value(edge))
        for role, edge in zip(roles_of(operator), operator.inputs, strict=False)
        if edge is not None
    )
    # what an FX call leaves out has the schema's default
    target, known = names.target(operator.type), operator.attributes
    if isinstance(target, OpOverload):
        known = given_by_name(target, *operator.call)
    shown = {name: known[name] for name in _SHOWN if name in known}
    return Prologue(place, operator.name, operator.type, inputs, shown, operator.source)


def roles_of(operator: Operator) -> list[str]:
    """What each input is to a prologue operator: of an FX graph the schema's name."""
    if operator.type in GE:
        return operator.roles or list(GE[operator.type].ge_inputs)
    target = names.target(operator.type)
    args, kwargs = operator.call
    known = schema_of(target).arguments if isinstance(target, OpOverload) else ()
    places = [argument.name for argument in known] + [""] * len(args)
    named = [*zip(places, args, strict=False), *kwargs.items()]
    return [name for name, item in named for _ in edges_in(item)]
