"""The command line: `flowformer demo | train | fit | eval | reproduce | results | plot | linearize | recipes | …`."""

from .app import app  # noqa: I001 first, since it says what to install, and the help lists commands in this order
from . import train, tables, linearize, info, data, bench  # noqa: F401

__all__ = ["app"]
