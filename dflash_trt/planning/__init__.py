"""What a machine can do with a pair, from their published figures: memory, and tokens a second."""
