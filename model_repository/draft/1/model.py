"""The drafter's step of a round, as a Triton model. The work is in dflash_trt.decoding.rounds."""

from dflash_trt.decoding import draft
from dflash_trt.decoding.packing import (
    DraftInputTensors,
    pack_drafts,
    unpack_batch,
    unpack_drafter_input,
)
from dflash_trt.serving.model.engine_model import EngineModel


class TritonPythonModel(EngineModel):
    input_type = DraftInputTensors

    def step(self, tensors):
        drafter_input = unpack_drafter_input(tensors)
        drafts = draft(self.engine, unpack_batch(tensors.batch), drafter_input)
        return pack_drafts(drafts, len(tensors.anchors))
