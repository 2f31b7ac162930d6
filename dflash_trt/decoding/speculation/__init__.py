"""What the next round verifies."""
