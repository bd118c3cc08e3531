"""Weights as the kernel wants them: columns taken, packed copies kept, memory shared."""

from mla_fusion.weights.cache import WeightError, release

__all__ = ["WeightError", "release"]
