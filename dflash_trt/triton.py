"""Names that a build writes and a server checks: Triton's APIs, and models behind the front."""

CHANGES = ("model-repository", "shared-memory", "trace", "logging")  # APIs always behind a key
INTERNAL = ("draft_verify", "verify", "draft")  # models that only the front asks
LLMAPI = "tensorrt_llm"  # TensorRT-LLM's own model
