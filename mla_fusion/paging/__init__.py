"""Converts indices and caches of other systems to those of the MLA prologue, and back.

* `PageTable`: which pages a batch of sequences occupies, from FlashInfer's CSR triple, from vLLM's
  block tables, or from a table of token slots; it makes ``cache_index`` token-wise or block-wise
* `slots_from_mapping`, `slots_from_ppl`: ``cache_index`` from vLLM slot mappings and PPL cache
  starts
* `nd_to_nz`, `nz_to_nd`: a paged cache between its two memory layouts
* `pack_rows`, `unpack_rows`, `dequantise_rows`: the 656-byte rows of per-tile caches

All functions are vectorised torch on the device of their input. Bad input raises ContractError (a
ValueError) that names the argument. A check of values costs a synchronisation on a device:
``check=False`` leaves it out and keeps the checks of shapes and dtypes.
"""

from mla_fusion.paging.layout import nd_to_nz, nz_to_nd
from mla_fusion.paging.slots import blocks_from_slots, slots_from_mapping, slots_from_ppl
from mla_fusion.paging.table import BlockIndex, PageTable
from mla_fusion.paging.tiles import dequantise_rows, pack_rows, unpack_rows

__all__ = [
    "BlockIndex",
    "PageTable",
    "blocks_from_slots",
    "dequantise_rows",
    "nd_to_nz",
    "nz_to_nd",
    "pack_rows",
    "slots_from_mapping",
    "slots_from_ppl",
    "unpack_rows",
]
