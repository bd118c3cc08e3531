"""One call of the attention operator against the tables of `attention.py`.

Two calls are refused although the vendor's checks take them, because users report wrong results
without an error: a mask of sparse_mode 0 (``mask.ignored``), and TND without a mask
(``mask.absent``). sparse_mode 3 says the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from mla_fusion.meta import attention as table
from mla_fusion.meta.attention import BAND, CAUSAL_AT_THE_END, HOST, LENGTHS, NO_MASK, OP, TREE
from mla_fusion.meta.binder import Binder
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.layout import contiguous, elsewhere, kind_of, not_strided, writable
from mla_fusion.meta.symbolic import different
from mla_fusion.meta.values import holds_data

_CAUSAL = f"sparse_mode {CAUSAL_AT_THE_END} with its mask [{table.MASK_WIDTH}, {table.MASK_WIDTH}]"


def check_attention(
    soc: str,
    cann: str,
    values: bool,
    full: Mapping[str, Any],
    floats: Sequence[torch.dtype] = table.FLOATS,
) -> None:
    """`mla_fusion.meta.check` of this operator; ``full``: every argument by name.

    Lengths are host integers, or tensors in GE graphs, where ``values`` says whether they are read.
    ``floats``: the dtypes of a query that is not int8.
    """
    if soc not in table.SOCS:
        expected = "A2 or A3: the form of A5 is not described here"
        raise ContractError("soc", "soc", expected, soc, source=HOST, op=OP)
    call = _Call(full, table.release(cann))
    call.check_modes()
    call.check_dims(floats)
    call.check_tensors()
    call.check_quantisation()
    call.check_sizes()
    call.check_mask()
    call.check_lengths(values)
    call.check_memory()


class _Call(Binder):
    """One call; every rule that fails raises ContractError."""

    def __init__(self, full: Mapping[str, Any], allowed: table.Release) -> None:
        super().__init__(OP, HOST, full)
        self.allowed = allowed
        self.layout = str(full["input_layout"])
        self.int8 = bool(full["query"].dtype == torch.int8)

    @property
    def axes(self) -> str:
        """Of query."""
        return table.axes_of(self.layout)[0]

    def pick(self, name: str, allowed: Iterable[Any], why: str = "") -> None:
        """An attribute that has one of these values."""
        allowed = tuple(allowed)
        if self.full[name] not in allowed:
            expected = f"one of {', '.join(map(str, allowed))}{why}"
            self.refuse(name, name, expected, repr(self.full[name]))

    def check_modes(self) -> None:
        for name in table.TENSORS:
            value = self.full[name]
            if value is not None and not_strided(value):
                self.refuse(f"type.{name}", name, "a strided tensor", kind_of(value))
        for name in ("query_rope", "key_rope", "block_table"):
            if self.full[name] is None:
                self.refuse(f"required.{name}", name, "a tensor: MLA over pages", "nothing")
        for name in table.NOT_OF_MLA:
            if self.full[name] is not None:
                self.refuse(f"forbidden.{name}", name, "nothing with query_rope", "a tensor")
        self.pick("input_layout", table.LAYOUTS)
        if self.int8:
            self.pick("input_layout", table.INT8_LAYOUTS, " with an int8 query")
        if not self.allowed.lse:
            self.pick("return_softmax_lse", (False,), " before CANN 8.5")
        self.pick("sparse_mode", self.allowed.sparse_modes)

    def check_dims(self, floats: Sequence[torch.dtype]) -> None:
        """The axes that are no tensor's own: N, D, R and their products."""
        kind, heads = self.full["query"].dtype, self.full["num_query_heads"]
        if not self.int8 and kind not in floats:
            expected = f"{', '.join(map(str, floats))} or torch.int8"
            self.refuse("dtype.query", "query", expected, kind)
        self.dims["N"] = heads
        if type(heads) is int and heads not in table.HEADS:
            expected = f"N {table.HEADS.describe()}"
            expected += f": pad to {table.padded_heads(heads)}" if 0 < heads <= 128 else ""
            self.refuse("dims.n", "num_query_heads", expected, f"N {heads}")
        for axis, size, name in (("D", table.LATENT, "key"), ("R", table.ROPE, "key_rope")):
            found = self.dims[axis] = self._width(name)
            if different(found, size):
                expected = f"{axis} {size}, with W_uk multiplied into the query"
                self.refuse(f"dims.{axis.lower()}", name, expected, f"{axis} {found}")
        self.dims["H"], self.dims["N*R"] = heads * self.dims["D"], heads * self.dims["R"]

    def _width(self, name: str) -> Any:
        shape = self.full[name].shape
        if len(shape) not in (3, 4, 5):
            forms = "[BlockNum, BlockSize, W], [BlockNum, 1, BlockSize, W] or NZ "
            expected = f"{forms}[BlockNum, 1, W/C0, BlockSize, C0]"
            self.refuse(f"rank.{name}", name, expected, list(shape))
        return shape[2] * shape[4] if len(shape) == 5 else shape[-1]

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
            if self.int8:
                self.needed(name, shape, torch.float32, query)
            elif self.full[name] is not None:
                self.refuse(f"forbidden.{name}", name, f"nothing with {query}", "a tensor")
        of_query = table.PER_TOKEN_AND_HEAD if self.int8 else 0
        self.pick("query_quant_mode", (of_query,), f" with {query}")
        for name in ("key_quant_mode", "value_quant_mode"):
            self.pick(name, (table.PER_TENSOR,))

    def check_sizes(self) -> None:
        full, dims = self.full, self.dims
        one_head = type(dims["N"]) is int and dims["N"] == 1
        self.pick("num_key_value_heads", (0, 1) if one_head else (1,))  # 0: as many as of query
        for axis, size in dims.items():
            most = table.MOST.get(axis) if "T" in dims else None
            if type(size) is int and (size < 1 or (most is not None and size > most)):
                expected = f"{axis} from 1" + (f" to {most} in {self.layout}" if most else "")
                self.refuse(f"dims.{axis.lower()}", "query", expected, f"{axis} {size}")
        block, nz = dims["BlockSize"], full["key"].dim() == 5
        blocks = self.allowed.nz_blocks if nz else self.allowed.blocks
        blocks = table.INT8_BLOCKS if self.int8 else blocks
        if type(block) is int and block not in blocks:
            cache = f"{'an NZ' if nz else 'a'} cache of {full['key'].dtype}"
            expected = f"BlockSize {blocks.describe()} in {cache}"
            self.refuse("dims.blocksize", "key", expected, f"BlockSize {block}")
        if different(full["block_size"], block):
            expected = f"{block}, the rows of a block of key"
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
        if mask is None:
            self.refuse("required.atten_mask", "atten_mask", f"a mask of mode {mode}", "nothing")
        if mask.dtype not in table.MASK_DTYPES:
            expected = " or ".join(map(str, table.MASK_DTYPES))
            self.refuse("dtype.atten_mask", "atten_mask", expected, mask.dtype)
        leading = "1 " * (0 if self.int8 else min(max(mask.dim() - 2, 0), 2))
        shape = f"{leading}{table.MASK_WIDTH} {table.MASK_WIDTH}"
        if mode == TREE:  # of TND the squares of all sequences, one behind the other
            shape = "squares" if "T" in dims else "B S S"
        self.sizes("atten_mask", tuple(mask.shape), shape)

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
        if not holds_data(given):
            expected = "a tensor with data, to check its values"
            self.refuse("values.meta", name, expected, given.device)
        return [int(length) for length in given.tolist()]

    def _between(self, name: str, lengths: Sequence[int], most: Any) -> None:
        for length in lengths:
            if length < 0 or (type(most) is int and length > most):
                self.refuse(f"lengths.{name}", name, f"lengths from 0 to {most}", length)

    def check_memory(self) -> None:
        astray = elsewhere(self.full, table.TENSORS)
        if astray is not None:
            name, home, device = astray
            self.refuse(f"device.{name}", name, f"a tensor on {home}, as others are", device)
        for name in table.TENSORS:
            tensor = self.full[name]
            cache = name in ("key", "value", "key_rope")  # which no compiler lays out anew
            if tensor is None or (not cache and contiguous(tensor)):
                continue
            if not cache or not writable(tensor, first_axis_free=False, ones_free=True):
                expected, found = "a contiguous tensor", f"strides {list(tensor.stride())}"
                self.refuse(f"contiguous.{name}", name, expected, found)
