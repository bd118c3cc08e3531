"""Installed as ``mla_fusion.examples``, so that each file runs from anywhere: ``python -m mla_fusion.examples.NAME``."""
