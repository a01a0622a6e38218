"""From softmax to flow: give a pretrained model of transformers linear attention, and keep what it knows.

`student.py` exchanges the attention, `transfer.py` trains it. What an exchanged attention learns (features, powers,
gain, window) is `FlowHeads` in `integrations/transformers/heads.py`: a saved student is loaded without this package.
"""

from __future__ import annotations

from .config import LinearizeConfig
from .student import Student, linearize

__all__ = ["LinearizeConfig", "Student", "linearize"]
