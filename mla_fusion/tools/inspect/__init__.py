"""Dumps summed up, explained, compared and exported; ``mf.inspect`` has the names."""
