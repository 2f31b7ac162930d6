"""What a machine can do with a pair, from their published figures: memory, and tokens a second."""

from dflash_trt.planning.picture import draw
from dflash_trt.planning.report import dflash_drafter, plan
