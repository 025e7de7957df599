"""Configuration of a training: a file of options, torch's optimizers and schedulers, trackers of scalars.

::

    optimisation  Any optimizer and scheduler of torch, with their arguments
    options_file  Options in a YAML file: read, printed, and saved with a run
    tracking      Scalars of a run for TensorBoard, MLflow or Weights & Biases
"""
