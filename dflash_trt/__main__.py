"""`python -m dflash_trt` is `dflash-trt`."""

import sys

from dflash_trt.cli import main

sys.exit(main())
