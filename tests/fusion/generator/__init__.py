"""Spellings of one prologue: independent choices, and mutants of them with one thing changed."""
