"""The faults of `mutation.py` can still be made: their lines are there, and so are the tests that are to catch them."""

from __future__ import annotations

import pytest
from helpers import ROOT
from mutation import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}: {fault.new}")
def test_a_fault_can_still_be_made(fault):
    assert fault.occurrences == 1, f"{fault.old!r} of {fault.file} has changed: update tests/mutation.py"
    assert fault.new != fault.old
    for test in fault.tests:
        file, *names = test.split("::")
        text = (ROOT / "tests" / file).read_text()
        assert all(f" {name}(" in text or f" {name}:" in text for name in names), test
