"""What each operator computes, in the form, and what a call of it is made of."""
