"""Files and tensors: find a model, check it, read it, rename its keys. Knows no model class.

Each folder in here that holds a `model.json` is a model that ships with the package.
"""
