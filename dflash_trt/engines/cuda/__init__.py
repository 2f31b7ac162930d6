"""ONNX Runtime's CUDA provider: the same graph, on one NVIDIA GPU (docs/engines.md)."""

PROVIDER = "CUDAExecutionProvider"
