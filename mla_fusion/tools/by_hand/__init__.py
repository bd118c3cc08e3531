"""Hand-written calls of the fused operators, checked against the model that they stand for."""
