"""The pocket world: a small learned world model of mazes, and everything it is made from."""
