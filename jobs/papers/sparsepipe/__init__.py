"""SparsePipe's partitions over mixed GPUs, and its networks' accuracy.

::

    accuracy  Accuracy of the sparse VGG16-BN and its dense equivalent after the same short training
    command   Prints pipeline partitions of networks: published layer profiles, and SparsePipe's mixed GPUs
    setting   SparsePipe's heterogeneous setting: GPUs, layer times, published partitions
"""
