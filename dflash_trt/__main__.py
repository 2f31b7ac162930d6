"""`python -m dflash_trt` is `dflash-trt`."""

import sys

from dflash_trt.cli.main import main

sys.exit(main())
