"""Settings for every test."""

import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch

# Triton reads this when it is imported, which any test may be the first to do
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is not None:
        import quick_interpreter

        quick_interpreter.install()


NO_PARAMETERS = SimpleNamespace(params={})


def pytest_runtest_setup(item):
    """One thread: the workers of pytest-xdist would fight for the cores.

    Before each test, since numba, by which aeon computes DTW, sets the number of threads of torch as well: two on two
    busy cores made every update of the small models take forty times as long.
    """
    torch.set_num_threads(1)
    # only where such a test runs, since this builds the library
    if "native" in getattr(item, "callspec", NO_PARAMETERS).params.values() or item.path.name == "test_native.py":
        from flowformer.ops.native.build import failure

        if failure() is not None:
            pytest.skip(failure())


ON_GPU = {
    "test_kernels_bidirectional.py",
    "test_kernels_causal.py",
    "test_kernels_causal_state.py",
    "test_kernels_decode.py",
    "test_kernels_powers.py",
    "test_parity.py",
}


def pytest_collection_modifyitems(config, items):
    """Where there is a GPU, the tests of the kernels run on it: `pytest -m gpu` is all of them."""
    for item in items:
        if "slow" in item.keywords and "slow" not in config.getoption("-m"):
            item.add_marker(pytest.mark.skip(reason="slow; run with -m slow"))
        if torch.cuda.is_available() and item.path.name in ON_GPU:
            item.add_marker("gpu")
