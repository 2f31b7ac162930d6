"""Where upstream has its arguments."""
