"""The cache core under random use; see machine.py. HYPOTHESIS_PROFILE=nightly searches longer."""

from __future__ import annotations

from types import ModuleType

from hypothesis.stateful import run_state_machine_as_test


def test_random_use(machine: ModuleType) -> None:
    """Whatever tables do, they equal the naive cache bitwise, and nothing leaks."""
    run_state_machine_as_test(machine.CacheMachine, settings=machine.PROFILE)
