from tests.support import interpreted  # noqa: F401  (before Triton, which others import)
