"""The documentation: it builds without a warning, its code runs, and its pages need no network."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import flowformer

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# their code needs data or prints what is checked: the tests of their subject run it
RUN_ELSEWHERE = ("aeon.md", "gymnasium.md", "linearize.md", "rivals.md", "timm.md", "transformers.md")


def code_of(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


BLOCKS = [
    pytest.param(code, page.name, id=f"{page.stem} {number}")
    for page in PAGES
    if page.name not in RUN_ELSEWHERE
    for number, code in enumerate(code_of(page), 1)
]


def is_numeric(x):
    return isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.number)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("code", "page"), BLOCKS)
def test_code_runs(code, page):
    """Each block as it stands, pasted into a fresh interpreter; what it computes is finite."""
    namespace = {}
    exec(compile(code, page, "exec"), namespace)
    results = [torch.as_tensor(x) for x in namespace.values() if isinstance(x, torch.Tensor) or is_numeric(x)]
    assert results
    assert all(x.numel() and x.isfinite().all() for x in results)


def test_code_of_the_other_pages_is_run():
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_integrations_*.py"))
    tests += "".join(path.read_text() for path in Path(__file__).parent.rglob("test_baselines*.py"))
    tests += "".join(path.read_text() for path in Path(__file__).parent.rglob("test_linearize*.py"))
    for name in RUN_ELSEWHERE:
        assert code_of(ROOT / "docs" / name)
        assert name in tests


def test_links_lead_to_files_of_the_repository():
    """The site moves some files, so that its build checks other targets than those that a reader of the files sees."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / "results").glob("*.md")]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_picture_is_up_to_date():
    drawn = runpy.run_path(str(ROOT / "docs" / "flow_picture.py"))["draw"]()
    assert drawn == (ROOT / "docs" / "flow.svg").read_text(), "run python docs/flow_picture.py"


def test_reference_has_every_public_name():
    reference = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    documented = {name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)", reference, re.MULTILINE)}
    listed = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "api" / "functions.md").read_text(), re.MULTILINE))
    assert set(flowformer.__all__) == listed
    assert set(flowformer.__all__) | set(flowformer.nn.__all__) - {"is_flow"} <= documented


def build(folder, config=ROOT / "mkdocs.yml"):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder, "--config-file", config]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("faults", ["[a](nowhere-1.md) [b](#nowhere-2) [c](/nowhere-3)", "::: flowformer.nowhere_1"])
def test_a_broken_link_or_reference_fails(faults, tmp_path):
    """A site of one page under the settings of ours, which otherwise builds."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    del settings["hooks"], settings["extra_css"], settings["nav"]
    settings["plugins"][1]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT / "src")]
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "docstrings.py", tmp_path / "docs")
    (tmp_path / "docs" / "index.md").write_text(f"# Home\n\n[here](#home) {faults}\n\n{faults}\n")
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    for fault in re.findall(r"nowhere\S\d", faults):
        assert fault in done.stderr


def test_pages_load_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r'<(?:script|img|iframe)[^>]+src="?(?:https?:)?//[^>]*', text), page
        assert not re.findall(r'<link[^>]+rel="?(?:stylesheet|preconnect|icon)[^>]+href="?(?:https?:)?//[^>]*', text), (
            page
        )


def test_formulas_are_mathml(site):
    text = (site / "flow-attention.html").read_text()
    assert text.count("<math") > 20
    assert "arithmatex" not in text
    assert "\\hat" not in text


# what a reader sees: a formula has a size, an image is there, nothing came from another host
LOOK = """
<script>
addEventListener("load", () => {
  document.body.dataset.seen = JSON.stringify({
    formulas: [...document.querySelectorAll("math")].filter(e => e.getBoundingClientRect().height > 5).length,
    images: [...document.images].filter(e => e.complete && e.naturalWidth > 0).length,
    foreign: performance.getEntriesByType("resource").map(e => e.name).filter(name => /^https?:/.test(name)),
  });
});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_page_in_a_browser(site, tmp_path):
    page = site / "looked-at.html"
    page.write_text((site / "flow-attention.html").read_text().replace("</body>", LOOK + "</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [CHROMIUM, *options, "--virtual-time-budget=5000", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
    )
    seen = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert seen, done.stderr[-2000:]
    found = json.loads(seen[1].replace("&quot;", '"'))
    assert found["formulas"] > 20
    assert found["images"] == 1
    assert found["foreign"] == []
