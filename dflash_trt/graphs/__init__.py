"""ONNX graphs of targets and drafters."""

from dflash_trt.graphs.builder import COPIED, WEIGHTS_FILE, GraphBuilder, Kind, Storage
from dflash_trt.graphs.drafter import candidates_per_draft, drafter_graph
from dflash_trt.graphs.target import target_graph
