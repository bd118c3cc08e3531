"""Reads from a graph, by probing it in the field, what prologues it may contain.

Nothing here needs to be right: ``plan/`` has each proposal proved before it makes a plan.
"""
