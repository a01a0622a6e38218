"""From data to result: configs, recipes, tasks, the loop, and the tables of results."""
