"""What people run: the command line, and what stands behind its commands."""
