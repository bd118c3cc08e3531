"""What shows that a tensor has changed since a weight was packed of it.

A change leaves one of these traces, or none:

* other memory (``weight.data = other``, a swap, a move): another storage, address or layout
* an operation that torch counts (``weight.copy_(..)`` under no_grad): the version counter
* none: ``weight.data.add_(..)``, any change of a tensor made under ``inference_mode``, and of memory that is
  reached by another tensor, such as a flat buffer of which the parameter is a part. Only the content tells.

Nothing here refers to the tensor itself: ``torch.utils.swap_tensors`` refuses tensors that somebody refers to weakly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mla_fusion.compat import is_view, storage_id, version_of
from mla_fusion.weights.fingerprint import fingerprint


def place(value: Any) -> object:
    """Where a tensor lies and how; a number is itself."""
    if not isinstance(value, Tensor):
        return value
    return storage_id(value), value.storage_offset(), tuple(value.shape), value.stride(), value.dtype


class Source:
    """A tensor as it was when a weight was packed of it.

    storage, pointer   its memory; while the weak reference stands, no other storage has this identity
    version            its version counter, or None where that is not asked
    content            its fingerprint, or None where its content is not compared
    """

    def __init__(self, tensor: Tensor, packed: Tensor, trusted: bool) -> None:
        self.weak = StorageWeakRef(tensor.untyped_storage())
        self.storage, self.pointer = storage_id(tensor), tensor.data_ptr()
        self.version: int | None = None
        self.content: Tensor | None = None
        if self.storage == storage_id(packed):
            return  # one memory: every change is seen by both
        if trusted and is_counted(tensor):
            self.version = version_of(tensor)
        else:
            self.content = fingerprint(tensor)

    def is_still(self, tensor: Tensor) -> bool:
        """Whether a tensor at the same place holds the same. (A storage that is freed and allocated again may move.)"""
        if tensor.data_ptr() != self.pointer:
            return False
        if self.version is not None:
            return is_counted(tensor) and self.version == version_of(tensor)
        return self.content is None or torch.equal(self.content, fingerprint(tensor))


def is_counted(tensor: Tensor) -> bool:
    """Whether its version counter tells of every change, those through ``tensor.data`` apart.

    So it is for a tensor alone in its memory. Tensors made under inference_mode have no counter.
    """
    return (
        not tensor.is_inference()
        and not is_view(tensor)
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )
