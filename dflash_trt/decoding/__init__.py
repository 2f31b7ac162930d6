"""The algorithm: rounds, acceptance, sampling, KV rows, scheduling."""
