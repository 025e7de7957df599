"""Part of the ``distconv`` package; import it as ``distconv.jobs``.

::

    bench           ``distconv bench``: microbenchmarks, each with a reference measured in the same run
    captured_steps  Captured training steps: always, never, or if that is faster
    commands        The commands that train, predict, make data, plan, explore, profile and simulate
    configuration   Configuration of a training: a file of options, optimizers, trackers of scalars
    images          Labelled images: file formats, samples, and training of classifiers
    mesh            Mesh tangling: generation of the data set, training on it, scores
    papers          Reproductions of published tables: ``distconv reproduce``, a folder for each paper
    planning        Parts shared by the commands that plan
    pointcloud      Point clouds: meshes and shapes to sample, files, voxels, and training of sparse networks
    prediction      Predictions with trained networks: windows over large samples, scores, a figure
    progress        Progress of long work: a bar on a terminal, a line every ten seconds in a log
    segmentation    Segmentation: training that predicts a class for each pixel of an image or a volume
    sequence        Labelled sequences: bitstreams, sounds, and training of recurrent networks on them
    timing          Timing of variants in interleaved runs
    training        Parts shared by all training jobs
    verification    Checks of results against one process, and of predictions against measurements: ``distconv verify``
"""

if __name__ != "distconv.jobs":
    raise ImportError("import this package as distconv.jobs: under the bare name 'jobs' its classes would exist twice")
