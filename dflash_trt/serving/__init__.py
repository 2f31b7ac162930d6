"""Serving: `serve`, the HTTP application, the logic of Triton's models, and clients."""
