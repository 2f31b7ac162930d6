"""The target's step of a round, as a Triton model. The work is in dflash_trt.decoding.rounds."""

from dflash_trt.decoding import FeatureBuffer, verify
from dflash_trt.decoding.packing import RoundTensors, pack_verified, unpack_round
from dflash_trt.engines import most_buffered
from dflash_trt.serving.model.engine_model import EngineModel


class TritonPythonModel(EngineModel):
    input_type = RoundTensors

    def initialize(self, args):
        super().initialize(args)
        self.buffer = FeatureBuffer(most_buffered(self.engine.info.block_size))

    def step(self, tensors):
        return pack_verified(verify(self.engine, unpack_round(tensors), self.buffer))
