"""Flow-Attention in other libraries: transformers, timm, aeon, gymnasium. Each file needs the extra it names."""
