"""The `pytorch` engine: the standard graph on one NVIDIA GPU, or in tests on a CPU."""

GRAPH_FILE = "model.onnx"
DTYPES = ("bfloat16", "float16", "float32")  # of weights, products and KV caches
