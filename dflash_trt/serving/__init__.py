"""Serving: `serve` and its processes, the HTTP application, the logic of Triton's models, clients."""
