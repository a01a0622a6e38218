"""`python -m flowformer.cli`, as torchrun and accelerate launch take it."""

from . import app

app()
