"""What a person reads after a run, and while it goes."""
