"""The registry of data sets: one `DataSet` record for each name, and families of names that are not listed."""

from __future__ import annotations

import re
from collections.abc import Callable

from .._utils import suggestion
from . import lra, offline_rl, text, uea, vision
from .environments import ENVIRONMENTS
from .store import DataSet

RECORDS: dict[str, DataSet] = {
    record.name: record for record in (*lra.RECORDS, *text.RECORDS, *vision.RECORDS, *uea.RECORDS, *offline_rl.RECORDS)
}
# form of the names: pattern, whose group is the name within the family, and the function that returns the record
FAMILIES: dict[str, tuple[str, Callable[[str], DataSet]]] = {
    "uea/<Set>": (r"uea/(.+)", uea.record),
    "d4rl/<environment>-<quality>": (rf"d4rl/((?:{'|'.join(ENVIRONMENTS)})-.+)", offline_rl.d4rl_record),
    "minari/<id>": (r"minari/(.+)", offline_rl.minari_record),
}


def find(name: str) -> DataSet:
    """Return the record of a data set.

    Args:
        name: a key of `RECORDS`, or any name of a form in `FAMILIES`.
    """
    if name in RECORDS:
        return RECORDS[name]
    for pattern, record in FAMILIES.values():
        if match := re.fullmatch(pattern, name):
            return record(match[1])
    raise ValueError(
        f"unknown data set {name!r}{suggestion(name, RECORDS)}; known are {', '.join(RECORDS)}, and any "
        f"{' or '.join(FAMILIES)}."
    )
