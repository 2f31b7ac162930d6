"""Entry point of `python -m dflash_trt`, the same as `dflash-trt`."""

import sys

from dflash_trt.cli.main import main

sys.exit(main())
