"""The contract of npu_fused_infer_attention_score_v2 for absorbed MLA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mla_fusion.meta.attention import ATTENTION, INT8_LAYOUTS, LAYOUTS, OP, padded_heads
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_fusion as mf
from mla_fusion import meta
from tests.attention_calls import Latents

TND = Latents().call("TND")
BSND = Latents().call("BSND")
TWO = Latents(lengths=(37, 2), new=(2, 2)).call("BSND")
INT8 = Latents(dtype=torch.int8, block=128).call("BSND")
NZ = Latents(form="NZ").call("BSND")
MASK = TND["atten_mask"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["BSD", "NSD", "NZ"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_layout_and_form_of_caches_is_taken(
    layout: str, form: str, dtype: torch.dtype
) -> None:
    for new in ((1, 1), (2, 2)):
        call = Latents(lengths=(37, 2), new=new, form=form, dtype=dtype, block=128).call(layout)
        for soc in ("A2", "A3"):
            for cann in ("8.5", "9.0", "9.1", "latest"):
                meta.check(OP, soc=soc, cann=cann, values=True, **call)


@pytest.mark.parametrize("layout", INT8_LAYOUTS)
@pytest.mark.parametrize("form", ["BSD", "NSD", "NZ"])
def test_int8_is_taken(layout: str, form: str) -> None:
    meta.check(OP, **Latents(dtype=torch.int8, block=128, form=form).call(layout))


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("block", [16, 48, 256, 1024])
def test_heads_and_blocks(heads: int, block: int) -> None:
    meta.check(OP, **Latents(heads=heads, block=block).call())


@pytest.mark.parametrize("mode", [4, 9])
def test_other_masks(mode: int) -> None:
    tree = {"TND": torch.ones(8, dtype=torch.bool), "BSND": torch.ones(2, 2, 2, dtype=torch.bool)}
    for layout in ("TND", "BSND"):
        call = Latents(lengths=(37, 2), new=(2, 2)).call(layout) | {"sparse_mode": mode}
        meta.check(OP, **call | ({"atten_mask": tree[layout]} if mode == 9 else {}))


def test_lengths_may_be_tensors_which_are_read_on_request() -> None:
    wrong = {
        "actual_seq_qlen": torch.tensor([1, 1, 1, 1]),
        "actual_seq_kvlen": torch.tensor([37, 1, 60, 16]),
    }
    meta.check(OP, **TND | wrong)
    with pytest.raises(meta.ContractError, match="prefix sums"):
        meta.check(OP, values=True, **TND | wrong)
    fake = {name: tensor.to("meta") for name, tensor in wrong.items()}
    with pytest.raises(meta.ContractError) as refused:
        meta.check(OP, values=True, **TND | fake)
    assert refused.value.code == "values.meta"


def test_padding_of_a_graph_is_a_sequence_of_no_key() -> None:
    meta.check(OP, **TND | {"actual_seq_kvlen": [37, 1, 60, 0]})


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def changed(
    call: dict[str, Any], cann: str = "latest", soc: str = "A3", **changes: Any
) -> tuple[dict, dict]:
    return call | changes, {"cann": cann, "soc": soc}


OLD = BSND | {"return_softmax_lse": False}
BLOCKS = len(BSND["key"])
WIDER = half(BLOCKS, 16, 576)
REFUSED: list[
    tuple[str, tuple[dict, dict]]
] = [  # code, the call with the change that it is refused for
    ("soc", changed(BSND, soc="A5")),
    ("cann", changed(BSND, cann="8.2")),
    ("argument.unknown", changed(BSND, left_padding=1)),
    ("required.query_rope", changed(BSND, query_rope=None)),
    ("required.key_rope", changed(BSND, key_rope=None)),
    ("required.block_table", changed(BSND, block_table=None)),
    ("type.key_rope", changed(BSND, key_rope=half(3, 4).to_sparse())),
    *(
        (f"forbidden.{name}", changed(BSND, **{name: torch.ones(1)}))
        for name in (
            "pse_shift",
            "learnable_sink",
            "quant_scale_out",
            "dequant_offset_key",
            "dequant_scale_key",
        )
    ),
    ("input_layout", changed(BSND, input_layout="NTD")),
    ("input_layout", changed(INT8, input_layout="BNSD")),
    ("dtype.query", changed(BSND, query=torch.zeros(4, 1, 2, 512))),
    ("dtype.query_rope", changed(BSND, query_rope=torch.zeros(4, 1, 2, 64))),
    ("dtype.key_rope", changed(INT8, key_rope=INT8["key_rope"].half())),
    ("dtype.block_table", changed(BSND, block_table=torch.zeros(4, 4, dtype=torch.int64))),
    # sizes, among them heads that the kernel refuses and head dims that it takes for others
    (
        "dims.n",
        changed(BSND, query=half(4, 1, 12, 512), query_rope=half(4, 1, 12, 64), num_query_heads=12),
    ),
    ("dims.n", changed(BSND, num_query_heads=0)),
    ("num_key_value_heads", changed(BSND, num_key_value_heads=4)),
    ("num_key_value_heads", changed(BSND, num_key_value_heads=0)),
    (
        "dims.d",
        changed(BSND, query=half(4, 1, 2, 128), key=half(9, 16, 128), value=half(9, 16, 128)),
    ),
    ("dims.r", changed(BSND, query_rope=half(4, 1, 2, 32), key_rope=half(BLOCKS, 16, 32))),
    ("shape.query", changed(BSND, query=half(4, 1, 8, 512))),
    ("shape.query_rope", changed(BSND, query_rope=half(4, 2, 2, 64))),
    ("rank.query", changed(BSND, query=half(4, 2, 512))),
    ("shape.value", changed(BSND, value=half(BLOCKS, 32, 512))),
    ("shape.key", changed(NZ, key=half(BLOCKS, 1, 16, 16, 32), value=half(BLOCKS, 1, 16, 16, 32))),
    ("rank.key", changed(BSND, key=half(BLOCKS, 512))),
    ("rank.key_rope", changed(NZ, key_rope=half(BLOCKS, 16, 64))),
    (
        "rank.key",
        changed(Latents(form="NSD").call("BSND") | {"return_softmax_lse": False}, cann="8.3"),
    ),
    ("dims.blocksize", changed(Latents(block=24).call("BSND"))),
    ("dims.blocksize", changed(Latents(block=1040).call("BSND"))),
    (
        "dims.blocksize",
        changed(Latents(block=32).call("BSND") | {"return_softmax_lse": False}, cann="8.3"),
    ),
    (
        "dims.blocksize",
        changed(Latents(form="NZ").call("BSND") | {"return_softmax_lse": False}, cann="8.3"),
    ),
    ("dims.blocksize", changed(Latents(dtype=torch.int8).call("BSND"))),
    ("block_size", changed(BSND, block_size=128)),
    ("shape.block_table", changed(BSND, block_table=torch.zeros(3, 4, dtype=torch.int32))),
    (
        "dims.blocknum",
        changed(BSND, key=half(0, 16, 512), value=half(0, 16, 512), key_rope=half(0, 16, 64)),
    ),
    ("dims.s", changed(Latents(lengths=(40,), new=(17,)).call("BSND"), cann="9.1")),
    ("dims.s", changed(Latents(lengths=(40,), new=(17,), block=128, dtype=torch.int8).call("TND"))),
    ("dims.b", changed(Latents(lengths=(1,) * 4097, new=(1,) * 4097, heads=1).call("TND"))),
    # quantisation
    ("required.dequant_scale_query", changed(INT8, dequant_scale_query=None)),
    ("required.dequant_scale_value", changed(INT8, dequant_scale_value=None)),
    ("rank.dequant_scale_query", changed(INT8, dequant_scale_query=torch.ones(4, 2))),
    ("shape.dequant_scale_key", changed(INT8, dequant_scale_key=torch.ones(512))),
    ("dtype.dequant_scale_key", changed(INT8, dequant_scale_key=torch.ones(1).half())),
    ("query_quant_mode", changed(INT8, query_quant_mode=0)),
    ("query_quant_mode", changed(BSND, query_quant_mode=3)),
    ("key_quant_mode", changed(INT8, key_quant_mode=1)),
    ("dtype.key", changed(INT8, key=half(1, 128, 512))),
    # masks: the first two are taken by the kernel, which then computes something else
    ("mask.ignored", changed(BSND, atten_mask=torch.zeros(1, 1, 1, 64, dtype=torch.bool))),
    ("mask.absent", changed(TND, sparse_mode=0, atten_mask=None)),
    ("sparse_mode", changed(BSND, sparse_mode=1)),
    ("sparse_mode", changed(TWO, cann="9.0", sparse_mode=9)),
    ("sparse_mode", changed(OLD, cann="8.3", sparse_mode=3, atten_mask=MASK)),
    ("sparse_mode", changed(INT8, sparse_mode=3, atten_mask=MASK)),
    ("required.atten_mask", changed(TWO, atten_mask=None)),
    ("dtype.atten_mask", changed(TWO, atten_mask=torch.zeros(2048, 2048))),
    ("shape.atten_mask", changed(TWO, atten_mask=MASK[:2, :37])),
    ("shape.atten_mask", changed(TWO, sparse_mode=9, atten_mask=MASK[None, :2, :37])),
    # lengths
    ("required.actual_seq_kvlen", changed(BSND, actual_seq_kvlen=None)),
    ("required.actual_seq_qlen", changed(TND, actual_seq_qlen=None)),
    (
        "lengths.actual_seq_qlen",
        changed(TND, actual_seq_qlen=[1, 1, 1, 1]),
    ),  # counts, not prefix sums
    ("lengths.actual_seq_qlen", changed(TND, actual_seq_qlen=[2, 1, 3, 4])),
    ("lengths.actual_seq_qlen", changed(TND, actual_seq_qlen=[1, 2, 3])),
    (
        "lengths.actual_seq_kvlen",
        changed(TND, actual_seq_kvlen=[37, 38, 98, 114]),
    ),  # prefix sums, not lengths
    ("lengths.actual_seq_kvlen", changed(BSND, actual_seq_kvlen=[37, 1, -1, 16])),
    ("lengths.actual_seq_kvlen", changed(TWO, actual_seq_kvlen=[37, 1])),
    ("lengths.actual_seq_qlen", changed(TWO, actual_seq_qlen=[2, 3])),
    # memory
    ("contiguous.key_rope", changed(BSND, key_rope=WIDER[:, :, 512:])),
    ("contiguous.key", changed(BSND, key=WIDER[:, :, :512], value=WIDER[:, :, :512])),
    ("contiguous.query", changed(BSND, query=half(4, 1, 2, 576)[..., :512])),
    ("return_softmax_lse", changed(BSND, cann="8.3")),
]


@pytest.mark.parametrize(
    ("code", "call"), REFUSED, ids=[f"{i}-{code}" for i, (code, _) in enumerate(REFUSED)]
)
def test_refused_by_code(code: str, call: tuple[dict[str, Any], dict[str, str]]) -> None:
    arguments, where = call
    with pytest.raises(meta.ContractError) as refused:
        meta.check(OP, **where, **arguments)
    assert refused.value.code == code
    assert refused.value.argument in str(refused.value)


def test_more_tokens_than_tnd_takes() -> None:
    most = (1 << 20) + 1
    many = Latents(lengths=(1,), new=(1,), heads=1).call() | {"actual_seq_qlen": [most]}
    many["query"] = torch.empty(most, 1, 512, dtype=torch.bfloat16, device="meta")
    many["query_rope"] = torch.empty(most, 1, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(meta.ContractError) as refused:
        meta.check(OP, **many)
    assert refused.value.code == "dims.t"


def test_tensors_of_another_device() -> None:
    mf.offline.activate()
    home = ("npu", "cpu")
    with FakeTensorMode():
        call = {
            name: torch.empty(item.shape, dtype=item.dtype, device=home[name == "key_rope"])
            if isinstance(item, torch.Tensor)
            else item
            for name, item in BSND.items()
        }
        with pytest.raises(meta.ContractError) as refused:
            meta.check(OP, **call)
    assert refused.value.code == "device.key_rope"


def test_before_8_5_it_takes_less() -> None:
    meta.check(OP, cann="8.3", **OLD)
    meta.check(OP, cann="8.3", **TND | {"return_softmax_lse": False})
    meta.check(
        OP, cann="8.3", **Latents(form="NZ", block=128).call("BSND") | {"return_softmax_lse": False}
    )


def test_heads_are_padded_to_the_next_number() -> None:
    assert [padded_heads(heads) for heads in (1, 3, 12, 16, 20, 100, 128)] == [
        1,
        4,
        16,
        16,
        32,
        128,
        128,
    ]
    for heads in (0, 129):
        with pytest.raises(meta.ContractError) as refused:
            padded_heads(heads)
        assert refused.value.code == "dims.n"


def test_the_table_is_torch_npus_schema() -> None:
    mf.offline.activate()
    ours = torch._C.parse_schema(f"npu::{ATTENTION.schema}")
    theirs = torch.ops.npu.npu_fused_infer_attention_score_v2.default._schema

    def listed(schema: Any) -> list[tuple[str, str, object]]:
        return [
            (argument.name, str(argument.type), argument.default_value)
            for argument in schema.arguments
        ]

    wanted = listed(ours)
    assert all(
        argument in wanted for argument in listed(theirs)
    )  # older releases lack some of the dtypes
    assert len(ours.returns) == len(theirs.returns)
