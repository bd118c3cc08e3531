"""Write docs/operator.md and docs/other-operators.md from the specification in `mla_fusion.meta`.

python docs/generate_operator.py           # write the pages
python docs/generate_operator.py --check   # exit 1 when they are not what the specification says
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from mla_fusion.meta import (
    attention,
    key_operator,
    preprocess,
    spec,
)
from mla_fusion.meta.limits import RELEASES, SOCS, Limits, sizes_of
from mla_fusion.meta.prolog import PROLOGS
from mla_fusion.meta.tiling_key import CACHE_NUMBERS, LAYOUTS, QUANT_NUMBERS
from written import write

from mla_fusion import meta
from mla_fusion.tools.selftest.samples import sample_call

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.meta.stricter import STRICTER, Scope

PAGE, OTHERS = (Path(__file__).with_name(f"{name}.md") for name in ("operator", "other-operators"))
V3 = "npu_mla_prolog_v3"
OPERATORS = ("npu_mla_prolog", "npu_mla_prolog_v2", V3)
AXES = ("He", "Hcq", "Hckv", "D", "Dr", "N", "Nkv", "B", "S", "T", "tokens", "BlockSize")
RESULTS = PROLOGS[V3].results
CALL_DIMS = dict(He=1024, Hcq=1536, N=8, D=128, Dr=64, Hckv=512, BlockNum=2, BlockSize=16, Nkv=1)

INTRODUCTION = """\
# The operator contract

`npu_mla_prolog_v3` in every scenario, and its older versions;
[operators beside it](other-operators.md) have their own page, and so has
[what the official pages say otherwise](contradictions.md). Generated from `mla_fusion.meta.spec`,
`limits` and `tiling_key` by `docs/generate_operator.py`; do not edit.

T tokens (`B*S`), He hidden size, Hcq query rank, Hckv KV rank, N heads, D nope head dim, Dr rope
head dim. *lead* is `T` or `B, S`, as token_x has it; *tokens* is T or `B*S`.
`mla_fusion.meta.check` applies these tables to a call, `mla_fusion.meta.infer` gives its results,
`mla_fusion.meta.explain_call` explains it.
"""

LAYOUT = """\
All tensors lie on one device and are contiguous. The caches of v3 may have a strided first axis in
the newest operator; before it, and in v1 and v2, rows that are written to a cache that is not
contiguous do not arrive in it.
"""

PATHS = """\
## The two paths

A call reaches the device by hand through torch_npu (`path="eager"`), which allocates the results
and calls aclnn, or in a graph (`path="graph"`), where GE infers their shapes first. Both end in the
operator's tiling; the inference takes less, so what a graph takes, a call by hand takes too.
`check` asks for `"eager"` by default, since it is made for calls by hand; the pass asks for
`"graph"`, which is what it lowers to, and `infer` says what a graph's inference says unless asked
for `"eager"`. What depends on the path or the release, beyond sizes and modes, is this:
"""

VERDICTS = """\
## Where check is stricter than the vendor

The vendor's own inference, tiling checks and tiling, of CANN 8.3 (the state of 2025-11), 8.5, 9.0,
9.1 and of 2026-08 ("latest"), were run on 1,800 random calls; `tests/meta/test_vendor_verdicts.py`
replays what they said. `check` agrees on both paths, `infer` with the shapes and dtypes, and
`explain_call` with the tiling keys, but for these classes of calls, which the vendor's check takes
and `check` refuses on purpose. It takes none of those that the vendor refused.
"""

KEYS = """\
## Tiling keys

`explain_call(..., cann=..).tiling_key` is the key that the tiling of that release returns, by
fields. EMPTY_TENSOR_MODE is 1 where the caches are empty and 2 where there are no tokens; SCENARIO
is 1 without quantisation and 2 with it; ENABLE_DEQUANT_OPTIONAL is 1 where dequantisation runs
beside the products, ACTUAL_SEQ_LEN_MODE where actual_seq_len is read, SPLIT_M_MODE where the work
is split by tokens rather than columns. Bits, from 0 on:
"""

KEY_INTRODUCTION = f"""\
## npu_kv_rmsnorm_rope_cache

Also `_v2`, which says that it writes its caches, and `_v2_functional`: RMSNorm of the first C
columns of kv, RoPE of the other R (pairs in, halves out), both cast once and written; A2, A3, and
A5 from CANN {key_operator.SINCE["A5"]} on. C is 512 and R 64 but on A5. kv [B, 1, S, C+R], gamma
[C], cos and sin [B, 1, S or 1, R], all bfloat16 or all float16; index int64. Caches have kv's
dtype; an int8 one needs its scale, float32 [width] or [1, width], which multiplies. BlockSize is a
multiple of 16, with an int8 cache of 32; the newest operator asks for B*ceil(S/BlockSize) blocks.
Negative slots skip their token. `is_output_kv` gives the new rows too, in the paged modes. The form
with a separate `v` is another network's.
"""

ATB_INTRODUCTION = f"""\
## npu_mla_preprocess (ATB)

`torch_npu.atb.npu_mla_preprocess`, A2 and A3: input RMSNorm with bias, one down-projection with the
columns `[C | R | Q]`, RoPE that rotates halves, epsilon fixed at 1e-6. Weights of the activation
dtype switch both RmsNormQuants off (no input norm, no beta1); they, and H other than
{preprocess.ATB_HIDDEN}, need `{preprocess.STATIC}`. T tokens (1..{preprocess.MAX_TOKENS}), C = 512,
R = 64, Q = 1536, D = 128. slotmapping is int32 [T]; -1 skips a token. `quant_mode` is one of
{", ".join(f"`{name}`" for name in preprocess.QUANT_MODES)}; the first requires quant_scale,
quant_offset and bias of both stages. `int8_nzcache` requires ctkv_scale [1], which divides, and
q_nope_scale [N], which multiplies.
"""

ATTENTION_INTRODUCTION = f"""\
## npu_fused_infer_attention_score_v2 (attention over paged latents)

The form with query_rope and key_rope, {" and ".join(attention.SOCS)}: scores are
`softmax_scale * (query . key + query_rope . key_rope)`. D is {attention.LATENT}, R
{attention.ROPE}; num_query_heads N is {attention.HEADS} (`padded_heads` gives the next of these),
num_key_value_heads 1. All tensors are bfloat16, or all float16. int8 query, key and value need
bfloat16 ropes, query_quant_mode {attention.PER_TOKEN_AND_HEAD}, float32 dequant_scale_query
(query's shape without D), dequant_scale_key and dequant_scale_value [1]: with weight_quant_mode 2
and kv_cache_quant_mode 1 of the prologue its dequant_scale_q_nope and 1 / quant_scale_ckv.

key, value and key_rope are caches: [BlockNum, BlockSize, width], [BlockNum, 1, BlockSize, width] or
NZ [BlockNum, 1, width/C0, BlockSize, C0], C0 = 32 bytes, contiguous; block_table is int32 [B,
blocks]. actual_seq_kvlen has B lengths. In TND, where B is at most {attention.MOST["B"]},
actual_seq_qlen has prefix sums that end at T. sparse_mode 0 has no mask; 3 (causal, ending where
the sequence ends) and 4 have [{attention.MASK_WIDTH}, {attention.MASK_WIDTH}]; 9 (a tree of drafted
tokens) has [B, S, S], or in TND all squares [sum S*S]. Other optional tensors are refused.

Users report wrong results without an error for two calls that the vendor's checks take, so `check`
refuses them: `mask.ignored`, a mask with sparse_mode 0, of which positions past 512 are not read;
and `mask.absent`, TND without a mask, which can give the plain average of all rows.
"""


OTHERS_INTRODUCTION = """\
# Operators beside the prologue

The key's half, ATB's prologue, attention over paged latents, and where the official pages are
wrong. [The prologue's own contract](operator.md). Generated from `mla_fusion.meta` by
`docs/generate_operator.py`; do not edit.
"""


@functools.cache
def page() -> str:
    """The prologue's page as Markdown."""
    sections = (
        INTRODUCTION,
        "## Scenarios\n",
        "`weight_quant_mode` / `kv_cache_quant_mode`. Scales that a row does not name are "
        "forbidden. In hifloat8 (wq 5), whose elements torch has as uint8, `token_x_dtype`, "
        "`weight_dq_dtype`, `weight_uq_qr_dtype`, `weight_dkv_kr_dtype` and, if the cache is "
        "quantised, `kv_cache_dtype` are 290.\n",
        table(
            ("wq/kv", "weights", "cache", "required", "optional", "modes that follow", "from"),
            scenarios(),
        ),
        "## Tensors\n",
        table(("tensor", "shape", *(f"wq {wq}" for wq in spec.WEIGHT_MODES)), tensors()),
        "FRACTAL_NZ weights may also be given as 4-D storage `[n/C0, k/16, 16, C0]`, C0 = 32 "
        "bytes.\n",
        LAYOUT,
        table(("scale", "shape", "dtype", "in"), scales()),
        "## Results\n",
        "Shapes and dtypes with `query_norm_flag=True`, by `wq/kv`; the functional form adds both "
        "caches.\n",
        table(("wq/kv", *RESULTS), results()),
        "Without `query_norm_flag` query_norm and dequant_scale_q_norm are absent: `[0]`, or "
        "`[1]` before CANN 8.5.\n"
        "Before 8.5 a graph's inference gives `[1]` for both whatever the flag says, and nothing "
        "fills them.\n",
        "## Cache modes\n",
        table(
            ("mode", "kv_cache", "cache_index, 2-D / 3-D token_x", "actual_seq_len", "kv modes"),
            cache_modes(),
        ),
        "## Sizes, cache modes and scenarios by release\n",
        *(text for op in OPERATORS for text in releases(op)),
        PATHS,
        table(("of v3", "SoC", "path", *RELEASES), traits()),
        VERDICTS,
        table(("class", "refused", "codes", "where", "why"), classes()),
        KEYS,
        table(("field", *key_releases()), key_fields()),
        "CACHE_MODE and QUANT_MODE (`wq/kv`) are these numbers; SCENARIO is 1 without "
        "quantisation and 2 with it.\n",
        table(
            ("number", "CACHE_MODE", *(f"QUANT_MODE, from {since}" for since in QUANT_NUMBERS)),
            key_numbers(),
        ),
    )
    return "\n".join(sections)


@functools.cache
def others() -> str:
    """The page of the operators beside it."""
    sections = (
        OTHERS_INTRODUCTION,
        KEY_INTRODUCTION,
        table(("cache_mode", "k_cache, ckv_cache", "index", "int8"), key_caches()),
        ATB_INTRODUCTION,
        table(("cache_mode", "kv_cache", "kv_cache_rope", "q_out0", "q_out1"), atb_caches()),
        ATTENTION_INTRODUCTION,
        table(("input_layout", "query", "attention_out", "int8"), attention_layouts()),
        table(
            ("from", "BlockSize", "of NZ", "sparse_mode", "tokens a sequence", "softmax_lse"),
            attention_releases(),
        ),
        f"With int8, BlockSize is {attention.INT8_BLOCKS}, a sequence has at most "
        f"{attention.INT8_TOKENS} tokens, and "
        "sparse_mode is 0 for one token a\nsequence (not in TND), else 3 or 9. Before 8.5 this "
        "holds of every dtype, "
        "where 4 is taken too (not in TND).\n",
    )
    return "\n".join(sections)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in cells] for cells in lines)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in escaped) + "\n"


def pairs() -> list[tuple[int, int]]:
    """Every (weight_quant_mode, kv_cache_quant_mode) that exists on some SoC."""
    return sorted({pair for soc in SOCS for pair in meta.limits(V3, soc, "latest").quant_modes})


def scenarios() -> Iterator[list[str]]:
    for wq, kv in pairs():
        weights, cache = spec.WEIGHT_MODES[wq], spec.CACHE_QUANTS[kv]
        required = {**weights.required, **cache.required}
        if wq not in spec.CLIP_WEIGHT_MODES:
            required.pop("k_nope_clip_alpha", None)
        follows = f"query_quant_mode {cache.query_quant_mode}, repo modes {cache.repo_mode}"
        yield [
            f"{wq}/{kv}",
            weights.title,
            cache.title,
            names(required),
            names(weights.optional),
            follows,
            "; ".join(
                f"{soc} {since(soc, (wq, kv))}" for soc in ("A3", "A5") if since(soc, (wq, kv))
            ),
        ]


def since(soc: str, pair: tuple[int, int]) -> str:
    """The first release in which a SoC takes a scenario, or ""."""
    return next((r for r in RELEASES if pair in meta.limits(V3, soc, r).quant_modes), "")


def names(shapes: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in shapes) or "-"


def axes(shape: str) -> str:
    said = {"lead": "*lead*", "*": "any", "Blocks": "ceil(S/BlockSize)"}
    return f"[{', '.join(said.get(word, word) for word in shape.split())}]"


def dtype_name(dtype: spec.Dtype, element: spec.Dtype) -> str:
    if dtype == spec.ELEMENT:
        dtype = element
    if dtype == spec.ACTIVATION:
        return "bfloat16"
    name = str(dtype).removeprefix("torch.")
    return "hif8 (uint8)" if name == "uint8" else name


def tensors() -> Iterator[list[str]]:
    for tensor in spec.INPUTS:
        cells = []
        for weights in spec.WEIGHT_MODES.values():
            role = weights.dtypes.get(str(tensor.dtype), tensor.dtype)
            cells.append(dtype_name(role, weights.element))
        yield [f"`{tensor.name}`", axes(tensor.shape) + (" NZ" if tensor.nz else ""), *cells]


def scales() -> Iterator[list[str]]:
    shapes: dict[tuple[str, str, str], list[str]] = {}
    for wq, weights in spec.WEIGHT_MODES.items():
        for name, shape in {**weights.required, **weights.optional}.items():
            dtype = (
                str(weights.scale_dtype).removeprefix("torch.")
                if name in weights.required
                else "float32"
            )
            shapes.setdefault((name, shape, dtype), []).append(f"wq {wq}")
    for kv, cache in spec.CACHE_QUANTS.items():
        for name, shape in cache.required.items():
            note = " with wq 1, 2" if name == "k_nope_clip_alpha" else ""
            shapes.setdefault((name, shape, "float32"), []).append(f"kv {kv}{note}")
    for (name, shape, dtype), where in shapes.items():
        yield [f"`{name}`", axes(shape), dtype, ", ".join(where)]


def results() -> Iterator[list[str]]:
    for wq, kv in pairs():
        call = sample_call(weight_quant_mode=wq, kv_cache_quant_mode=kv, dims=CALL_DIMS, lead=(3,))
        inferred = meta.infer(V3, **call | {"query_norm_flag": True})
        yield [
            f"{wq}/{kv}",
            *(f"{symbolic(shape)} {dtype_name(kind, kind)}" for shape, kind in inferred),
        ]


def symbolic(shape: Sequence[int]) -> str:
    """The sizes of the sample call back as axes; they are distinct."""
    known = {3: "T", 8: "N", 512: "Hckv", 64: "Dr", 1536: "Hcq", 48: "Hcq/32"}
    return "[" + ", ".join(known.get(size, str(size)) for size in shape) + "]"


def cache_modes() -> Iterator[list[str]]:
    for name, mode in spec.CACHE_MODES.items():
        index = [mode.index.get(rank, "refused") for rank in (2, 3)]
        shown = " / ".join(
            "absent" if i is None else i if i == "refused" else axes(i) for i in index
        )
        kinds = [str(kv) for kv, cache in spec.CACHE_QUANTS.items() if name in cache.cache_modes]
        lengths = "[B] int32 with a 2-D token_x" if mode.actual_seq_len else "absent"
        yield [f"`{name}`", axes(f"{mode.cache} row"), shown, lengths, ", ".join(kinds)]


def releases(op: str) -> Iterator[str]:
    yield f"### {op}\n"
    for soc, title in (("A3", "A2, A3"), ("A5", "A5")):
        columns = [meta.limits(op, soc, release) for release in RELEASES]
        if not any(column.quant_modes for column in columns):
            yield f"{title}: not taken. {columns[-1].absent}.\n"
            continue
        rows = [
            [axis, *(str(c.dims[axis]) if c.quant_modes else "-" for c in columns)] for axis in AXES
        ]
        rows.append(["cache modes", *(", ".join(c.cache_modes) or "-" for c in columns)])
        quant = (" ".join(f"{w}/{k}" for w, k in sorted(c.quant_modes)) or "-" for c in columns)
        rows.append(["wq/kv", *quant])
        yield table((title, *RELEASES), (merged(row) for row in rows))
        for release, column in zip(RELEASES, columns, strict=True):
            if column.absent and column.cache_modes:
                why = column.absent[0].upper() + column.absent[1:]
                yield f"{title}, CANN {release}: no scenario passes. {why}.\n"


TRAITS = {
    "4-D weight_dq": lambda c: c.weight_dq_4d or "never",
    "quant_scale_ckv with kv 1": lambda c: axes(c.kv_scale),
    "modes": lambda c: "read" if c.reads_modes else "ignored: dtypes decide",
    "query_norm": lambda c: "with the flag" if c.gives_query_norm else "never",
    "empty kr_cache of kv 3": lambda c: (
        ", ".join(f"{rank}-D" for rank in sorted(c.empty_kr_ranks)) or "any rank"
    ),
    "int8 for it": lambda c: ", ".join(f"wq {wq}" for wq in sorted(c.empty_kr_int8)) or "never",
    "cache_index of block lists": lambda c: (
        ", ".join(f"{rank}-D" for rank in sorted(c.block_index_ranks)) or "any rank"
    ),
    "caches strided in the first axis": lambda c: "taken" if c.strided_caches else "refused",
    "strides of axes of size 1": lambda c: "as of any axis" if c.compares_strides else "any",
}


def traits() -> Iterator[list[str]]:
    """A row for each trait, SoC and path; those that are alike on both paths or on all SoCs are one
    row.
    """
    for name, show in TRAITS.items():
        cells = {
            (soc, path): tuple(
                _trait(meta.limits(V3, soc, release, path), show) for release in RELEASES
            )
            for soc in ("A3", "A5")
            for path in ("eager", "graph")
        }
        for soc, title in (("A3", "A2, A3"), ("A5", "A5")):
            both = cells[soc, "eager"] == cells[soc, "graph"]
            for path in ("eager",) if both else ("eager", "graph"):
                yield [name, title, "both" if both else path, *merged(["", *cells[soc, path]])[1:]]


def _trait(column: Limits, show: Callable[[Limits], str]) -> str:
    return show(column) if column.quant_modes else "-"


def classes() -> Iterator[list[str]]:
    for row in STRICTER:
        codes = ", ".join(f"`{code}*`" if code.endswith(".") else f"`{code}`" for code in row.codes)
        yield [row.name, row.refused, codes, "; ".join(map(scope, row.scopes)), row.reason]


def scope(where: Scope) -> str:
    """As "v3 on A5 before 8.5"."""
    text = ", ".join(where.versions)
    text += "" if where.socs == SOCS else " on " + ", ".join(where.socs)
    text += "" if where.since == RELEASES[0] else f" from {where.since} on"
    return text + ("" if where.until is None else f" before {where.until}")


def key_releases() -> list[str]:
    """As "8.2, 8.3", for each layout."""
    starts = [RELEASES.index(since) for since in LAYOUTS]
    ends = [*starts[1:], len(RELEASES)]
    return [", ".join(RELEASES[start:end]) for start, end in zip(starts, ends, strict=True)]


def key_fields() -> Iterator[list[str]]:
    places = {name: ["-"] * len(LAYOUTS) for name in LAYOUTS["latest"]}
    for column, layout in enumerate(LAYOUTS.values()):
        low = 0
        for name, width in layout.items():
            places[name][column] = str(low) if width == 1 else f"{low}-{low + width - 1}"
            low += width
    for name, cells in places.items():
        yield [name, *cells]


def key_numbers() -> Iterator[list[str]]:
    for number in range(1 + max(max(table.values()) for table in QUANT_NUMBERS.values())):
        caches = ", ".join(name for name, value in CACHE_NUMBERS.items() if value == number) or "-"
        pairs_of = (
            ", ".join(f"{wq}/{kv}" for (wq, kv), value in table.items() if value == number) or "-"
            for table in QUANT_NUMBERS.values()
        )
        yield [str(number), caches, *pairs_of]


def merged(row: list[str]) -> list[str]:
    """A cell equal to the one before it becomes an arrow: the eye goes to what changed."""
    return [
        row[0],
        *("=" if i > 1 and row[i] == row[i - 1] else row[i] for i in range(1, len(row))),
    ]


def key_caches() -> Iterator[list[str]]:
    for name in key_operator.MODES:
        paged = name != "Norm"
        cache = "[BlockNum, BlockSize, 1, width]" + (
            " in the NZ layout" if name.endswith("NZ") else ""
        )
        index = "[B*ceil(S/BlockSize)], blocks" if name in key_operator.BLOCKS else "[B*S], slots"
        row = [cache, index, "yes"] if paged else ["[B, 1, Scache, width]", "[B, S], rows", "on A5"]
        yield [f"`{name}`", *row]


def atb_caches() -> Iterator[list[str]]:
    for number, (name, form) in enumerate(preprocess.CACHE_FORMS.items()):
        int8 = " int8" if form.int8 else ""
        rope = "unused" if form.kr is None else axes(form.kr)
        q_rope = "absent" if form.kr is None else "[T, N, R]"
        yield [
            f"`{name}` ({number})",
            axes(form.kv) + int8,
            rope,
            axes("T N C" if form.kr else "T N C+R") + int8,
            q_rope,
        ]


def attention_layouts() -> Iterator[list[str]]:
    for name in attention.LAYOUTS:
        query, out = (
            f"[{', '.join(letters)}]".replace("H", "N*D") for letters in attention.axes_of(name)
        )
        yield [f"`{name}`", query, out, "yes" if name in attention.INT8_LAYOUTS else "-"]


def attention_releases() -> Iterator[list[str]]:
    for since, row in attention.SINCE.items():
        modes, most = (
            ", ".join(map(str, row.sparse_modes)),
            "any number" if row.tokens is None else f"1..{row.tokens}",
        )
        yield [
            since,
            str(sizes_of(row.blocks)),
            str(sizes_of(row.nz_blocks)),
            modes,
            most,
            "-" if row.tied else "yes",
        ]


def main(arguments: Sequence[str]) -> int:
    return write({PAGE: page(), OTHERS: others()}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
