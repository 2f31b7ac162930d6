"""ONNX graphs of targets and drafters."""

from dflash_trt.graphs.builder import WEIGHTS_FILE, GraphBuilder
from dflash_trt.graphs.drafter import candidates_per_draft, drafter_graph
from dflash_trt.graphs.target import target_graph
