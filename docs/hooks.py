"""What the site needs beyond its pages: files from outside docs/, and formulas that no script has to render."""

import html
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
# a link with a relative target, and whether it shows an image
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#|mailto:)([^)]+)\)")


def on_files(files, config):
    """Add the README as the home page, the other pages of the root, and everything under results/."""
    outside = PAGES | {f"results/{path.name}": f"results/{path.name}" for path in (ROOT / "results").iterdir()}
    for target, source in outside.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Make links that are relative to the repository relative to the site, which has results/ beside these pages."""
    name = page.file.src_uri
    if name in PAGES:
        return LINK.sub(lambda link: _link(link, ""), markdown)
    if name.startswith("results/"):
        return LINK.sub(lambda link: _link(link, "../"), markdown)
    return markdown.replace("](../results/", "](results/")


def _link(link, up):
    image, text, target = link.groups()
    path = target.removeprefix(up)
    if path.startswith(("src/", "examples/", "LICENSE")):
        return text  # not part of the site
    path = {source: page for page, source in PAGES.items()}.get(path, path).removeprefix("docs/")
    return f"{image}[{text}]({up if target.startswith(up) else ''}{path})"


def on_page_content(content, page, config, files):
    """Replace LaTeX by MathML, which browsers render themselves."""

    def mathml(formula):
        tag, latex = formula.groups()
        return convert(html.unescape(latex).strip(), display="block" if tag == "div" else "inline")

    return FORMULA.sub(mathml, content)
