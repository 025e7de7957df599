"""Makes the harness (``tests/harness``) part of every run of these tests."""

pytest_plugins = ["tests.harness.plugin"]
