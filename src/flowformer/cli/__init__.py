"""The command line: `flowformer demo | train | fit | eval | reproduce | results | plot | linearize | recipes | …`."""

# app first: it reports missing packages. The order of the other imports is the order of the commands in --help.
from .app import app  # noqa: I001
from . import train, tables, linearize, info, data, bench  # noqa: F401

__all__ = ["app"]
