"""What all training jobs share.

::

    accumulation   Mini-batches in parts whose gradients add up
    classifier     Classifiers in training: loss, scores, what they had to beat, and the report
    job            A training job from its options to result.png: what each supplies, and the flow of all
    model_factory  A model by its name: one of the reference models
    options        Command-line options that all training jobs share, and what they become
    picture        The picture at the end of a classifier's training
    pipelines      Training of a model as a pipeline over ranks
    recovery       What a training goes on from: its checkpoints, and which of them are its own
    report         What a training run leaves behind besides its checkpoints
    run            The run of a training job: its folder, where it starts, and the loop with progress
    settings       What the numbers of a training run depend on besides the data, and the optimizer
    training       Training of any model over ranks
"""
