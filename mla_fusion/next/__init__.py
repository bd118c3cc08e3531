"""What stands behind the new core's proposals, until it takes the place of ``plan/`` and
``commit/``: where caches are written, what becomes of the graph, the call, and the new graph.

Nothing imports it but a private switch: ``MLA_FUSION_CORE=values`` (:mod:`mla_fusion.next.fuse`).
"""
