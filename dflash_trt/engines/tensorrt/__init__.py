"""Plans: graphs that TensorRT has compiled for an NVIDIA GPU."""
