"""ScanRNN and ScanGRU against torch's modules: results, gradients, parameters, errors."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import distconv as dc
from distconv.layers.recurrent import ScanGRU, ScanRNN
from tests.distconv.layouts import normal
from tests.layers.recurrent.modules import KINDS, METHODS, SMALL, gradients, torch_and_scan_modules


def compare(one, other, x, start=None):
    """Results and gradients of both modules, on copies of the inputs; dropout draws the same numbers."""
    found = []
    for module in (one, other):
        torch.manual_seed(7)
        leaves = [t.clone().requires_grad_() for t in (x, start) if t is not None]
        y, last = module(*leaves)
        found.append(gradients(module, [y, last], leaves))
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, **SMALL)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_gives_torchs_results_and_gradients(kind, method):
    compare(*torch_and_scan_modules(kind, 3, 5, method=method), normal(9, 4, 3), normal(1, 4, 5))


OPTIONS = [
    dict(zip(("num_layers", "bidirectional", "batch_first", "bias"), values, strict=True))
    for values in itertools.product((1, 2), (False, True), (False, True), (True, False))
]


@pytest.mark.parametrize("method", ["sequential", "blelloch"])
@pytest.mark.parametrize("kind", ["tanh", "gru"])
def test_all_constructor_arguments_mean_what_torchs_do(kind, method):
    for options in OPTIONS:
        layers = options["num_layers"] * (2 if options["bidirectional"] else 1)
        compare(*torch_and_scan_modules(kind, 3, 4, method=method, **options), normal(5, 5, 3), normal(layers, 5, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_draws_torchs_mask(kind):
    one, other = torch_and_scan_modules(kind, 3, 5, num_layers=3, dropout=0.4, bidirectional=True)
    compare(one, other, normal(6, 4, 3))
    compare(one.eval(), other.eval(), normal(6, 4, 3))


@pytest.mark.parametrize("options", [{}, {"batch_first": True, "bidirectional": True}])
def test_a_sequence_without_a_batch_dimension(options):
    layers = 2 if options else 1
    compare(*torch_and_scan_modules("gru", 3, 5, **options), normal(6, 3), normal(layers, 5))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_of_several_lengths(kind, method):
    one, other = torch_and_scan_modules(kind, 3, 4, num_layers=2, bidirectional=True, dropout=0.3, method=method)
    found = []
    for module in (one, other):
        torch.manual_seed(7)
        sequences = [normal(n, 3, seed=n).requires_grad_() for n in (2, 7, 1, 4)]
        start = normal(4, 4, 4).requires_grad_()
        y, last = module(pack_sequence(sequences, enforce_sorted=False), start)
        assert isinstance(y, PackedSequence)
        found.append(gradients(module, [y.data, last], [*sequences, start]))
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, **SMALL)


def test_a_module_is_copied_with_its_method_and_converted():
    module = ScanGRU(3, 4, method="blelloch", dtype=torch.float64, device="cpu")
    assert module.weight_ih_l0.dtype == torch.float64
    copied = copy.deepcopy(module).float()
    assert copied.method == "blelloch"
    assert "method='blelloch'" in repr(copied)
    assert copied(torch.ones(2, 1, 3))[0].dtype == torch.float32


def test_in_autocast_it_computes_in_the_dtype_of_its_weights():
    _, module = torch_and_scan_modules("gru", 3, 4)
    module.float()
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = module(torch.ones(5, 2, 3, dtype=torch.bfloat16))
    assert y.dtype == torch.float32
    y.sum().backward()


def test_gradients_that_are_not_needed_are_none():
    _, module = torch_and_scan_modules("tanh", 3, 4)
    module.weight_ih_l0.requires_grad_(False)
    module(normal(5, 2, 3))[0].sum().backward()
    assert module.weight_ih_l0.grad is None
    assert module.weight_hh_l0.grad is not None


def test_a_batch_without_samples():
    for method in METHODS:
        _, module = torch_and_scan_modules("gru", 3, 4, method=method)
        y, last = module(normal(5, 0, 3))
        assert (y.shape, last.shape) == ((5, 0, 4), (1, 0, 4))
        (y.sum() + last.sum()).backward()
        assert not module.weight_hh_l0.grad.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        ([(0, 2, 3)], "Expected sequence length to be larger than 0 in RNN"),
        ([(5, 2, 4)], r"input.size\(-1\) must be equal to input_size. Expected 3, got 4"),
        ([(5, 2, 3), (1, 3, 5)], "Expected hidden size"),
        ([(5, 2, 3), (2, 5)], "hx should also be 3-D but got 2-D tensor"),
        ([(5, 1, 2, 3)], "Expected input to be 2D or 3D, got 4D"),
    ],
)
def test_arguments_that_torch_rejects_raise_its_error(kind, shapes, match):
    for module in torch_and_scan_modules(kind, 3, 5):
        with pytest.raises((RuntimeError, ValueError), match=match):
            module(*(normal(*shape) for shape in shapes))


@pytest.mark.parametrize("module", [ScanRNN, ScanGRU])
def test_an_unknown_method_raises(module):
    with pytest.raises(dc.UnsupportedOperation, match=r"method='fast': no such method\. Choose one of 'auto'"):
        module(3, 4, method="fast")


def test_a_second_derivative_raises():
    module = ScanRNN(3, 4)
    x = torch.ones(5, 2, 3, requires_grad=True)
    with pytest.raises(dc.UnsupportedOperation, match=r"no second derivative .* Use method='autograd'"):
        torch.autograd.grad(module(x)[0].sum(), x, create_graph=True)


def test_results_that_are_changed_in_place_are_noticed():
    module = ScanRNN(3, 4)
    y, _ = module(torch.ones(5, 2, 3))
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_each_layer_and_direction_has_its_own_weights(kind, method):
    """Torch's function takes the first layer's where there are no biases and all lie in one piece of memory."""
    for options in OPTIONS:
        layers = options["num_layers"] * (2 if options["bidirectional"] else 1)
        found = []
        for module, device in zip(
            torch_and_scan_modules(kind, 3, 4, method=method, **options), ("cpu", "cuda"), strict=True
        ):
            there = module.to("cpu").to(device)
            leaves = [t.to("cpu").to(device).requires_grad_() for t in (normal(5, 5, 3), normal(layers, 5, 4))]
            results = [each.cpu() for each in there(*leaves)]
            found.append([each.cpu() for each in gradients(there, results, leaves)])
        for expected, actual in zip(*found, strict=True):
            torch.testing.assert_close(actual, expected, **SMALL)
