"""Plans: graphs that TensorRT has compiled for an NVIDIA GPU (docs/tensorrt.md)."""

KIND = "tensorrt"
PLAN_FILE = "model.plan"
