"""Indices from page tables against plain loops, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_fusion.meta import ContractError

from mla_fusion import paging
from mla_fusion.paging import PageTable
from mla_fusion.reference.cache import block_slots

I32 = torch.int32


def t(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@st.composite
def batches(draw: st.DrawFn, aligned: bool = False) -> dict[str, Any]:
    """Sequences over distinct pages, each with some new tokens at its end."""
    size = draw(st.sampled_from([1, 2, 4, 16]))
    lengths = draw(st.lists(st.integers(0, 40), min_size=0, max_size=5))
    counts = [-(-n // size) for n in lengths]
    order = draw(st.permutations(range(sum(counts) + 3)))
    pages, at = [], 0
    for count in counts:
        pages.append(list(order[at : at + count]))
        at += count
    if aligned:
        new = [n - size * draw(st.integers(0, n // size)) for n in lengths]
    else:
        new = [draw(st.integers(0, n)) for n in lengths]
    return {"size": size, "lengths": lengths, "pages": pages, "new": new}


def expected_slots(batch: dict[str, Any], new: list[int] | None = None) -> list[int]:
    size = batch["size"]
    return [
        pages[p // size] * size + p % size
        for pages, n, count in zip(
            batch["pages"], batch["lengths"], new or batch["new"], strict=True
        )
        for p in range(n - count, n)
    ]


def flashinfer(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    counts = [len(p) for p in batch["pages"]]
    indptr = t(0, *(sum(counts[: i + 1]) for i in range(len(counts))), dtype=I32)
    last = [
        n - (c - 1) * batch["size"] if c else 0
        for n, c in zip(batch["lengths"], counts, strict=True)
    ]
    return (
        indptr,
        t(*(p for pages in batch["pages"] for p in pages), dtype=I32),
        t(*last, dtype=I32),
    )


def table(batch: dict[str, Any]) -> PageTable:
    return PageTable.from_flashinfer(*flashinfer(batch), batch["size"])


@settings(deadline=None)
@given(batches())
def test_token_wise_index_from_flashinfer_and_vllm(batch: dict[str, Any]) -> None:
    new, wanted = t(*batch["new"], dtype=I32), expected_slots(batch)
    slots = table(batch).slots(new)
    assert slots.tolist() == wanted and slots.dtype == torch.int64
    padded = table(batch).slots(new, pad_to=len(wanted) + 2)
    assert padded.tolist() == [*wanted, -1, -1]
    block_table, seq_lens = table(batch).to_block_table(fill=-7)
    again = PageTable.from_block_table(block_table, seq_lens, batch["size"])
    assert again.slots(new).tolist() == wanted
    quick = PageTable.from_block_table(block_table, seq_lens, batch["size"], check=False)
    assert quick.slots(new, check=False).tolist() == wanted
    assert paging.slots_from_mapping(slots.int()).tolist() == wanted


@settings(deadline=None)
@given(batches())
def test_there_and_back(batch: dict[str, Any]) -> None:
    for back, wanted in zip(table(batch).to_flashinfer(), flashinfer(batch), strict=True):
        assert torch.equal(back, wanted) and back.dtype == I32
    slots, kvstarts = table(batch).token_table()
    assert slots.tolist() == expected_slots(batch, batch["lengths"])
    again = PageTable.from_token_table(slots, kvstarts, batch["size"])
    assert torch.equal(again.pages, table(batch).pages) and torch.equal(
        again.lengths, table(batch).lengths
    )


@settings(deadline=None)
@given(batches(aligned=True))
def test_block_wise_index_writes_the_same_rows(batch: dict[str, Any]) -> None:
    """What the kernel makes of the block-wise index is the token-wise one."""
    new = t(*batch["new"])
    made = table(batch).blocks(new)
    assert made.actual_seq_len.dtype == I32 and made.cache_index.dtype == torch.int64
    if sum(batch["new"]) == 0:
        assert len(made.cache_index) == 0
        return
    lead = torch.Size([sum(batch["new"])])
    slots = block_slots(made.cache_index, lead, made.actual_seq_len, batch["size"])
    assert slots.tolist() == expected_slots(batch)
    from_slots = paging.blocks_from_slots(table(batch).slots(new), new, batch["size"])
    assert torch.equal(from_slots.cache_index, made.cache_index)
    assert torch.equal(from_slots.actual_seq_len, made.actual_seq_len)


@settings(deadline=None)
@given(batches(), st.integers(0, 50))
def test_ppl_in_both_modes(batch: dict[str, Any], base: int) -> None:
    new = t(*batch["new"])
    seqstarts = torch.cat((t(0), new.cumsum(0)))
    start_pos = t(*batch["lengths"]) - new
    cachestarts, kvstarts = table(batch).token_table()
    found = paging.slots_from_ppl(
        cachestarts, start_pos, seqstarts, cache_mode=1, kvstarts=kvstarts
    )
    assert found.tolist() == expected_slots(batch)
    offsets = t(*(base + 100 * b for b in range(len(batch["lengths"]))))
    found = paging.slots_from_ppl(offsets, start_pos, seqstarts, cache_mode=0)
    assert found.tolist() == [
        base + 100 * b + p
        for b, (n, count) in enumerate(zip(batch["lengths"], batch["new"], strict=True))
        for p in range(n - count, n)
    ]


def test_the_example_of_two_requests() -> None:
    """Pages of 4: request 0 has pages 5, 2 with 6 tokens, request 1 page 9 with 3; one new each."""
    pages = PageTable.from_flashinfer(t(0, 2, 3), t(5, 2, 9), t(2, 3), 4)
    assert pages.slots(t(1, 1)).tolist() == [2 * 4 + 1, 9 * 4 + 2]
    assert pages.slots(t(2, 3)).tolist() == [8, 9, 36, 37, 38]
    index = pages.blocks(t(2, 3))
    assert index.cache_index.tolist() == [2, 9] and index.actual_seq_len.tolist() == [2, 5]
    assert pages.to_block_table(3, fill=0)[0].tolist() == [[5, 2, 0], [9, 0, 0]]


TABLE = PageTable.from_flashinfer(t(0, 2, 3), t(5, 2, 9), t(2, 3), 4)
PPL = {"cachestarts": t(0, 8), "start_pos": t(1, 2), "seqstarts": t(0, 1, 3), "cache_mode": 0}
IN_TABLE = {"cache_mode": 1, "cachestarts": t(0, 1, 8, 9, 10, 11), "kvstarts": t(0, 2, 6)}
BAD: list[tuple[str, Any]] = [
    ("page_size", lambda: PageTable.from_flashinfer(t(0), t(), t(), 0)),
    ("indptr", lambda: PageTable.from_flashinfer(t(0, 2, 1), t(1, 2), t(1, 1), 4)),
    ("indptr", lambda: PageTable.from_flashinfer(t(), t(), t(), 4)),
    ("indices", lambda: PageTable.from_flashinfer(t(0, 2), t(1), t(1), 4)),
    ("indices", lambda: PageTable.from_flashinfer(t(0, 1), t(-1), t(1), 4)),
    ("indices", lambda: PageTable.from_flashinfer(t(0, 1), torch.ones(1), t(1), 4)),
    ("last_page_len", lambda: PageTable.from_flashinfer(t(0, 1), t(1), t(5), 4)),
    ("last_page_len", lambda: PageTable.from_flashinfer(t(0, 1), t(1), t(0), 4)),
    ("last_page_len", lambda: PageTable.from_flashinfer(t(0, 1), t(1), t(1, 1), 4)),
    ("block_table", lambda: PageTable.from_block_table(t(1, 2), t(1), 4)),
    ("block_table", lambda: PageTable.from_block_table(t(-1, 2)[None], t(1), 4)),
    ("seq_lens", lambda: PageTable.from_block_table(t(1, 2)[None], t(9), 4)),
    ("seq_lens", lambda: PageTable.from_block_table(t(1, 2)[None], t(1, 1), 4)),
    ("max_blocks", lambda: TABLE.to_block_table(1)),
    ("new_tokens", lambda: TABLE.slots(t(7, 0))),
    ("new_tokens", lambda: TABLE.slots(t(1))),
    ("new_tokens", lambda: TABLE.blocks(t(1, 0))),
    ("pad_to", lambda: TABLE.slots(t(1, 1), pad_to=1)),
    ("slots", lambda: PageTable.from_token_table(t(4, 5, 7), t(0, 3), 4)),
    ("slots", lambda: PageTable.from_token_table(t(5, 6), t(0, 2), 4)),
    ("slots", lambda: paging.blocks_from_slots(t(1, 2), t(2), 4)),
    ("new_tokens", lambda: paging.blocks_from_slots(t(0, 1), t(3), 4)),
    ("slot_mapping", lambda: paging.slots_from_mapping(t(3, 3))),
    ("slot_mapping", lambda: paging.slots_from_mapping(t(0, 64), rows=64)),
    ("slot_mapping", lambda: paging.slots_from_mapping(t(-2))),
    ("cache_mode", lambda: paging.slots_from_ppl(**PPL | {"cache_mode": 2})),
    ("seqstarts", lambda: paging.slots_from_ppl(**PPL | {"seqstarts": t(0, 3, 1)})),
    ("start_pos", lambda: paging.slots_from_ppl(**PPL | {"start_pos": t(-1, 0)})),
    ("cachestarts", lambda: paging.slots_from_ppl(**PPL | {"cachestarts": t(0)})),
    ("kvstarts", lambda: paging.slots_from_ppl(**PPL | {"cache_mode": 1})),
    ("start_pos", lambda: paging.slots_from_ppl(**PPL | IN_TABLE | {"start_pos": t(1, 3)})),
]


@pytest.mark.parametrize(("argument", "call"), BAD)
def test_bad_input_names_its_argument(argument: str, call: Any) -> None:
    with pytest.raises(ContractError) as refusal:
        call()
    assert refusal.value.argument == argument and refusal.value.code == f"paging.{argument}"


def test_ppl_table_mode_takes_what_its_neighbours_refuse() -> None:
    assert paging.slots_from_ppl(**PPL | IN_TABLE).tolist() == [1, 10, 11]


@settings(max_examples=20, deadline=None)
@given(batches())
def test_the_device_of_the_input_is_kept(batch: dict[str, Any]) -> None:
    """No tensor is made on the default device: it is a device that holds no data."""
    with torch.device("cpu"):
        pages, new = table(batch), t(*batch["new"])
    with torch.device("meta"):
        assert pages.slots(new).device.type == "cpu"
        assert pages.blocks(new, check=False).cache_index.device.type == "cpu"
        assert (
            PageTable.from_block_table(*pages.to_block_table(), batch["size"]).pages.device.type
            == "cpu"
        )
