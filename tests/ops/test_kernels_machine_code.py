"""What the compiler makes of the kernels for a GPU that is not here: `machine_code.py` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers import ROOT

pytest.importorskip("triton")


def check(*options: str) -> None:
    script = ROOT / "tests" / "machine_code.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_compile_with_this_triton():
    """Both directions in bfloat16: Triton's interpreter accepts what its compiler refuses."""
    check("--calls", "2", "--seed", "20", "--width", "16")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kernels_fit_and_read_only_what_was_written(seed):
    check("--calls", "10", "--seed", str(seed))
