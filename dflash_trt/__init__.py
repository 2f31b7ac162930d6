"""From a language model and its DFlash drafter to a running Triton Inference Server."""

__version__ = "0.1.0"
