"""What shows that a tensor has changed since a weight was packed of it.

A change leaves one of these traces, or none:

* other memory (``weight.data = other``, a swap, a move): another address or layout
* an operation that torch counts (``weight.copy_(..)`` under no_grad): the version counter
* none: ``weight.data.add_(..)``, a fused optimizer, any change of a tensor made under
  ``inference_mode``, and of memory that is reached by another tensor, such as a flat buffer. Only
  the content tells.

Nothing here refers to the tensor itself: ``torch.utils.swap_tensors`` refuses tensors that somebody
refers to weakly.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mla_fusion.compat import storage_id, version_of
from mla_fusion.weights.fingerprint import fingerprint


def place(value: object) -> object:
    """Where a tensor lies and how; a number is itself."""
    if not isinstance(value, Tensor):
        return value
    return (
        storage_id(value),
        value.storage_offset(),
        tuple(value.shape),
        value.stride(),
        value.dtype,
    )


class Source:
    """A tensor as it was when a weight was packed of it.

    storage, pointer   its memory; while the weak reference stands, no other storage has this
                       identity
    version            its version counter; None for memory that the packed weight shares, and
                       without a counter
    content            fingerprints of its shares, int64 [shares], none where they are not compared
    """

    def __init__(self, tensor: Tensor, packed: Tensor, updates: str) -> None:
        self.weak = StorageWeakRef(tensor.untyped_storage())
        self.storage, self.pointer = storage_id(tensor), tensor.data_ptr()
        shares = self.storage == storage_id(packed)  # one memory: every change is seen by both
        self.version = None if shares or tensor.is_inference() else version_of(tensor)
        reads = not shares and updates != "counted"
        self.content = (
            fingerprint(tensor) if reads else torch.empty(0, dtype=torch.int64, device="cpu")
        )

    def is_still(self, tensor: Tensor, updates: str) -> bool:
        """Whether a tensor at the same place holds the same. (A storage that is freed and allocated
        again may move.)

        ``updates`` as in Config: content is compared for "every call" alone.
        """
        if tensor.data_ptr() != self.pointer or not self.has_version(tensor):
            return False
        return (
            updates != "every call"
            or not len(self.content)
            or torch.equal(self.content, fingerprint(tensor))
        )

    def has_version(self, tensor: Tensor) -> bool:
        return self.version is None or (
            not tensor.is_inference() and self.version == version_of(tensor)
        )
