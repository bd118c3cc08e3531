"""Compares a rewritten graph with the original one on drawn values.

The witness knows nothing of how a prologue was recognised or proved. It runs raw nodes, as torch
runs them, and the replacement as it will run.
"""
