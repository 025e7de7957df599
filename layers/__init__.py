"""Distributed operators on DistTensor; importing this package fills the operator registry.

::

    math       Distributed rules for arithmetic: element by element, over dimensions, and products
    models     Reference models. Ordinary torch modules
    nn         Distributed rules for ``torch.nn.functional``: one module per family of layers
    plumbing   What operators share: layouts of operands and results, needed inputs, blocks of weights
    recurrent  Recurrent layers whose backward pass is a scan, or a compiled sweep, also split in time
    rules      Rules for operators of a user's own: what of its input an operator needs
    scan       ``ScanSequential``: a chain of layers whose backward pass is a scan over their transposed Jacobians
    sparse     Sparse tensors and their layers: features at the active sites of a grid of one to four dimensions
    tensor     Distributed rules for making, shaping, indexing and asking tensors
"""

if __name__ != "distconv.layers":
    raise ImportError(
        "import this package as distconv.layers: under the bare name 'layers' its classes would exist twice"
    )

import importlib
import pkgutil

# Each module registers its operators when it is imported.
for _folder in ("nn", "math", "tensor", "plumbing"):
    for _found in pkgutil.iter_modules([f"{path}/{_folder}" for path in __path__]):
        importlib.import_module(f"distconv.layers.{_folder}.{_found.name}")
