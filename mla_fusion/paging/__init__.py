"""Indices and caches of the MLA prologue from what other systems hold."""
