"""Bundles for TensorRT-LLM: the arguments of its `LLM(...)`, chosen by rule and checked."""
