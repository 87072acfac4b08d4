"""Loops over noise levels: plain functions that take the model as an argument."""
