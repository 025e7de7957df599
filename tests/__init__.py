"""Tests of distconv; ``tests/run.py`` runs them serially and on several rank counts."""
