"""Training of sparse networks that tell the classes of point clouds.

::

    picture     The picture at the end of a training: curves of loss and accuracy, clouds with label and prediction
    samples     Clouds to train and to test on, and their mini-batches as sparse tensors
    stage_cuts  Where the work on a cloud cuts a network into equal stages
    trainer     The networks, their settings, their accuracy
"""
