"""The process that owns the HTTP ports of `serve`: it checks requests before Triton parses them."""
