"""Parts shared by all training jobs.

::

    accumulation   Gradient accumulation: mini-batches as groups of smaller batches
    classifier     Classifiers in training: loss, scores, baselines and the report
    job            A training job from its options to result.png: the interface of a job, and the shared flow
    memory_format  Memory format of images and weights: given, or the faster one
    model_factory  A model by its name: a reference model, or a user's ``package.module:factory``
    options        Command-line options shared by all training jobs, and their conversion to a grid, device and settings
    picture        The figure drawn at the end of a classifier's training
    pipelines      Training of a model as a pipeline over ranks
    recovery       Checkpoints: saving, resuming, and checking that a checkpoint belongs to the run
    report         Output of a run: metrics.jsonl, summary.json, peak memory
    run            The run of a training job: its folder, its first step, and the training loop
    settings       Hyperparameters that determine the results of a run, and the optimizer
    training       Training of any model over ranks
"""
