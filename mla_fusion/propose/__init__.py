"""What a graph may compute, read off by probing it in the field. Nothing here needs to be right: a
proposal is proved before anything is made of it.
"""
