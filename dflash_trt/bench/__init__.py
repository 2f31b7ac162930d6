"""Measuring: our engines, any server, and reports that compare like with like."""
