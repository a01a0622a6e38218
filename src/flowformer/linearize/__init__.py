"""From softmax to flow: give a pretrained model of transformers linear attention, and keep what it knows.

`student.py` exchanges the attention, `transfer.py` trains it. What an exchanged attention learns is `FlowHeads` in
`integrations/transformers/linearized_heads.py`, so that a saved student can be loaded without this package.
"""

from __future__ import annotations

from .config import LinearizeConfig
from .student import Student, linearize

__all__ = ["LinearizeConfig", "Student", "linearize"]
