"""Runs a rewritten graph beside the original one on drawn values, and compares them.

The witness knows nothing of how a prologue was recognised or proved: it runs raw nodes, as torch
runs them, and the replacement as it will run.
"""
