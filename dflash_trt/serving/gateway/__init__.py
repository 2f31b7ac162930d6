"""The process that owns the HTTP ports of `serve`: it checks requests before Triton parses them."""

from dflash_trt.serving.gateway.settings import LEFT, LISTENING, REFUSED, Settings, codec
