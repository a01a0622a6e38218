"""The registry of data sets: one `DataSet` record for each name."""

from __future__ import annotations

from .._utils import suggestion
from . import lra, offline_rl, text, uea, vision
from .environments import ENVIRONMENTS
from .store import DataSet

RECORDS: dict[str, DataSet] = {
    record.name: record for record in (*lra.RECORDS, *text.RECORDS, *vision.RECORDS, *uea.RECORDS, *offline_rl.RECORDS)
}


def find(name: str) -> DataSet:
    """Return the record of a data set.

    Args:
        name: a key of `RECORDS`, or any "uea/<Set>", "d4rl/<environment>-<quality>" or "minari/<id>".
    """
    if name in RECORDS:
        return RECORDS[name]
    family, _, rest = name.partition("/")
    if family == "uea" and rest:
        return uea.record(rest)
    environment, _, quality = rest.partition("-")
    if family == "d4rl" and environment in ENVIRONMENTS and quality:
        return offline_rl.d4rl_record(rest)
    if family == "minari" and rest:
        return offline_rl.minari_record(rest)
    raise ValueError(f"unknown data set {name!r}{suggestion(name, RECORDS)}; known are {', '.join(RECORDS)}.")
