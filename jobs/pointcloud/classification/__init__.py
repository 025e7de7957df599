"""Training of sparse networks that tell the classes of point clouds.

::

    layer_work  What the layers of a sparse network compute on a cloud, and where that cuts it into stages
    picture     The picture at the end of a training: curves of loss and accuracy, clouds with label and prediction
    samples     Clouds to train and to test on, and their mini-batches as sparse tensors
    trainer     The networks, their settings, their accuracy
"""
