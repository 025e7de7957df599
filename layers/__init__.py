"""Distributed operators on DistTensor; importing this package fills the operator registry.

Only modules in ``nn``, ``math``, ``tensor`` and ``common`` register operators when they are imported, and this package
imports only these.

All operators are collective: call them on every rank of the grid, in the same order.

::

    common     Parts that operators share: distributions of operands and results, needed inputs, blocks of weights
    math       Operators for arithmetic: element by element, over dimensions, and products
    models     Reference models, which are ordinary torch modules
    nn         Operators of ``torch.nn.functional``: one module per family of layers
    recurrent  Recurrent layers with a backward pass by scan or by a compiled sweep, also split over time
    rules      Rules with which users declare the input that their own operators need
    scan       ``ScanSequential``: a chain of layers whose backward pass is a scan over their transposed Jacobians
    sparse     Sparse tensors and their layers: features at the active sites of a grid of one to four dimensions
    tensor     Operators that create, reshape, index and query tensors
"""

if __name__ != "distconv.layers":
    raise ImportError(
        "import this package as distconv.layers: under the bare name 'layers' its classes would exist twice"
    )

import importlib
import pkgutil

# Each module registers its operators when it is imported. A module in another folder would stay unregistered.
for _folder in ("nn", "math", "tensor", "common"):
    for _found in pkgutil.iter_modules([f"{path}/{_folder}" for path in __path__]):
        importlib.import_module(f"distconv.layers.{_folder}.{_found.name}")
