"""What all training jobs share.

::

    curves             Curves of a classifier's training on axes of matplotlib
    model_factory      A model by its name: one of the reference models
    options            Command-line options that all training jobs share, and what they become
    outcome            What the training of a classifier came to: scores, what it had to beat, and the report of both
    picture            The picture at the end of a classifier's training
    pipeline_options   Command-line options of training as a pipeline, and what they come to for a number of ranks
    pipeline_stages    Where a model is cut into the stages of a pipeline
    pipeline_training  Training of a model as a pipeline over ranks, with the settings
    report             What a training run leaves behind besides its checkpoints
    run                The run of a training job: its folder, where it starts, and the loop with progress
    score              How a classifier does on labelled samples
    training           Training of any model over ranks
"""
