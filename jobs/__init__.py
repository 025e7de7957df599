"""Part of the ``distconv`` package; import it as ``distconv.jobs``.

::

    bench           ``distconv bench``: microbenchmarks, each with a reference measured in the same run
    captured_steps  Steps of a training that are captured: always, never, or where that is faster
    commands        The commands that train, predict, make data, plan, profile and simulate; ``distconv.cli`` finds them
    configuration   What people choose of a training: a file of options, optimizers, where scalars go
    images          Labelled images: their files, their training
    mesh            Mesh tangling: the data set, its training, its scores
    papers          Reproductions of published tables: ``distconv reproduce``, a folder for each paper
    planning        What the commands that plan share
    pointcloud      Point clouds: meshes and shapes to sample, files, voxels
    prediction      Predictions with trained networks: windows over large samples, scores, a picture
    progress        Progress of long work: a bar on a terminal, a line now and then in a log
    segmentation    A class for each place of images and volumes: own data, own networks
    sequence        Labelled sequences: bitstreams, sounds, training of recurrent networks
    timing          Times of variants that take turns
    training        What all training jobs share
    verification    Checks against one process and against measurements: ``distconv verify``
"""

if __name__ != "distconv.jobs":
    raise ImportError("import this package as distconv.jobs: under the bare name 'jobs' its classes would exist twice")
