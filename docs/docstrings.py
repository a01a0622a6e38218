"""Read the docstrings of the package as Markdown: a doctest is a code block, and `Returns:` stands out."""

import re

from griffe import Extension

DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
RETURNS = re.compile(r"^(Returns|Args):(?= \S)", re.MULTILINE)


class PlainDocstrings(Extension):
    """Applied before mkdocstrings parses the sections of a docstring."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring is not None:
            text = DOCTEST.sub(lambda doctest: f"```pycon\n{doctest[0]}\n```", obj.docstring.value)
            obj.docstring.value = RETURNS.sub(r"**\1:**", text)
