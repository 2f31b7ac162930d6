"""`python -m tests.support.traffic COUNT [SEED]`."""

import secrets
import sys

from tests.support.traffic.campaign import main

if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(given[0], given[1] if len(given) > 1 else secrets.randbits(31)))
