"""Every model of timm either takes Flow-Attention in all its blocks or refuses it, and docs/timm.md says which do."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import timm
import torch
import torch.nn.functional as F
from helpers import ROOT
from timm.layers import Attention

from flowformer.integrations.timm import TimmFlowAttention as FlowAttention

PAGE = (ROOT / "docs" / "timm.md").read_text()


# of timm's own errors where a class has no such argument, or gives its channel attention one that ours has not
REFUSALS = r"attn_layer|num_heads|unexpected keyword argument '(rd_ratio|block_size)'"


def refusal(name: str) -> str | None:
    """What a model says that does not take Flow-Attention; one that does is run, without memory for its weights."""
    with torch.device("meta"):
        try:
            model = timm.create_model(name, attn_layer=FlowAttention).eval()
        except (TypeError, ValueError, NotImplementedError) as error:
            return str(error)
        calls, softmax = Counter(), []
        for key, module in model.named_modules():
            if isinstance(module, Attention):
                module.register_forward_hook(lambda *_, key=key: calls.update([key]))
        original = F.scaled_dot_product_attention
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: softmax.append(1) or original(*a, **k))
            model(torch.empty(1, *model.pretrained_cfg["input_size"]))
    names = [key for key, module in model.named_modules() if isinstance(module, FlowAttention)]
    assert names, name
    assert calls == dict.fromkeys(names, 1), name
    # pooling by attention has a query of its own, and stays what it is
    assert len(softmax) == int(getattr(model, "attn_pool", None) is not None), name
    return None


@pytest.mark.slow
def test_every_model_is_served_or_refuses():
    rows = []
    for family in timm.list_modules():
        answers = {name: refusal(name) for name in timm.list_models(module=family)}
        refused = {name: answer for name, answer in answers.items() if answer is not None}
        for name, answer in refused.items():
            assert re.search(REFUSALS, answer), f"{name}: {answer}"
        if len(refused) < len(answers):
            names = ", ".join(f"`{name}`" for name in refused) or "none"
            rows.append(f"| `{family}` | {len(answers) - len(refused)} | {names} |")
    table = "\n".join(rows)
    assert f"timm {timm.__version__}" in PAGE, "docs/timm.md has the table of another timm"
    assert table in PAGE, f"docs/timm.md should have these rows:\n{table}"
