"""Pipelines as the command line asks for them, for the tests of training."""

from __future__ import annotations

import argparse

from distconv.jobs.commands import train_classify
from distconv.jobs.training.pipeline_options import Pipelining, pipelining_of


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train_classify.add_arguments(parser)
    return parser.parse_args(arguments)


def pipelining(ranks: int, schedule: str, *arguments: str) -> Pipelining:
    found = pipelining_of(parsed("--pipeline", schedule, *arguments), ranks)
    assert found is not None
    return found
