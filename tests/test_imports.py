"""The import rule of CONTRIBUTING.md: a module imports its own layer and those below it, nothing above."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import flowformer

ROOT = Path(flowformer.__file__).parent
CONTRIBUTING = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
# from the bottom up, as CONTRIBUTING.md draws them
LAYERS = ["_utils", "ops", "baselines", "nn", "models", "data", "integrations", "viz", "train"]
LAYERS += ["linearize", "bench", "cli"]
# what may be imported beside torch and the standard library, anywhere in a file; other layers have extras
PACKAGES = {"ops": {"triton"}, "baselines": set(), "nn": set(), "models": {"safetensors", "timm"}}
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def imported(tree, package):
    """Full names of the modules that a module of `package` imports, wherever in the file; a name after its module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def layer(module):
    """The layer of a full name; names that the package itself exports come from ops and nn."""
    name = module.split(".")[1]
    if name in LAYERS:
        return name
    return {"__version__": LAYERS[0]}.get(name, "nn" if name in flowformer._IN_NN else "ops")


def breaches(source, file):
    """Imports of this source that the rule forbids to a file of the package."""
    package = ("flowformer", *Path(file).parent.parts)
    own = Path(file).parts[0].removesuffix(".py")
    for name in imported(ast.parse(source), package):
        top = name.split(".")[0]
        if top == "flowformer":
            if LAYERS.index(layer(name)) > LAYERS.index(own):
                yield name
        elif own in PACKAGES and top not in {"torch", *PACKAGES[own], *sys.stdlib_module_names}:
            yield name


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py"])
def test_imports_point_down(file):
    assert not list(breaches((ROOT / file).read_text(), file))


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("from ..nn import FlowAttention", "ops/interface.py"),
        ("from .. import nn", "ops/interface.py"),
        ("from .. import FlowAttention", "ops/interface.py"),
        ("def late():\n    from ...models.lm import LMConfig", "ops/triton/decode.py"),
        ("import flowformer.cli", "train/loop.py"),
        ("from flowformer.train import loop", "data/lra.py"),
        ("import numpy", "nn/attention.py"),
    ],
)
def test_the_rule_notices(source, file):
    assert list(breaches(source, file))


def test_contributing_draws_these_layers():
    (drawn,) = re.findall(r"^    (_utils .*)$", CONTRIBUTING, re.MULTILINE)
    assert drawn.split(" → ") == LAYERS


def test_every_folder_has_a_layer():
    assert {Path(file).parts[0].removesuffix(".py") for file in FILES} <= {*LAYERS, "__init__"}
