"""Flow-Attention in other libraries: transformers, timm, aeon, gymnasium.

Each needs an optional dependency. Without it, the ImportError names the extra to install.
"""
