"""Models of benchmarks: the reference ones, and those of the user."""

from __future__ import annotations

import argparse

import pytest
import torch
from mpi4py import MPI

from distconv.distribution import Distribution, default_axes
from distconv.grid import ProcessGrid
from distconv.jobs.bench.steps import model_options
from distconv.jobs.planning.measured_steps import random_tensor


def options(*words: str, user_models: bool = True) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    model_options.add_arguments(parser, model="unet", size=16, batch=2, user_models=user_models)
    return parser.parse_args(words)


def test_size_is_of_the_mesh_and_input_is_of_any_sample():
    assert model_options.batch_shape(options()) == (2, 18, 16, 16)
    assert model_options.batch_shape(options("--model", "vgg16", "--size", "32")) == (2, 3, 32, 32)
    assert model_options.batch_shape(options("--input", "1,8,9,10", "--batch", "3")) == (3, 1, 8, 9, 10)


def test_others_benchmarks_take_reference_models_alone():
    with pytest.raises(argparse.ArgumentError, match="invalid choice"):
        options("--model", "torch.nn:Identity", user_models=False)


@pytest.mark.parametrize(
    ("words", "loss"),
    [
        # As good as a guess among so many classes, or of yes and no.
        (["--input", "4,8,8", "--classes", "5"], torch.tensor(5.0).log()),
        (["--input", "4,8,8", "--classes", "1"], torch.tensor(2.0).log()),
    ],
)
def test_outputs_of_nought_have_the_loss_of_a_guess(words, loss):
    chosen = options(*words)
    shape = (2, chosen.classes, 8, 8)
    y = random_tensor(Distribution(ProcessGrid(MPI.COMM_SELF), default_axes(None, 4)), shape, model_options.CPU) * 0
    assert model_options.random_label_loss(chosen, y).item() == pytest.approx(loss.item())
    model = model_options.make_model(chosen)
    assert model(torch.zeros(2, 4, 8, 8)).shape == (2, chosen.classes, 8, 8)
