"""Mesh tangling: generation of the data set, training on it, scores.

::

    baselines          Baselines: constant answers, one channel, frozen velocities, a perceptron on single cells
    dataset            The mesh-tangling data set: file layout, generation, flips and transposes of samples
    hydro              A two-dimensional Lagrangian hydrodynamics code on quadrilateral meshes
    picture            Figures of mesh samples
    production         Production of a data set: runs of the solver, distributed over ranks
    recipe             Recipe of a mesh-tangling data set: channels, parameters, summary
    samples            A mesh-tangling data set opened for training
    scores             Thresholds, F1, precision and recall from counts
    segmentation       Training of a segmentation model on mesh-tangling samples
    synthetic_samples  Random samples in the layout of the mesh-tangling data
"""
