"""`python -m bench`: the measurements of docs/benchmarks.md."""

import sys

from bench.suite.run import main

if __name__ == "__main__":
    sys.exit(main())
