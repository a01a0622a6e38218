"""Check the table of model types in docs/transformers.md: a few types, and with `-m slow` all of them."""

from __future__ import annotations

import re

import pytest
from sweep_transformers import PAGE, classify, page_groups, sweep, table
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

HANDFUL = ["bert", "roberta", "vit", "clip", "llama", "gpt2", "qwen2_vl", "bamba", "bloom", "deberta", "bart", "sam"]


@pytest.mark.parametrize("model_type", HANDFUL)
def test_the_page_lists_the_right_group(model_type):
    assert classify(model_type) == page_groups()[model_type]


def test_counts_of_the_page_add_up():
    shown = page_groups()
    served, refused, others = map(
        int, re.search(r"(\d+) served, (\d+) refused, (\d+) others", PAGE.read_text()).groups()
    )
    assert served == sum(outcome.status == "served" for outcome in shown.values())
    assert refused == sum(outcome.status == "refused" for outcome in shown.values())
    assert others == 0
    for group, count, names in re.findall(r"^\| (\w+: .*?) \| (\d+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE):
        assert len(names.split(", ")) == int(count), group


@pytest.mark.slow
def test_every_model_type_is_served_or_refused():
    """Another version of transformers than the page's may add or remove types, but none may give wrong results."""
    outcomes = sweep()
    assert {name: outcome for name, outcome in outcomes.items() if outcome.status == "wrong"} == {}
    shown = page_groups()
    changed = {name for name, outcome in outcomes.items() if name in shown and outcome.status == "unavailable"}
    assert len(changed) < len(CONFIG_MAPPING_NAMES) / 20, table(outcomes)
