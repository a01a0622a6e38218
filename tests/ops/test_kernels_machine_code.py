"""What the compiler makes of the kernels for a GPU that is not here: `machine_code.py` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers import ROOT

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kernels_fit_and_read_only_what_was_written(seed):
    script = ROOT / "tests" / "machine_code.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), "--calls", "10", "--seed", str(seed)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
