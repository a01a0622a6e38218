"""Entry point of `python -m flowformer.cli`, which torchrun and accelerate launch need."""

from . import app

app()
