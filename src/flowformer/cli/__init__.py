"""The command line: `flowformer demo | train | fit | eval | reproduce | results | plot | recipes | data | …`."""

import time

STARTED = time.monotonic()  # before torch is imported, which takes a while

from . import train, tables, info, data, bench  # noqa: E402, F401, I001 in the order of the help
from .app import app  # noqa: E402

__all__ = ["app"]
