"""The contract of ``npu_fused_infer_attention_score_v2`` in its form for absorbed MLA over paged
latents: tables, and the checks of a call.

Axes: B sequences of S tokens, or T tokens of all sequences; N heads, D the latent (512), R the
rotated part (64). Read from the documents of torch_npu 2.13 and of op-plugin 2026-08, and from
the tiling checks of ops-transformer, fused_infer_attention_score (float16, bfloat16) and
incre_flash_attention (int8), at 2025-11 (before 8.5), 8.5.0, 9.0.0 and 9.1.0. They describe A2 and
A3; A5 has another page.

These checks refuse two calls that the vendor's checks take, because users report wrong results
without an error: a mask of sparse_mode 0 (``mask.ignored``), and TND without a mask
(``mask.absent``). sparse_mode 3 does the same without this defect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from mla_fusion.meta.binder import Binder, Result
from mla_fusion.meta.errors import ContractError
from mla_fusion.meta.layout import different, known
from mla_fusion.meta.limits import newest, sizes_of
from mla_fusion.meta.prolog import Operator

HOST = "fused_infer_attention_score tiling"
LENGTHS = ("actual_seq_qlen", "actual_seq_kvlen")
SCALES = ("dequant_scale_query", "dequant_scale_key", "dequant_scale_value")

ATTENTION = Operator(
    """npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *,
    Tensor? query_rope=None, Tensor? key_rope=None, Tensor? pse_shift=None,
    Tensor? atten_mask=None, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None,
    Tensor? block_table=None, Tensor? dequant_scale_query=None, Tensor? dequant_scale_key=None,
    Tensor? dequant_offset_key=None, Tensor? dequant_scale_value=None,
    Tensor? dequant_offset_value=None, Tensor? dequant_scale_key_rope=None,
    Tensor? quant_scale_out=None, Tensor? quant_offset_out=None, Tensor? quant_scale_p=None,
    Tensor? learnable_sink=None, int num_query_heads=1, int num_key_value_heads=0,
    float softmax_scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647,
    str input_layout="BSH", int sparse_mode=0, int block_size=0, int query_quant_mode=0,
    int key_quant_mode=0, int value_quant_mode=0, int inner_precise=0,
    bool return_softmax_lse=False, int? query_dtype=None, int? key_dtype=None,
    int? value_dtype=None, int? query_rope_dtype=None, int? key_rope_dtype=None,
    int? key_shared_prefix_dtype=None, int? value_shared_prefix_dtype=None,
    int? dequant_scale_query_dtype=None, int? dequant_scale_key_dtype=None,
    int? dequant_scale_value_dtype=None, int? dequant_scale_key_rope_dtype=None,
    int? out_dtype=None) -> (Tensor, Tensor)""",
    "v2",
    results=("attention_out", "softmax_lse"),
    ge_type="FusedInferAttentionScore",
)
OP = ATTENTION.name
NOT_OF_MLA = """pse_shift dequant_offset_key dequant_offset_value dequant_scale_key_rope
    quant_scale_out quant_offset_out quant_scale_p learnable_sink""".split()

SOCS = ("A2", "A3")
# the axes of query, and behind "_" the axes of attention_out where they differ; H is N*D
LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_NBSD", "BSND_NBSD", "BSH_NBSD", "TND", "TND_NTD")
HEADS = sizes_of("1,2,4,8,16,32,64,128")
LATENT, ROPE = 512, 64
FLOATS = (torch.bfloat16, torch.float16)
MOST = {"B": 4096, "T": 1 << 20}  # of TND
MASK_WIDTH = 2048  # of sparse_mode 3 and 4, however long the sequences are
MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)
NO_MASK, CAUSAL_AT_THE_END, BAND, TREE = 0, 3, 4, 9  # sparse_mode
PER_TOKEN_AND_HEAD, PER_TENSOR = 3, 0  # query_quant_mode; key_quant_mode and value_quant_mode


class Release(NamedTuple):
    """What the operator takes from a CANN release on, until the next row.

    blocks, nz_blocks  rows of a block of an ND and of an NZ cache, as `sizes_of` reads them
    tokens             most tokens of a sequence; None: any number
    tied               whether the layout and the number of tokens decide sparse_mode and the form
                       of the caches; return_softmax_lse is not taken then
    """

    blocks: str
    nz_blocks: str
    sparse_modes: tuple[int, ...]
    tokens: int | None = 16
    tied: bool = False


_TO_1024 = "16..1024/16"
_MASKS = (NO_MASK, CAUSAL_AT_THE_END, BAND)
SINCE = {
    "8.3": Release("16,128", "128", _MASKS, tied=True),
    "8.5": Release(_TO_1024, _TO_1024, _MASKS),
    "9.1": Release(_TO_1024, _TO_1024, (*_MASKS, TREE)),
    "latest": Release(_TO_1024, _TO_1024, (*_MASKS, TREE), tokens=None),
}
# the form of int8 is narrower, in every release
INT8_BLOCKS = "128"
INT8_TOKENS = 16
INT8_LAYOUTS = tuple(name for name in LAYOUTS if not name.startswith("BNSD"))


def axes_of(layout: str) -> tuple[str, str]:
    """Returns the axes of query and of attention_out, a letter each: ("BSND", "NBSD") for
    BSND_NBSD.
    """
    query, _, out = layout.partition("_")
    return query, out or query


def padded_heads(heads: int) -> int:
    """Returns the least number of heads, no fewer than ``heads``, that the operator takes: 16 for
    12.

    Raises ContractError ``dims.n`` past 128.
    """
    enough = [count for count in HEADS.listed if count >= heads >= 1]
    if not enough:
        raise ContractError("dims.n", "num_query_heads", "1 to 128", str(heads), source=HOST, op=OP)
    return min(enough)


CACHES = ("key", "value", "key_rope")
_CAUSAL = f"sparse_mode {CAUSAL_AT_THE_END} with its mask [{MASK_WIDTH}, {MASK_WIDTH}]"


class Attention(Binder):
    """A call. Lengths are host integers, or tensors in GE graphs.

    floats  the dtypes of a query that is not int8
    """

    def __init__(self, full: Mapping[str, Any], floats: Sequence[torch.dtype] = FLOATS) -> None:
        super().__init__(ATTENTION, HOST, full)
        self.floats = floats
        self.layout = full["input_layout"]
        self.axes, self.out_axes = axes_of(self.layout)  # of query, of attention_out
        self.kind = full["query"].dtype
        self.int8 = self.kind == torch.int8
        self.rope_kind = torch.bfloat16 if self.int8 else self.kind

    def check(self, soc: str, cann: str, values: bool) -> None:
        """Refuses a call that the operator does not take.

        values  True to read lengths that are tensors
        """
        if soc not in SOCS:
            self.refuse("soc", "soc", "A2 or A3: the form of A5 is not described here", soc)
        self.allowed = newest(SINCE, cann)
        if self.allowed is None:
            self.refuse("cann", "cann", "8.3 or newer, which has the operator", cann)
        self.check_modes()
        self.check_tensors()
        self.check_sizes()
        self.check_mask()
        self.check_lengths(values)
        self.one_device()
        self.caches(CACHES, "a contiguous tensor")  # no compiler changes the layout of caches
        self.contiguous_but(CACHES)

    def results(self) -> list[Result]:
        """Returns attention_out, and softmax_lse, which is [0] without ``return_softmax_lse``."""
        full = self.full
        self.pick("input_layout", LAYOUTS)
        self.presence("query_rope", True, "for MLA over pages")
        self.rank("query", len(self.axes))
        heads, width = full["num_query_heads"], self.width_of("value")
        query_sizes = dict(zip(self.axes, full["query"].shape, strict=True))
        sizes = {"N": heads, **query_sizes, "D": width, "H": heads * width}
        lse_axes = "TN" if "T" in self.axes else "BNS"
        lse = (*(sizes[axis] for axis in lse_axes), 1) if full["return_softmax_lse"] else (0,)
        out = tuple(sizes[axis] for axis in self.out_axes)
        return [(out, full["query_rope"].dtype), (lse, torch.float32)]

    def width_of(self, name: str) -> Any:
        """Returns the number of elements in a row of a cache, ND or NZ."""
        forms = ": [.., BlockSize, W], [.., 1, BlockSize, W] or [.., 1, W/C0, BlockSize, C0]"
        self.rank(name, 3, 4, 5, where=forms)
        shape = self.full[name].shape
        return shape[2] * shape[4] if len(shape) == 5 else shape[-1]

    def check_modes(self) -> None:
        for name in ("query_rope", "key_rope", "block_table"):
            self.presence(name, True, "for MLA over pages")
        for name in NOT_OF_MLA:
            self.presence(name, False, "with query_rope")
        self.pick("input_layout", LAYOUTS)
        if self.int8:
            self.pick("input_layout", INT8_LAYOUTS, " with an int8 query")
        if self.allowed.tied:
            self.pick("return_softmax_lse", (False,), " before CANN 8.5")
        self.pick("sparse_mode", self.allowed.sparse_modes)

    def check_tensors(self) -> None:
        self.dtype("query", *self.floats, torch.int8)
        # N, D and R occur in products with each other, so these are bound first
        full, dims = self.full, self.dims
        self.bind("N", full["num_query_heads"], "num_query_heads")
        self.within("N", HEADS, ": pad to the next of these")
        for axis, size, name in (("D", LATENT, "key"), ("R", ROPE, "key_rope")):
            self.bind(axis, self.width_of(name), name)
            self.within(axis, f"{size}", ", with W_uk multiplied into the query")
        axes = " ".join(self.axes)
        self.tensor("query", axes.replace("H", "N*D"), self.kind)
        self.tensor("query_rope", axes.replace("D", "R").replace("H", "N*R"), self.rope_kind)
        for name in CACHES:
            axis, kind = ("R", self.rope_kind) if name == "key_rope" else ("D", self.kind)
            rank, c0 = full[name].dim(), 32 // kind.itemsize
            shape = "BlockNum 1 BlockSize" if rank == 4 else "BlockNum BlockSize"
            nz = f"BlockNum 1 {dims[axis] // c0} BlockSize {c0}"
            self.tensor(name, nz if rank == 5 else f"{shape} {axis}", kind)
        rank = full["key"].dim()
        self.rank("key_rope", rank, where=", as key")
        has_form = {3: True, 4: self.axes in ("BNSD", "TND"), 5: self.axes != "BNSD"}
        if self.allowed.tied and not has_form[rank]:
            expected = f"[BlockNum, BlockSize, D] with {self.layout} before CANN 8.5"
            self.refuse("rank.key", "key", expected, list(full["key"].shape))
        self.tensor("block_table", "B Blocks", torch.int32)
        query = f"with a query of {self.kind}"
        scale_axes = " ".join(self.axes.replace("H", "N").replace("D", ""))
        for name, shape in zip(SCALES, (scale_axes, "1", "1"), strict=True):
            self.presence(name, self.int8, query)
            if self.int8:
                self.tensor(name, shape, torch.float32)
        self.pick("query_quant_mode", (PER_TOKEN_AND_HEAD if self.int8 else 0,), f" {query}")
        for name in ("key_quant_mode", "value_quant_mode"):
            self.pick(name, (PER_TENSOR,))

    def check_sizes(self) -> None:
        dims = self.dims
        # 0: the number of query's heads
        self.pick("num_key_value_heads", (0, 1) if known(dims["N"] == 1) else (1,))
        for axis in dims:
            most = MOST.get(axis, "") if "T" in dims else ""
            self.within(axis, f"1..{most}", f" in {self.layout}")
        nz = self.full["key"].dim() == 5
        blocks = self.allowed.nz_blocks if nz else self.allowed.blocks
        cache = f" in {'an NZ' if nz else 'a'} cache of {self.kind}"
        self.within("BlockSize", INT8_BLOCKS if self.int8 else blocks, cache)
        if different(self.full["block_size"], dims["BlockSize"]):
            expected = f"{dims['BlockSize']}, the rows of a block of key"
            self.refuse("block_size", "block_size", expected, self.full["block_size"])

    def check_mask(self) -> None:
        dims, mode, mask = self.dims, self.full["sparse_mode"], self.full["atten_mask"]
        ragged = "T" in dims
        if mode == NO_MASK and mask is not None:
            expected = f"nothing (in sparse_mode 0 ignored past position 512); {_CAUSAL}"
            self.refuse("mask.ignored", "atten_mask", expected, f"a tensor {list(mask.shape)}")
        if mode == NO_MASK and ragged:
            expected = f"a mask in {self.layout}: without one the result can be a uniform average; "
            self.refuse("mask.absent", "atten_mask", expected + _CAUSAL, "nothing")
        if self.int8 or self.allowed.tied:
            is_single = known(dims.get("S") == 1)
            modes = {NO_MASK} if is_single else {CAUSAL_AT_THE_END, TREE}
            if not (self.int8 or ragged):
                modes.add(BAND)
            allowed = sorted(modes.intersection(self.allowed.sparse_modes))
            self.pick("sparse_mode", allowed, f" in {self.layout}" + " of one token" * is_single)
        if mode == NO_MASK:
            return
        self.presence("atten_mask", True, f"with sparse_mode {mode}")
        leading = 0 if self.int8 else min(max(mask.dim() - 2, 0), 2)
        shape = "1 " * leading + f"{MASK_WIDTH} {MASK_WIDTH}"
        if mode == TREE:  # TND has the squares of all sequences behind each other
            shape = "squares" if ragged else "B S S"
        self.tensor("atten_mask", shape, *MASK_DTYPES)

    def check_lengths(self, values: bool) -> None:
        """Checks actual_seq_kvlen, a length for each sequence, and actual_seq_qlen, in TND prefix
        sums.
        """
        dims = self.dims
        q, kv = (self._read_lengths(name, values) for name in LENGTHS)
        self._check_between("actual_seq_kvlen", kv, dims["Blocks"] * dims["BlockSize"])
        if "S" in dims:
            self._check_between("actual_seq_qlen", q, dims["S"])
            if not q and type(dims["S"]) is int:
                q = [dims["S"]] * max(len(kv), 1)
        elif q:
            ends, q = q, [b - a for a, b in zip([0, *q], q, strict=False)]
            if min(q) < 0 or different(ends[-1], dims["T"]):
                expected = f"prefix sums of the tokens of each sequence, ending at T = {dims['T']}"
                self.refuse("lengths.actual_seq_qlen", "actual_seq_qlen", expected, ends)
        most = INT8_TOKENS if self.int8 else self.allowed.tokens
        if q and most is not None and max(q) > most:
            self.refuse("dims.s", "query", f"at most {most} tokens a sequence", max(q))
        if self.full["sparse_mode"] not in (CAUSAL_AT_THE_END, TREE):
            return
        for new, keys in zip(q, kv, strict=False):
            if 0 < keys < new:  # the kernel computes nothing for a sequence without keys
                expected = f"at least the {new} new tokens of the sequence"
                self.refuse("lengths.actual_seq_kvlen", "actual_seq_kvlen", expected, keys)

    def _read_lengths(self, name: str, values: bool) -> list[int]:
        """Returns host integers, or the numbers of a tensor if ``values``; else an empty list."""
        lengths, ragged, sequences = self.full[name], "T" in self.dims, self.dims["B"]
        if lengths is None:
            if ragged or name == "actual_seq_kvlen":
                self.refuse(f"required.{name}", name, f"lengths in {self.layout}", "nothing")
            return []
        is_tensor = isinstance(lengths, torch.Tensor)
        count = lengths.numel() if is_tensor else len(lengths)
        if different(count, sequences) and (ragged or different(count, 1)):
            expected = f"{sequences} lengths, one a row of block_table"
            self.refuse(f"lengths.{name}", name, expected, count)
        if is_tensor:
            lengths = self.readable(name).tolist() if values else []
        return list(lengths) if all(type(length) is int for length in lengths) else []

    def _check_between(self, name: str, lengths: Sequence[int], most: Any) -> None:
        for length in lengths:
            if length < 0 or known(length > most):
                self.refuse(f"lengths.{name}", name, f"lengths from 0 to {most}", length)
