"""What a person types or sees: command line, demo, server, and the recipe of the pocket world."""
