"""Models of prologues, fused and refused, that tests of all rooms compile."""
