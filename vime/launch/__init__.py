"""Placing the roles of a run, starting them, and watching them to their end."""
