"""Hand-written calls of the fused operators, checked against the model that they stand for."""

from mla_fusion.tools.by_hand.entry import audit
from mla_fusion.tools.by_hand.of_dump import audit_dump
from mla_fusion.tools.by_hand.outcome import Audit, Finding

__all__ = ["Audit", "Finding", "audit", "audit_dump"]
