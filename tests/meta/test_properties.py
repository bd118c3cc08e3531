"""Random calls of every operator: legal ones agree in three places, illegal ones raise
ContractError and nothing else.

Legal: `mf.meta.check` takes them, and `mf.meta.infer`, the reference kernels and torch_npu's own
meta functions give the same shapes and dtypes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mla_fusion.meta import preprocess
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_fusion import meta, offline, reference
from mla_fusion.tools.selftest.samples import as_operator, sample_call
from tests.samples import LEGAL_PREPROCESS, SMALL_PREPROCESS, call_on_meta, sample_preprocess

V1, V2, V3 = "npu_mla_prolog", "npu_mla_prolog_v2", "npu_mla_prolog_v3"
PROLOGS = (V1, V2, V3, V3 + "_functional")
ATB = preprocess.OP
BF16 = torch.bfloat16
Call = dict[str, Any]
SCALES = ("dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr")


def draws(count: int) -> settings:
    """The same ``count`` draws every time, on any machine."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=slow,
    )


# -- legal calls


def leads(mode: str, tokens: int, rows: int, low: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    merged, batches = (
        st.tuples(st.integers(low, tokens)),
        st.tuples(st.integers(low, 3), st.integers(low, rows)),
    )
    return {"BSND": batches, "TND": merged}.get(mode, st.one_of(merged, batches))


def scenarios() -> list[tuple[str, str, str, tuple[int, int], str]]:
    """Every (op, soc, cann, quantisation modes, cache mode) that exists."""
    return [
        (op, soc, cann, pair, mode)
        for op in PROLOGS
        for soc in meta.SOCS
        for cann in meta.RELEASES
        for pair in sorted(meta.limits(op, soc, cann).quant_modes)
        for mode in meta.limits(op, soc, cann).cache_modes
        if pair[1] != 3 or mode in ("PA_BSND", "BSND", "TND")
    ]


@st.composite
def prolog_calls(draw: st.DrawFn) -> tuple[str, str, str, Call]:
    """(op, soc, cann, arguments on meta) of sizes that the device takes there."""
    op, soc, cann, (wq, kv), mode = draw(st.sampled_from(scenarios()))
    allowed = meta.limits(op, soc, cann)
    lead = draw(
        leads(mode, 40, 1 if 2 not in allowed.dims["S"] else 16, allowed.dims["tokens"].low)
    )
    sizes = {
        axis: draw(st.sampled_from([n for n in candidates if n in allowed.dims[axis]]))
        for axis, candidates in {
            "He": range(1024, 8193, 512),
            "Hcq": (1536, 2048),
            "D": (128, 192),
            "N": range(1, 129),
            "BlockSize": range(16, 1025, 16),
        }.items()
    }
    dims = sizes | {"Dr": 64, "Hckv": 512, "Nkv": 1, "BlockNum": draw(st.integers(0, 40))}
    call = call_on_meta(
        weight_quant_mode=wq,
        kv_cache_quant_mode=kv,
        cache_mode=mode,
        lead=lead,
        dims=dims,
        smooth=wq not in (0, 3) and draw(st.booleans()),
    )
    call |= {"query_norm_flag": draw(st.booleans()), "qc_qr_scale": draw(st.floats(0.1, 9.0))}
    return op, soc, cann, as_operator(op, call, cann)


@st.composite
def preprocess_calls(draw: st.DrawFn, small: bool = False) -> tuple[str, Call]:
    """(op, arguments) of the preprocess operator: data of any sizes, or meta as on the device."""
    quant = draw(st.sampled_from(list(preprocess.QUANT_MODES)))
    cache = draw(st.sampled_from(list(preprocess.CACHE_FORMS)))
    kind, weight = draw(st.sampled_from([BF16, torch.float16])), torch.int8
    if draw(st.booleans()):
        weight, quant = kind, preprocess.STATIC
    if not small and cache == "kvcache":
        cache = "krope_ctkv"
    dims: dict[str, int] = dict(SMALL_PREPROCESS if small else LEGAL_PREPROCESS)
    dims |= {
        "T": draw(st.integers(1, 12 if small else 1024)),
        "N": draw(st.integers(1, 3 if small else 128)),
    }
    dims |= {
        "BlockNum": draw(st.integers(1, 4)) if small else 90,
        "BlockSize": draw(st.integers(12, 128)),
    }
    if not small and quant == preprocess.STATIC:
        dims["H"] = 32 * draw(st.integers(64, 256))
    call = sample_preprocess(
        cache_mode=cache,
        quant_mode=quant,
        dtype=kind,
        weight=weight,
        dims=dims,
        device="cpu" if small else "meta",
    )
    return ATB, call


TINY = {
    "He": 64,
    "Hcq": 32,
    "N": 2,
    "D": 8,
    "Dr": 32,
    "Hckv": 32,
    "BlockNum": 9,
    "BlockSize": 4,
    "Nkv": 1,
}


@st.composite
def tiny_calls(draw: st.DrawFn) -> tuple[str, Call]:
    """(op, arguments with data) in every scenario, of sizes that are computed in a millisecond."""
    newest = [row for row in scenarios() if row[2] == "latest"]
    op, _, _, (wq, kv), mode = draw(st.sampled_from(newest))
    dims = TINY | {"N": draw(st.integers(1, 3)), "He": 32 * draw(st.integers(1, 3))}
    dims |= {"BlockSize": draw(st.integers(4, 7))}
    smooth = wq not in (0, 3) and draw(st.booleans())
    call = sample_call(
        weight_quant_mode=wq,
        kv_cache_quant_mode=kv,
        cache_mode=mode,
        lead=draw(leads(mode, 9, 5)),
        dims=dims,
        smooth=smooth,
        seed=draw(st.integers(0, 99)),
    )
    return op, as_operator(op, call | {"query_norm_flag": draw(st.booleans())})


def outline(results: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in results]


def on_meta(call: Call) -> Call:
    moved: dict[int, torch.Tensor] = {}
    return {
        name: moved.setdefault(id(value), value.to("meta"))
        if isinstance(value, torch.Tensor)
        else value
        for name, value in call.items()
    }


def kernel(op: str) -> Callable[..., Any]:
    return reference.mla_preprocess if op == ATB else getattr(reference, op)


@draws(350)
@given(tiny_calls())
def test_the_reference_returns_what_is_inferred(drawn: tuple[str, Call]) -> None:
    op, call = drawn
    inferred = meta.infer(op, **call)
    assert meta.infer(op, **on_meta(call)) == inferred
    assert outline(kernel(op)(**call)) == inferred


@draws(100)
@given(preprocess_calls(small=True))
def test_the_preprocess_reference_returns_what_is_inferred(drawn: tuple[str, Call]) -> None:
    op, call = drawn
    inferred = meta.infer(op, **call)
    assert meta.infer(op, **on_meta(call)) == inferred
    results = kernel(op)(**call)
    assert outline(results) == inferred
    assert all(r.isfinite().all() for r in results if r.is_floating_point())


def in_nz_storage(call: Call) -> Call:
    """The projections as [n/C0, k/16, 16, C0]."""
    stored = dict(call)
    for name in ("weight_dq", "weight_uq_qr", "weight_dkv_kr"):
        (k, n), c0 = call[name].shape, 32 // call[name].element_size()
        stored[name] = call[name].new_empty(n // c0, k // 16, 16, c0)
    return stored


@draws(300)
@given(prolog_calls())
def test_legal_calls_are_taken_and_infer_alike_in_either_weight_storage(
    drawn: tuple[str, str, str, Call],
) -> None:
    op, soc, cann, call = drawn
    meta.check(op, soc=soc, cann=cann, **call)
    meta.check(op, soc=soc, cann=cann, **in_nz_storage(call))
    inferred = meta.infer(op, cann=cann, **call)
    assert meta.infer(op, cann=cann, **in_nz_storage(call)) == inferred
    lead = tuple(call["token_x"].shape[:-1])
    assert inferred[0][0] == (*lead, call["weight_uk"].shape[0], 512) and inferred[1][1] == BF16
    if op == V3:
        assert meta.infer(op + "_functional", cann=cann, **call)[:5] == inferred
    assert meta.explain_call(op, soc=soc, cann=cann, **call).op == op


@draws(150)
@given(preprocess_calls())
def test_legal_preprocess_calls_are_taken(drawn: tuple[str, Call]) -> None:
    op, call = drawn
    meta.check(op, soc="A2", **call)
    tokens, heads = call["slotmapping"].shape[0], call["wuk"].shape[0]
    width = 576 if call["cache_mode"] == "kvcache" else 512
    assert meta.infer(op, **call)[0][0] == (tokens, heads, width)


# -- torch_npu's own meta functions


@pytest.fixture(scope="module")
def numbers() -> Iterator[list[int]]:
    """The last is the number of the chip that torch_npu is told it runs on."""
    offline.activate()
    from torch_npu.op_plugin.meta import _meta_registrations as theirs

    told = [260]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs, "get_soc_version", lambda: told[-1])
        yield told


@draws(350)
@given(prolog_calls())
def test_torch_npu_infers_the_same(numbers: list[int], drawn: tuple[str, str, str, Call]) -> None:
    from torch_npu.op_plugin.meta import _meta_registrations as theirs

    op, soc, _, call = drawn
    numbers.append(260 if soc == "A5" else 220)
    assert outline(getattr(theirs, f"{op}_forward")(**call)) == meta.infer(op, **call)


@draws(100)
@given(preprocess_calls())
def test_torch_npu_infers_the_same_of_preprocess(
    numbers: list[int], drawn: tuple[str, Call]
) -> None:
    from torch_npu.op_plugin.atb import _atb_meta_registrations as theirs

    op, call = drawn
    assert outline(theirs.npu_mla_preprocess_meta(**call)) == meta.infer(op, **call)


# -- illegal calls


def on_cuda() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(8, 64, dtype=BF16, device="cuda")


class Odd:
    """Something that is no argument of anything, and whose comparisons fail."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]


NUMBERS = (
    -1,
    0,
    1,
    3,
    7,
    64,
    290,
    2**70,
    -(2**70),
    0.0,
    -1.0,
    1e400,
    -1e400,
    math.nan,
    True,
    False,
    1j,
)
OTHERS = (
    None,
    "",
    "2",
    "PA_BSND",
    "pa_bsnd",
    "PA_NZ",
    "TND",
    "nzcache",
    "no_quant",
    b"PA_BSND",
    [],
    [1],
    {},
    object(),
)
TENSORS = (
    torch.tensor(3),
    torch.tensor([]),
    torch.zeros(8, 64).to_sparse(),
    torch.zeros(8, dtype=torch.complex64),
    torch.zeros(2, 2, dtype=torch.bool),
    torch.full((8,), 2**62),
    torch.tensor([4, 2], dtype=torch.int32),
    torch.nn.Parameter(torch.zeros(1536, dtype=BF16, device="meta")),
    on_cuda(),
)
JUNK = st.sampled_from([*NUMBERS, *OTHERS, *TENSORS, Odd(), torch.float16, torch.Size([1])])
DTYPES = st.sampled_from(
    [
        BF16,
        torch.float16,
        torch.float32,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
    ]
)


@st.composite
def changed_tensor(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with another dtype, rank, size or strides."""
    sizes = list(tensor.shape)
    how = draw(st.sampled_from(["dtype", "rank", "size", "strides", "expand"]))
    if how == "dtype":
        return tensor.new_empty(sizes, dtype=draw(DTYPES))
    if how == "rank":
        axis = draw(st.integers(0, len(sizes)))
        changed = (
            [*sizes[:axis], 1, *sizes[axis:]]
            if draw(st.booleans())
            else sizes[:axis] + sizes[axis + 1 :]
        )
        return tensor.new_empty(changed)
    if how == "size" and sizes:
        axis = draw(st.integers(0, len(sizes) - 1))
        sizes[axis] = max(
            0,
            draw(
                st.sampled_from([0, 1, 2, sizes[axis] - 1, sizes[axis] + 1, 2 * sizes[axis], 4099])
            ),
        )
        return tensor.new_empty(sizes)
    if how == "strides":
        return tensor.new_empty(sizes[::-1]).permute(list(range(len(sizes)))[::-1])
    return tensor.new_empty([1] * len(sizes)).expand(sizes)


@st.composite
def broken(draw: st.DrawFn, op: str, call: Call, names_kept: bool = False) -> Call:
    """The call with 1 to 3 arguments changed, dropped, or added; ``names_kept``: only changed."""
    call = dict(call)
    required, defaults = meta.signature(op)
    names = [*call, *call, *required, *defaults] + ["extra"] * (not names_kept)
    for _ in range(draw(st.integers(1, 3))):
        name, how = (
            draw(st.sampled_from(names)),
            draw(st.sampled_from(["change"] * 3 + ["junk", "drop"])),
        )
        value = call.get(name)
        if how == "drop" and not names_kept:
            call.pop(name, None)
        elif how == "change" and isinstance(value, torch.Tensor) and value.layout is torch.strided:
            call[name] = draw(changed_tensor(value))
        else:
            call[name] = draw(JUNK)
    return call


def raises_nothing_else(what: Any, *args: Any, **options: Any) -> bool:
    """Whether a call was refused; a refusal has a stable code, an argument, and one line."""
    try:
        what(*args, **options)
    except meta.ContractError as refusal:
        assert re.fullmatch(r"[a-z_]+(\.\w+)*", refusal.code) and refusal.argument
        assert refusal.expected and "\n" not in refusal.expected and isinstance(refusal, ValueError)
        return True
    return False


@draws(350)
@given(st.data())
def test_an_illegal_prologue_raises_nothing_but_contract_error(data: st.DataObject) -> None:
    op, soc, cann, call = data.draw(prolog_calls())
    call = data.draw(broken(op, call))
    values = data.draw(st.booleans())
    raises_nothing_else(meta.check, op, soc=soc, cann=cann, values=values, **call)
    raises_nothing_else(meta.infer, op, cann=cann, **call)
    raises_nothing_else(meta.explain_call, op, soc=soc, cann=cann, **call)


@draws(300)
@given(st.data())
def test_an_illegal_preprocess_raises_nothing_but_contract_error(data: st.DataObject) -> None:
    op, call = data.draw(preprocess_calls())
    call = data.draw(broken(op, call))
    raises_nothing_else(meta.check, op, values=data.draw(st.booleans()), **call)
    raises_nothing_else(meta.infer, op, **call)


@draws(60)
@given(st.data())
def test_operators_chips_and_releases_that_do_not_exist(data: st.DataObject) -> None:
    op, soc, cann, call = data.draw(prolog_calls())
    wrong = data.draw(JUNK.filter(lambda value: value is not None))
    change = data.draw(st.sampled_from(["op", "soc", "cann"]))
    place = {"op": op, "soc": soc, "cann": cann, change: wrong}
    assert raises_nothing_else(meta.check, place.pop("op"), **place, **call)


@draws(250)
@given(st.data())
def test_the_reference_refuses_what_does_not_fit_with_contract_error(data: st.DataObject) -> None:
    op, call = data.draw(st.one_of(tiny_calls(), preprocess_calls(small=True)))
    raises_nothing_else(kernel(op), **data.draw(broken(op, call, names_kept=True)))
