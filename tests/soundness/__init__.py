"""Attacks on the soundness of the pass: families of graphs that look like the prologue and mean
something else.
"""
