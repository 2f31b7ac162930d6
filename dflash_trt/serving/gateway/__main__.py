"""`python -m dflash_trt.serving.gateway`: see `process.py`, which starts it."""

import asyncio

from dflash_trt.serving.gateway.run import run

asyncio.run(run())
