"""Readable forms of what the pass found: a page, a drawing, tables."""
