"""Training: configs, recipes, tasks, the training loop, and the tables of results."""
