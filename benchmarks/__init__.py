"""Ratios of speed and memory, each against a limit or a peer that is measured in the same run. See `__main__`."""
