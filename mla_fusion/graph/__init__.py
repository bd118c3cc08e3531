"""One form for what an FX graph computes: interned Values, and how a graph is read into them."""
