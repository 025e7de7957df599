"""Part of the ``distconv`` package; import it as ``distconv.jobs``.

::

    bench           ``distconv bench``: microbenchmarks, each with a reference measured in the same run
    captured_steps  Captured training steps: always, never, or if that is faster
    commands        The commands that train, predict, make data, plan, profile and simulate; ``distconv.cli`` finds them
    configuration   Configuration of a training: a file of options, optimizers, trackers of scalars
    images          Labelled images: their files, their training
    mesh            Mesh tangling: the data set, its training, its scores
    papers          Reproductions of published tables: ``distconv reproduce``, a folder for each paper
    planning        Parts shared by the commands that plan
    pointcloud      Point clouds: meshes and shapes to sample, files, voxels
    prediction      Predictions with trained networks: windows over large samples, scores, a figure
    progress        Progress of long work: a bar on a terminal, a line now and then in a log
    segmentation    A class for each pixel or voxel of images and volumes: own data, own networks
    sequence        Labelled sequences: bitstreams, sounds, training of recurrent networks
    timing          Timing of variants in interleaved runs
    training        Parts shared by all training jobs
    verification    Checks against one process and against measurements: ``distconv verify``
"""

if __name__ != "distconv.jobs":
    raise ImportError("import this package as distconv.jobs: under the bare name 'jobs' its classes would exist twice")
