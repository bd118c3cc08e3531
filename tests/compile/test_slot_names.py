"""A bad slot names the cache as the user's model does."""

import pytest
import torch

import mla_fusion as mf
from tests.catalogue.base import Base, paged_args


def test_bad_slot_names_the_users_cache() -> None:
    *others, slots = paged_args()
    run = torch.compile(Base(), backend=mf.backend(mf.Config(slots="checked")), fullgraph=True)
    with torch.no_grad(), pytest.raises(mf.SlotError, match=r"outside kv_cache \(kv_cache\),"):
        run(*others, slots - 64)
