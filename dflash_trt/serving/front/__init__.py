"""Requests, from tensors to answers."""
