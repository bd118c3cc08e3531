"""Values at random points of a finite field, and the proof that two Values are equal."""
