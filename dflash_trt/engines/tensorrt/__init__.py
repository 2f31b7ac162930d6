"""Plans: graphs that TensorRT has compiled for an NVIDIA GPU (docs/engines.md)."""

PLAN_FILE = "model.plan"
