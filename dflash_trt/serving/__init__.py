"""Triton: the model repository, the server, the public model's logic and the client."""
