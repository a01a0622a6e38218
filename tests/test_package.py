"""The package as it is installed, imported and read about."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import re
import runpy
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from helpers import random_inputs

import flowformer
from flowformer.ops import reference

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def run_python(code, *options, **environment):
    """A fresh interpreter, away from the checkout."""
    command, environment = [sys.executable, *options, "-c", code], {**os.environ, **environment}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT.anchor, timeout=120
    )


# what one interpreter finds, asked in this order: a name that was used is loaded
FRESH = """
import json, sys, torch
before, found = set(sys.modules), {}
def brought():
    return sorted(set(sys.modules) - before)
import flowformer
found["by the import"] = [name for name in brought() if name.startswith("flowformer.")]
found["dir"] = dir(flowformer)
found["subpackages"] = [flowformer.nn.__name__, flowformer.ops.__name__]
flowformer.flow_attention, flowformer.FlowAttention, flowformer.replace_attention
roots = {name.split(".")[0] for name in brought()}
found["by the names"] = sorted(roots - set(sys.stdlib_module_names) - {"flowformer", "torch"})
found["loaded"] = "triton" in sys.modules, "transformers" in sys.modules, torch.cuda.is_initialized()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def fresh():
    result = run_python(FRESH, "-W", "error::UserWarning:flowformer")
    return json.loads(result.stdout) | {"errors": result.stderr}


class TestImport:
    def test_brings_nothing_but_torch(self, fresh):
        """No kernels' compiler, no optional dependency, no driver, no warning."""
        assert fresh["by the names"] == []
        assert fresh["loaded"] == [False, False, False]
        assert "flowformer" not in fresh["errors"]

    def test_is_lazy(self, fresh):
        assert fresh["by the import"] == []

    def test_runs_without_numpy(self):
        result = run_python(
            "import sys; sys.modules['numpy'] = None\n"
            "import torch; from flowformer import flow_attention\n"
            "x = torch.randn(1, 1, 5, 4, requires_grad=True)\n"
            "flow_attention(x, x, x).sum().backward(); print(x.grad.shape)"
        )
        assert result.stdout.strip() == "torch.Size([1, 1, 5, 4])"

    def test_costs_less_than_50_ms_beyond_torch(self, tmp_path):
        """The one test that measures time, since every program that imports the package pays it."""

        def milliseconds():
            # of processor time: what else the machine does must not count; with byte code, as pip installs it
            result = run_python(
                "import time, torch; start = time.process_time()\n"
                "import flowformer; flowformer.FlowAttention; print(1000 * (time.process_time() - start))",
                PYTHONDONTWRITEBYTECODE="",
                PYTHONPYCACHEPREFIX=str(tmp_path),
            )
            return float(result.stdout)

        # a busy machine makes some of the runs slow, and none of them fast
        assert any(milliseconds() < 50 for _ in range(8))


class TestNames:
    @pytest.mark.parametrize("name", flowformer.__all__)
    def test_resolves(self, name):
        assert getattr(flowformer, name) is getattr(flowformer, name)
        assert name in dir(flowformer)

    @pytest.mark.parametrize("name", ["FlowAttention", "flow_attention"])
    def test_is_documented(self, name):
        assert getattr(flowformer, name).__doc__

    def test_dir_in_a_fresh_interpreter_knows_what_is_not_loaded_yet(self, fresh):
        assert {*flowformer.__all__, "nn", "ops"} <= set(fresh["dir"])

    def test_unknown_attribute(self):
        with pytest.raises(AttributeError, match="module 'flowformer' has no attribute 'flow_atention'"):
            _ = flowformer.flow_atention

    def test_star_import_leaves_torchs_nn_alone(self):
        namespace = {}
        exec("from torch import nn\nfrom flowformer import *", namespace)
        assert set(flowformer.__all__) <= set(namespace)
        assert namespace["nn"] is torch.nn

    def test_subpackages_need_no_import(self, fresh):
        assert fresh["subpackages"] == ["flowformer.nn", "flowformer.ops"]


class TestMetadata:
    def test_version(self):
        assert re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", flowformer.__version__)
        assert importlib.metadata.version("flowformer") == flowformer.__version__

    def test_torch_is_the_only_dependency(self):
        required = [line for line in importlib.metadata.requires("flowformer") if "extra ==" not in line]
        assert [re.match(r"\w+", line)[0] for line in required] == ["torch"]

    def test_is_typed(self):
        assert (Path(flowformer.__file__).parent / "py.typed").exists()


def test_the_reference_stands_alone(tmp_path):
    """The file may be copied anywhere: it needs nothing of the package."""
    copy = tmp_path / "copied.py"
    copy.write_text(Path(reference.__file__).read_text())
    assert not re.search(r"^\s*(from|import) (\.|flowformer)", copy.read_text(), re.MULTILINE)
    inputs = random_inputs()
    assert torch.equal(runpy.run_path(str(copy))["bidirectional"](*inputs), reference.bidirectional(*inputs))


def blocks(*languages):
    """The fenced blocks of the README in one of these languages."""
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


class TestReadme:
    @pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake (\w+)", README))))
    def test_make_target_exists(self, target):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)

    def test_names_a_command_that_tests(self):
        assert "make test" in "".join(blocks("sh", "console"))

    def test_fits_on_a_screen_and_a_half(self):
        assert len(README.splitlines()) <= 90

    @pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(((?!http)[^)#]+)[)#]", README))))
    def test_link_leads_somewhere(self, path):
        assert (ROOT / path).exists()

    def test_speeds_are_the_measured_ones(self):
        """Numbers of the table, rounded in any way, agree with the rows of the benchmarks."""
        h200, cpu = (speeds(f"results/attention-{machine}.csv") for machine in ("h200", "cpu"))
        shapes = {"1,024": "B32 H8 N1024", "2,048": "B8 H16 N2048", "4,096": "B32 H8 N4096", "16,384": "B4 H16 N16384"}
        contestants = ["flow triton", "sdpa"]
        for tokens, gpu_shape in shapes.items():
            (line,) = re.findall(rf"^\| {tokens} \| (.*) \|$", README, re.MULTILINE)
            texts = [cell.strip(" *") for cell in line.split("|")]
            times = [h200.get((k, c, f"{gpu_shape} d64")) for k in ("bidirectional", "causal") for c in contestants]
            cpu_shape = f"B2 H8 N{tokens.replace(',', '')} d64"
            times += [cpu.get(("bidirectional", contestant, cpu_shape)) for contestant in ("flow native", "sdpa")]
            for text, measured in zip(texts, times, strict=True):
                if text:
                    printed = text.split(" / ")
                    assert all(map(is_rounded, printed, measured[-len(printed) :])), (tokens, text, measured)


def speeds(path):
    """Milliseconds of the forward pass and of both passes, by direction, contestant and shape."""
    with (ROOT / path).open(newline="") as file:
        return {
            (row["kind"], row["contestant"], row["shape"]): [float(row["forward_ms"]), float(row["both_ms"])]
            for row in csv.DictReader(file)
            if row["dtype"] in ("bfloat16", "float32") and row["both_ms"]
        }


def is_rounded(text, value):
    """Whether a printed number is a value, rounded to its digits."""
    printed = Decimal(text)
    return abs(printed - Decimal(str(value))) <= Decimal(5).scaleb(printed.as_tuple().exponent - 1)


class TestVersions:
    """What is declared in one place and repeated in others."""

    def test_oldest_torch_is_the_one_that_is_tested(self):
        (declared,) = re.findall(r'^dependencies = \["torch>=([\d.]+)"\]', PYPROJECT, re.MULTILINE)
        (tested,) = re.findall(r"^OLDEST_TORCH := ([\d.]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert tested == f"{declared}.0"
        for page in ("README.md", "docs/quickstart.md", "docs/faq.md"):
            assert re.search(rf"(torch|\|) {re.escape(declared)} or newer", (ROOT / page).read_text()), page

    def test_citation_and_changelog_name_the_version(self):
        (cited,) = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
        (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
        assert cited == newest == flowformer.__version__
