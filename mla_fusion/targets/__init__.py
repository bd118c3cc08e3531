"""The definitions of the operators that a prologue may become, as Values."""
