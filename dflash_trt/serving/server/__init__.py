"""The processes of `dflash-trt serve`."""
