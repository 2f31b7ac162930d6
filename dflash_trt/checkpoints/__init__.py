"""The front door: read a target or drafter directory and check that the pair belongs together."""
