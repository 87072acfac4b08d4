"""Formulas on tensors with weights."""
