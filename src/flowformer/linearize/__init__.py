"""From softmax to flow: give a pretrained model of transformers linear attention, and keep what it knows."""

from __future__ import annotations

from .config import LinearizeConfig
from .student import Student, linearize

__all__ = ["LinearizeConfig", "Student", "linearize"]
