"""Triton: the model repository, the server, the front model's logic and the client."""
