"""Names that a build writes and a server checks: Triton's APIs and models."""

CHANGES = ("model-repository", "shared-memory", "trace", "logging")  # APIs that always need a key
INTERNAL = ("draft_verify", "verify", "draft")  # models that only the front asks
