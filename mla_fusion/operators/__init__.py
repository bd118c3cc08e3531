"""What each operator does to values: one row for each, and what is known of a call's target."""
