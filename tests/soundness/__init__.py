"""Attacks on the soundness of the pass: graphs that look like the prologue, and are none."""
