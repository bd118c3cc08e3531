"""Weights as the kernel wants them: columns taken, packed copies kept."""

from mla_fusion.weights.cache import WeightError
from mla_fusion.weights.follow import refresh, release

__all__ = ["WeightError", "refresh", "release"]
