"""Spellings of one prologue as a product of independent choices, and mutants of them with one thing
changed.
"""
