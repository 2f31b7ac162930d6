"""ONNX graphs built straight from a checkpoint's tensors, without tracing and without torch."""
