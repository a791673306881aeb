"""Helpers shared by the tests; import them as `from tests.support.NAME import ...`."""
