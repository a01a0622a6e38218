"""The command line: `flowformer demo | train | fit | eval | reproduce | results | plot | linearize | recipes | …`."""

from . import train, tables, linearize, info, data, bench  # noqa: F401, I001 the help lists commands in this order
from .app import app

__all__ = ["app"]
