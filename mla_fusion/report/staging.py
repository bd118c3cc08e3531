"""Holds the obstacles of staged fusions with their remedies, and what a staged fusion leaves.

This is data. ``plan/caches.py`` finds the obstacles, ``observe/record.py`` fills the entries.
"""

from __future__ import annotations

from dataclasses import dataclass

REMEDIES: dict[str, str] = {
    # by code of an obstacle: what to write instead
    "rope.pairs": (
        'Store halves (rotate_half), or set Config(kr_layout="half") if everything that '
        "reads or writes this cache is changed with it."
    ),
    "cache.joined_row": (
        "Keep two caches: kv_cache.view(-1, Hckv)[slots] = c_kv; kr_cache.view(-1, "
        "Dr)[slots] = k_pe."
    ),
    "cache.rows_changed": (
        "Write the rows as the norm and the rotation leave them; for int8 rows, hold W_uq_qr in "
        "int8, too, and with one scale for all rows quantise the query (docs/limits.md)."
    ),
    "cache.not_written": (
        "Pass the caches to the compiled function and write the rows there: "
        "kv_cache.view(-1, Hckv)[slots] = c_kv; kr_cache.view(-1, Dr)[slots] = k_pe. Rows "
        "that go to no cache, or only behind a graph break, stay staged."
    ),
    "cache.writer": (
        "Write whole rows by index_put, index_copy, scatter, scatter_update_ or "
        "npu_scatter_nd_update_, or by slices whose bounds are numbers: "
        "cache.view(-1, width)[slots] = rows."
    ),
    "cache.not_functional": (
        "Functionalise first: AOT autograd, or ExportedProgram.run_decompositions()."
    ),
    "cache.no_input": (
        "Pass the cache to the compiled function as an argument of its own, and write to a "
        "view of it."
    ),
    "cache.shape": (
        "Give the cache the shape [BlockNum, BlockSize, 1, width], or another contiguous "
        "shape with a multiple of 16 rows. With dynamic=True, say so in the model, "
        "torch._check(cache.shape[1] % 16 == 0), of the size that counts rows, for both caches; or "
        "mark it static: torch._dynamo.mark_static(cache, 1)."
    ),
    "cache.rows": "Write both caches in one cache_mode.",
    "cache.boundary": (
        "Compile through mf.backend(), or give the cache the shape [BlockNum, BlockSize, 1, width]."
    ),
    "cache.strides": (
        "Use a contiguous cache; if torch calls it contiguous, cache.view(-1).view(cache.shape)."
    ),
    "cache.width": (
        "Make kv_cache exactly Hckv columns wide, and kr_cache Dr columns. Of a width that "
        "dynamic=True made a symbol, say so: torch._check(kv_cache.shape[-1] == 512)."
    ),
    "cache.dtype": "Give the cache the dtype of the rows.",
    "cache.old_rows_read": "Read the cache only after the write.",
    "cache.rows_read": "Write the rows once, to one cache.",
    "cache.row_order": "Write the rows in the order of the tokens, and the columns as they are.",
    "cache.blocks_differ": (
        "Give both caches the same BlockNum and BlockSize. Of symbolic sizes of an exported "
        "program, say that they are equal: torch._check(kv_cache.shape[0] == kr_cache.shape[0]), "
        "and so for shape[1]."
    ),
    "cache.slots_differ": "Write both caches by one tensor of slots.",
    "cache.slots_count": (
        "Give one slot for each token. Of sizes that mark_dynamic, or a second shape, made "
        "symbols, say that they are equal: torch._check(slots.shape[0] == x.shape[0])."
    ),
    "cache.refused": "Give the caches what the message allows: these sizes, or this dtype.",
    "slots.unproven": (
        "Pass the slots as one input of the graph that holds them as they are: not negative, "
        "and no two alike. Cut them into blocks of cache.shape[1] if that size is a symbol."
    ),
    "config.staging": 'Set Config(staging="auto").',
}


@dataclass(frozen=True)
class StagedBy:
    """One obstacle between a staged fusion and a write in place.

    code     a stable code, a key of ``REMEDIES``
    message  one sentence with names and sizes
    remedy   what to write instead
    """

    code: str
    message: str
    remedy: str


@dataclass(frozen=True)
class Leftover:
    """What a staged fusion leaves in the graph for one purpose, and what a step pays for it.

    what             "staging buffers", "re-interleaving" or "cache writes"
    operators        operators that remain, or are added, in order
    launches         how many kernels they are; views do not count
    bytes_per_token  bytes read and written for each token
    bytes            bytes read and written at every step, whatever the number of tokens: whole
                     caches that the write rebuilds; None if their sizes are symbolic
    """

    what: str
    operators: tuple[str, ...]
    launches: int
    bytes_per_token: int
    bytes: int | None = 0
