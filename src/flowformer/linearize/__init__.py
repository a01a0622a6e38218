"""Replace the softmax attention of a pretrained transformers model by Flow-Attention and distil the original into it.

`student.py` replaces the attention, `transfer.py` trains it. The new parameters of a layer are a `FlowHeads` of
`integrations/transformers/linearized_heads.py`, so that a saved student can be loaded without this subpackage.
"""

from __future__ import annotations

from .config import LinearizeConfig
from .student import Student, linearize

__all__ = ["LinearizeConfig", "Student", "linearize"]
