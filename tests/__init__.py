"""A package, so that no module of it is imported under two names: an operator defined twice is gone for the first."""
