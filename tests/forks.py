"""Processes for tests, without their imports: each is a copy of a server that has imported what they need."""

from __future__ import annotations

import multiprocessing

START_METHOD = "forkserver"
FORKS = multiprocessing.get_context(START_METHOD)
FORKS.set_forkserver_preload(["flowformer.train.loop", "tiny_training"])
