"""Mesh tangling: the data set, its training, its scores.

::

    baselines          What a network has to beat
    dataset            The mesh-tangling data set
    hydro              A two-dimensional Lagrangian hydrodynamics code on quadrilateral meshes
    picture            The picture at the end of training
    production         From initial conditions to a data set: runs of the solver, shared out over ranks
    recipe             What a mesh-tangling data set is made of
    samples            A mesh-tangling data set opened for training
    scores             Thresholds and F1 from counts
    segmentation       Training of a segmentation model on mesh-tangling samples: the model, its scores
    synthetic_samples  Random samples in the layout of the mesh-tangling data
"""
