"""Training of sparse networks that classify point clouds.

::

    picture     Figure at the end of a training: curves of loss and accuracy, clouds with label and prediction
    samples     Training and test clouds, and their mini-batches as sparse tensors
    stage_cuts  Stage boundaries that balance the work of a sparse network on a cloud
    trainer     Training of sparse networks: the networks, their settings, the trainers
"""
