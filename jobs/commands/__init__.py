"""The commands that train, predict, make data, plan, explore, profile and simulate; ``distconv.cli`` finds them.

::

    explore             Choose how to train a network on some ranks: stages, and how each layer is distributed
    information         ``distconv info``: what distconv runs on
    make_mesh           Make mesh-tangling samples with the Lagrangian hydrodynamics code
    make_pointcloud     Make a file of labelled point clouds: the embedded shapes, or points of a folder of files
    plan                Choose each layer's distribution
    plan_pointcloud     Choose how ranks split the clouds and the space of a sparse network
    predict             Predict with a trained network, over any grid
    profile             ``distconv profile``: measure this machine for the planner
    run_script          ``distconv run``: runs a user's script with an allocator that keeps freed memory
    simulate            ``distconv simulate``: timeline and memory of a pipeline schedule
    train_classify      Train a network to classify images: MNIST, CIFAR-10, or HDF5 files of your own
    train_mesh          Train a network to find the cells of a mesh that are about to tangle
    train_pointcloud    Train a sparse network to classify point clouds
    train_segmentation  Train a network to predict the class of each pixel or voxel of images or volumes
    train_sequence      Train a recurrent network to classify sequences
"""
