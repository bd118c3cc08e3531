"""Installed as ``mla_fusion.examples``: ``python -m mla_fusion.examples.NAME`` runs one from
anywhere.
"""
