"""Copies of whole caches: counted in graphs that the real torchair has lowered, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.inspect import read, summarise
from mla_fusion.tools.inspect.copies import Copy, find_copies
from tests.catalogue import ENTRIES
from tests.exhaustive import one_in

UNFUSED = mf.Config(enable=False)


def lowered(
    name: str, mode: str, folder: Path, fused: bool = True
) -> tuple[mf.Lowering, list[Copy], list[str]]:
    """What torchair made of an entry; the copies of its caches, and the caches followed."""
    found = ENTRIES[name]
    config = found.config(verify="off") if fused else UNFUSED
    low = mf.lower(found.model(), *found.args(), mode=mode, config=config)
    low.save(folder)
    copies = find_copies(read(folder / ("graph.pbtxt" if mode == "ge" else "fx_after.txt")))
    assert not copies.not_followed
    return low, [one for one in copies.copies if one.role == "cache"], copies.followed


def rebuilt_in_memory(low: mf.Lowering) -> dict[str, int]:
    """By the memory of its values: how often the lowered FX graph makes another tensor of an input
    that it writes.

    Counted are nodes between a ``copy_`` into an input and that input, in memory of their own and
    not smaller than a quarter of it, and the ``copy_`` itself.
    """
    graph, found = low.fx_after.graph, dict[str, int]()
    for back in graph.nodes:
        if str(back.target) != "aten.copy_.default" or back.args[0].op != "placeholder":
            continue
        cache = back.args[0]
        wanted, stack, owners = cache.meta["val"].nbytes // 4, [back.args[1]], set()
        below = {cache}
        for node in graph.nodes:
            if below & set(node.all_input_nodes):
                below.add(node)
        while stack:
            node = stack.pop()
            if node not in below or node is cache:
                continue
            value = node.meta["val"]
            if value.nbytes >= wanted:
                owners.add(value.untyped_storage()._cdata)
            stack += node.all_input_nodes
        owners.discard(cache.meta["val"].untyped_storage()._cdata)
        found[cache.name] = len(owners) + 1
    return found


IN_PLACE = [
    "PagedRotateHalf",
    "ScatterNd",
    "NpuOperatorsV1",
    "LayersOfAPool",
    "BothByOneOperator",
    "PackedRows",
]
STAGED = ["ComplexDense", "GptjStack", "NewRowsRead", "StaticCache", "CombinedCache", "MaskedWrite"]


@pytest.mark.parametrize("mode", ["ge", "npugraph_ex"])
@pytest.mark.parametrize("name", one_in(2, IN_PLACE))
def test_nothing_is_copied_where_the_kernel_writes(name: str, mode: str, tmp_path: Path) -> None:
    low, copies, followed = lowered(name, mode, tmp_path)
    assert {item.placement for item in low.report.fused} == {"in place"}
    assert copies == []
    layers = len(low.report.fused)
    assert len(followed) == (layers if name == "PackedRows" else 2 * layers)
    text = str(summarise(read(tmp_path / ("graph.pbtxt" if mode == "ge" else "fx_after.txt"))))
    assert "ollowed from input to output" in text and followed[0] in text


def test_a_cache_that_attention_casts_is_said_to_be_read_so(tmp_path: Path) -> None:
    lowered("PagedRotateHalf", "npugraph_ex", tmp_path)
    found = find_copies(read(tmp_path / "fx_after.txt")).copies
    assert {(one.type, one.role) for one in found} == {
        ("aten._to_copy.default", "cache, to read it")
    }


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", one_in(2, STAGED))
def test_copies_are_those_of_memory(name: str, fused: bool, tmp_path: Path) -> None:
    """Staged and unfused: as npugraph_ex runs them, against the memory of every value."""
    low, copies, _ = lowered(name, "npugraph_ex", tmp_path, fused)
    counted: dict[str, int] = {}
    for one in copies:
        counted[one.of] = counted.get(one.of, 0) + 1
    assert counted == rebuilt_in_memory(low)


@pytest.mark.parametrize("fused", [True, False])
def test_slices_of_a_ge_graph_are_joined_to_whole_caches(fused: bool, tmp_path: Path) -> None:
    """``cache[:b, s:e] = rows``, DeepSeek's way: each cache is made anew, and given out."""
    _, copies, _ = lowered("ComplexDense", "ge", tmp_path, fused)
    whole: dict[str, int] = {}
    for one in copies:
        assert one.type == "ConcatV2" and one.what == "rebuilt"
        whole[one.of] = max(whole.get(one.of, 0), one.bytes or 0)
    rows = 2 * 16 if fused else 4 * 16  # the pass hands in the part that is written
    assert sorted(whole.values()) == [rows * 64 * 2, rows * 512 * 2]
    joins = next(read(tmp_path / "graph.pbtxt").of_type("NetOutput")).inputs[-2:]
    assert {str(edge) for edge in joins} <= {one.operator for one in copies}
    text = str(summarise(read(tmp_path / "graph.pbtxt")))
    assert "Copies at every run" in text


def test_an_index_add_of_a_ge_graph_works_on_copies(tmp_path: Path) -> None:
    _, copies, followed = lowered("MaskedWrite", "ge", tmp_path)
    assert [one.type for one in copies] == ["TensorMove", "TensorMove"] and len(followed) == 2


# -- by hand


def of_listing(tmp_path: Path, fn: object, *args: Tensor) -> str:
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(torch.func.functionalize(fn, remove="mutations"), tracing_mode="fake")(*args)  # type: ignore[arg-type]
    (tmp_path / "fx.txt").write_text(gm.print_readable(print_output=False))
    return str(summarise(read(tmp_path / "fx.txt")))


@torch.library.custom_op("mla_fusion_tests::moved_rows", mutates_args=())
def moved_rows(cache: Tensor) -> Tensor:
    return cache.clone()


@moved_rows.register_fake
def _(cache: Tensor) -> Tensor:
    return torch.empty_like(cache)


def test_an_unknown_operator_on_the_way_is_named(tmp_path: Path) -> None:
    def step(cache: Tensor, rows: Tensor) -> Tensor:
        cache.copy_(torch.ops.mla_fusion_tests.moved_rows(cache))
        cache[:2] = rows
        return rows.sum()

    text = of_listing(tmp_path, step, torch.zeros(8, 4), torch.zeros(2, 4))
    assert "not followed through mla_fusion_tests.moved_rows.default moved_rows" in text
    assert "not copied" not in text


def test_a_hidden_state_of_the_same_shape_is_no_cache(tmp_path: Path) -> None:
    text = of_listing(
        tmp_path, lambda x, w: x + (x @ w).relu(), torch.zeros(8, 4), torch.zeros(4, 4)
    )
    assert "No cache was found" in text


TAILS: dict[str, Callable[[Tensor], Tensor]] = {
    "computed from it": lambda cache: cache + 0,
    "pad": lambda cache: nn.functional.pad(cache, (0, 64)),
    "cast": lambda cache: cache.to(torch.float16),
    "gathered": lambda cache: cache[torch.arange(len(cache))],
}


@pytest.mark.parametrize("how", TAILS)
def test_whatever_makes_a_tensor_as_large_as_a_written_cache_is_a_copy(
    how: str, tmp_path: Path
) -> None:
    def step(cache: Tensor, rows: Tensor) -> Tensor:
        cache[:2] = rows
        return TAILS[how](cache)

    text = of_listing(tmp_path, step, torch.zeros(64, 512), torch.zeros(2, 512))
    kinds = text.partition("Copies at every run")[2]
    assert f" {how} " in kinds and " write back " in kinds
