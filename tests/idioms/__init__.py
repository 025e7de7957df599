"""What people write in training scripts, as small functions: on grids each gives what it gives in one process.

They mirror no module but the promise that any idiom of PyTorch works: exact, exact with a ``ReplicationWarning``, or
refused with one clear sentence on all ranks.

::

    bench          A model with its optimizer and data, in one process or on a grid
    table          The list of all idioms, and how one of them ends on a grid
    accumulation   Gradients of several batches
    adversarial    Two networks that play against each other
    attention      Attention over places, windows and channels
    averages       Moving averages of weights, and weights for evaluation
    calls          Modules called, hooked, converted and wrapped in unusual ways; Python's numbers
    counts         Masks, counts, sums of what belongs together, distances
    distributions  torch.distributions
    functions      autograd Functions, closures, straight-through estimators, torch.func
    gradients      Clipping, penalties, hooks, second derivatives
    graph          Edges, seeds and hooks of autograd's graph; packed sequences, encoders in evaluation
    images         Augmentation, mixing of samples, metrics
    layers         Fourier transforms, sampling, normalizations
    losses         Losses of classification, detection, restoration and contrast
    memory         The memory of plain tensors taken from distributed ones
    names          Functions by other names, NumPy, fused optimizers, quantization, questions about memory
    objectives     Self-supervised, distilled and diffusion training
    optimizers     torch's optimizers and people's own
    parameters     Weights read, written, tied, computed, saved and loaded
    random         Random numbers
    recomputation  torch.utils.checkpoint
    segmentation   Losses of segmentation
    shapes         Masks, sorting, einsum, indexing
    solvers        Networks within iterations, and layers that are written out by hand
    steps          Steps that are more than one gradient
    training       Loops: schedules, autocast, early stopping, freezing
    views          Views, slices, changes in place
"""
