"""Plans: graphs that TensorRT has compiled for an NVIDIA GPU (docs/engines.md)."""

KIND = "tensorrt"
PLAN_FILE = "model.plan"
