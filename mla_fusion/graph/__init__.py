"""Values: interned operations in one form, and how an FX graph is read into them and lowered
again.
"""
