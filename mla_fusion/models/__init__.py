"""Drop-in adapters of public models to the form that the kernel computes."""
