"""What a symbolic size loses, each with the fact about the kernel, or torch, that says why."""

from __future__ import annotations

from tests.catalogue.base import BLOCK_SIZE, BLOCKS

ALL = 0  # dynamic=True: every size that dynamo finds

_LITERAL = (
    "the model counts with a literal that is a block's size at this one size alone: of other blocks"
    " its rows are other ones"
)
_ROWS = "the kernel takes whole blocks; whether so many rows are is known when the graph runs"
_SCATTER = "aten.scatter takes fewer indices than rows: nothing says that every token has a slot"
_APART = "the kernel takes two caches of one BlockNum; mark_dynamic gives each a symbol of its own"
_ROWS_OF_SEQUENCES = {  # how many a sequence has
    "CachesByPosition": 48,
    "OnePositionForAll": 2048,
    **dict.fromkeys(
        (
            "AssignedBehindTheHead",
            "OneStream",
            "OwnPositions",
            "OwnRowOfTheBatch",
            "Scattered",
            "StaticCache",
            "StaticCacheLite",
        ),
        32,
    ),
}
LESS: dict[tuple[str, int], str] = {
    **dict.fromkeys((("SlotsInTwoWays", size) for size in (ALL, BLOCK_SIZE)), _LITERAL),
    ("SglangBuffers", 64): _ROWS,
    **dict.fromkeys((("BlocksOfOneHead", size) for size in (ALL, BLOCK_SIZE)), _ROWS),
    **dict.fromkeys((("LayerByTensor", size) for size in (ALL, BLOCK_SIZE)), _ROWS),
    **dict.fromkeys((("RowOfEachRequest", size) for size in (ALL, 32)), _ROWS),
    **dict.fromkeys((("LongRowOfEachRequest", size) for size in (ALL, 2048)), _ROWS),
    **dict.fromkeys((("RowOfEachRequest", 8), ("LongRowOfEachRequest", 8)), _APART),
    **dict.fromkeys((("ScatterRows", 8), ("LayersAsRows", 8)), _SCATTER),
    **dict.fromkeys((("Scattered", size) for size in (3, 5)), _SCATTER),
    **dict.fromkeys(
        ((name, size) for name, rows in _ROWS_OF_SEQUENCES.items() for size in (ALL, rows)),
        _ROWS,
    ),
    ("OnePositionForAll", 4): _APART,
    ("OwnRowOfTheBatch", 6): _APART,
    **dict.fromkeys((("OwnPositions", 3), ("KnownMultiples", 3)), _APART),
    **dict.fromkeys((("RowsReadToo", size) for size in (BLOCKS, BLOCK_SIZE)), _APART),
}
