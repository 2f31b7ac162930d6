"""Serving with Triton: the model repository, the server, the public model's logic, the client."""
