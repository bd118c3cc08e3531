"""One call of the attention operator against the tables of `attention.py`.

Two calls are refused although the vendor's checks take them, because users report wrong results
without an error: a mask of sparse_mode 0 (``mask.ignored``), and TND without a mask
(``mask.absent``). sparse_mode 3 says the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from mla_fusion.meta import attention as table
from mla_fusion.meta.attention import BAND, CAUSAL_AT_THE_END, HOST, LENGTHS, NO_MASK, TREE
from mla_fusion.meta.binder import Binder, Derived
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.layout import contiguous
from mla_fusion.meta.limits import Sizes, only
from mla_fusion.meta.symbolic import different

_CACHES = ("key", "value", "key_rope")
_CAUSAL = f"sparse_mode {CAUSAL_AT_THE_END} with its mask [{table.MASK_WIDTH}, {table.MASK_WIDTH}]"


def check_attention(
    op: str,
    soc: str,
    cann: str,
    values: bool,
    full: Mapping[str, Any],
    floats: Sequence[torch.dtype] = table.FLOATS,
) -> Binder:
    """`mla_fusion.meta.check` of this operator; ``full``: every argument by name.

    Lengths are host integers, or tensors in GE graphs, where ``values`` says whether they are read.
    ``floats``: the dtypes of a query that is not int8.
    """
    if soc not in table.SOCS:
        expected = "A2 or A3: the form of A5 is not described here"
        raise ContractError("soc", "soc", expected, soc, source=HOST, op=op)
    call = _Call(full, table.release(cann))
    call.check_modes()
    call.check_dims(floats)
    call.check_tensors()
    call.check_quantisation()
    call.check_sizes()
    call.check_mask()
    call.check_lengths(values)
    call.one_device()
    call.caches(_CACHES, "a contiguous tensor")  # no compiler lays caches out anew
    for name in table.TENSORS:
        if name not in _CACHES and full[name] is not None and not contiguous(full[name]):
            call.refuse_strides(name, "a contiguous tensor")
    return call


def infer_attention(op: str, full: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], torch.dtype]]:
    """attention_out in the layout asked for, of ``query_rope``'s dtype; softmax_lse, [0] where it
    is not asked for.
    """
    layout = str(full["input_layout"])
    bound = Binder(table.ATTENTION, HOST, full)
    bound.pick("input_layout", table.LAYOUTS)
    bound.presence("query_rope", True, "for MLA over pages")
    axes, out_axes = table.axes_of(layout)
    bound.rank("query", len(axes))
    heads, width = full["num_query_heads"], _width_of(bound, "value")
    found = {"N": heads, **dict(zip(axes, full["query"].shape, strict=True))}
    found |= {"D": width, "H": heads * width}
    lse = ("T", "N") if "T" in axes else ("B", "N", "S")
    return [
        (tuple(found[axis] for axis in out_axes), full["query_rope"].dtype),
        (
            (*(found[axis] for axis in lse), 1) if full["return_softmax_lse"] else (0,),
            torch.float32,
        ),
    ]


def _width_of(bound: Binder, name: str) -> Any:
    """Elements of a row of a cache."""
    shape = bound.full[name].shape
    if len(shape) not in (3, 4, 5):
        forms = "[BlockNum, BlockSize, W], [BlockNum, 1, BlockSize, W] or NZ "
        expected = f"{forms}[BlockNum, 1, W/C0, BlockSize, C0]"
        bound.refuse(f"rank.{name}", name, expected, list(shape))
    return shape[2] * shape[4] if len(shape) == 5 else shape[-1]


class _Call(Binder):
    """One call; every rule that fails raises ContractError."""

    derived: ClassVar[Derived] = {
        "H": lambda dims: dims["N"] * dims["D"],
        "N*R": lambda dims: dims["N"] * dims["R"],
    }

    def __init__(self, full: Mapping[str, Any], allowed: table.Release) -> None:
        super().__init__(table.ATTENTION, HOST, full)
        self.allowed = allowed
        self.layout = str(full["input_layout"])
        self.int8 = bool(full["query"].dtype == torch.int8)

    @property
    def axes(self) -> str:
        """Of query."""
        return table.axes_of(self.layout)[0]

    def check_modes(self) -> None:
        for name in ("query_rope", "key_rope", "block_table"):
            self.presence(name, True, "for MLA over pages")
        for name in table.NOT_OF_MLA:
            self.presence(name, False, "with query_rope")
        self.pick("input_layout", table.LAYOUTS)
        if self.int8:
            self.pick("input_layout", table.INT8_LAYOUTS, " with an int8 query")
        if not self.allowed.lse:
            self.pick("return_softmax_lse", (False,), " before CANN 8.5")
        self.pick("sparse_mode", self.allowed.sparse_modes)

    def check_dims(self, floats: Sequence[torch.dtype]) -> None:
        """The axes that are no tensor's own: N, D, R and their products."""
        self.dtype("query", *floats, torch.int8)
        heads = self.dims["N"] = self.full["num_query_heads"]
        few = type(heads) is int and 0 < heads <= 128
        pad = f": pad to {table.padded_heads(heads)}" if few else ""
        self.within("N", "num_query_heads", table.HEADS, pad)
        for axis, size, name in (("D", table.LATENT, "key"), ("R", table.ROPE, "key_rope")):
            self.dims[axis] = _width_of(self, name)
            self.within(axis, name, only(size), ", with W_uk multiplied into the query")

    def check_tensors(self) -> None:
        full, axes = self.full, " ".join(self.axes)
        kind = full["query"].dtype
        rope_kind = torch.bfloat16 if self.int8 else kind
        self.tensor("query", axes, kind)
        self.tensor("query_rope", axes.replace("D", "R").replace("H", "N*R"), rope_kind)
        for name, axis in (("key", "D"), ("value", "D"), ("key_rope", "R")):
            of = kind if axis == "D" else rope_kind
            rank, c0 = full[name].dim(), 32 // of.itemsize
            width = table.LATENT if axis == "D" else table.ROPE
            nz = f"BlockNum 1 {width // c0} BlockSize {c0}"
            nd = f"BlockNum {'1 ' if rank == 4 else ''}BlockSize {axis}"
            self.tensor(name, nz if rank == 5 else nd, of)
        rank = full["key"].dim()
        if full["key_rope"].dim() != rank:
            found = list(full["key_rope"].shape)
            self.refuse("rank.key_rope", "key_rope", f"{rank}-D, as key", found)
        fits = {3: True, 4: self.axes in ("BNSD", "TND"), 5: self.axes != "BNSD"}
        if self.allowed.tied and not fits[rank]:
            expected = f"[BlockNum, BlockSize, D] with {self.layout} before CANN 8.5"
            self.refuse("rank.key", "key", expected, list(full["key"].shape))
        self.dims.setdefault("B", full["block_table"].shape[0])
        self.tensor("block_table", "B Blocks", torch.int32)

    def check_quantisation(self) -> None:
        query = f"a query of {self.full['query'].dtype}"
        shapes = (" ".join(self.axes.replace("H", "N").replace("D", "")), "1", "1")
        for name, shape in zip(table.SCALES, shapes, strict=True):
            self.presence(name, self.int8, f"with {query}")
            if self.int8:
                self.tensor(name, shape, torch.float32)
        of_query = table.PER_TOKEN_AND_HEAD if self.int8 else 0
        self.pick("query_quant_mode", (of_query,), f" with {query}")
        for name in ("key_quant_mode", "value_quant_mode"):
            self.pick(name, (table.PER_TENSOR,))

    def check_sizes(self) -> None:
        full, dims = self.full, self.dims
        one_head = type(dims["N"]) is int and dims["N"] == 1
        self.pick("num_key_value_heads", (0, 1) if one_head else (1,))  # 0: as many as of query
        for axis in dims:
            most = table.MOST.get(axis) if "T" in dims else None
            self.within(axis, "query", Sizes(low=1, high=most), f" in {self.layout}")
        nz = full["key"].dim() == 5
        blocks = self.allowed.nz_blocks if nz else self.allowed.blocks
        cache = f" in {'an NZ' if nz else 'a'} cache of {full['key'].dtype}"
        self.within("BlockSize", "key", table.INT8_BLOCKS if self.int8 else blocks, cache)
        if different(full["block_size"], dims["BlockSize"]):
            expected = f"{dims['BlockSize']}, the rows of a block of key"
            self.refuse("block_size", "block_size", expected, full["block_size"])

    def check_mask(self) -> None:
        dims, mode, mask = self.dims, self.full["sparse_mode"], self.full["atten_mask"]
        if mode == NO_MASK and mask is not None:
            expected = f"nothing (in sparse_mode 0 ignored past position 512); {_CAUSAL}"
            self.refuse("mask.ignored", "atten_mask", expected, f"a tensor {list(mask.shape)}")
        if mode == NO_MASK and "T" in dims:
            expected = f"a mask in {self.layout}: without one the result can be a uniform average; "
            self.refuse("mask.absent", "atten_mask", expected + _CAUSAL, "nothing")
        if self.int8 or self.allowed.tied:
            one = type(dims.get("S")) is int and dims["S"] == 1
            modes = {CAUSAL_AT_THE_END, TREE} if "T" in dims else {CAUSAL_AT_THE_END, TREE, BAND}
            modes = {NO_MASK, BAND} if one else modes
            taken = sorted(modes & {*self.allowed.sparse_modes} - ({BAND} if self.int8 else set()))
            self.pick("sparse_mode", taken, f" in {self.layout}" + " of one token" * one)
        if mode == NO_MASK:
            return
        self.presence("atten_mask", True, f"with sparse_mode {mode}")
        leading = "1 " * (0 if self.int8 else min(max(mask.dim() - 2, 0), 2))
        shape = f"{leading}{table.MASK_WIDTH} {table.MASK_WIDTH}"
        if mode == TREE:  # of TND the squares of all sequences, one behind the other
            shape = "squares" if "T" in dims else "B S S"
        self.tensor("atten_mask", shape, *table.MASK_DTYPES)

    def check_lengths(self, values: bool) -> None:
        """actual_seq_kvlen is one length a sequence; of TND, actual_seq_qlen is prefix sums."""
        dims, ragged = self.dims, "T" in self.dims
        q, kv = (self._lengths(name, values) for name in LENGTHS)
        if kv is not None:
            self._between("actual_seq_kvlen", kv, dims["Blocks"] * dims["BlockSize"])
        if q is not None and ragged:
            counts = [b - a for a, b in zip([0, *q], q, strict=False)]
            if min(counts) < 0 or different(q[-1], dims["T"]):
                expected = f"prefix sums of the tokens of each sequence, ending at T = {dims['T']}"
                self.refuse("lengths.actual_seq_qlen", "actual_seq_qlen", expected, q)
            q = counts
        elif q is not None:
            self._between("actual_seq_qlen", q, dims["S"])
        elif type(dims.get("S")) is int:
            q = [dims["S"]] * (len(kv) if kv is not None else 1)
        most = table.INT8_TOKENS if self.int8 else self.allowed.tokens
        if q is not None and most is not None and max(q) > most:
            self.refuse("dims.s", "query", f"at most {most} tokens a sequence", max(q))
        if q is None or kv is None or self.full["sparse_mode"] not in (CAUSAL_AT_THE_END, TREE):
            return
        for new, there in zip(q, kv, strict=False):
            if there and new > there:  # nothing is computed of a sequence of no key
                expected = f"at least the {new} new tokens of the sequence"
                self.refuse("lengths.actual_seq_kvlen", "actual_seq_kvlen", expected, there)

    def _lengths(self, name: str, values: bool) -> list[int] | None:
        """Lengths that are known: host integers, or a tensor whose values are asked about."""
        given, ragged, sequences = self.full[name], "T" in self.dims, self.dims["B"]
        if given is None:
            if ragged or name == "actual_seq_kvlen":
                self.refuse(f"required.{name}", name, f"lengths in {self.layout}", "nothing")
            return None
        count = given.numel() if isinstance(given, torch.Tensor) else len(given)
        if different(count, sequences) and (ragged or different(count, 1)):
            expected = f"{sequences} lengths, one a row of block_table"
            self.refuse(f"lengths.{name}", name, expected, count)
        if not isinstance(given, torch.Tensor):
            return None if any(type(length) is not int for length in given) else list(given)
        if not values:
            return None
        return [int(length) for length in self.readable(name).tolist()]

    def _between(self, name: str, lengths: Sequence[int], most: Any) -> None:
        for length in lengths:
            if length < 0 or (type(most) is int and length > most):
                self.refuse(f"lengths.{name}", name, f"lengths from 0 to {most}", length)
