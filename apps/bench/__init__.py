"""Benchmarks: the only place where time is measured."""
