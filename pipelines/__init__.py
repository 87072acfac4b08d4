"""One file for each kind of model, to be read top to bottom. Pipelines never import one another."""
