"""``fuse`` and ``explain``: candidate -> verdict -> plan -> verify -> rewrite, with a Report of every decision."""

from mla_fusion.fusion.driver import explain, fuse

__all__ = ["explain", "fuse"]
