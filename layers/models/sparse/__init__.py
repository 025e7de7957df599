"""Networks for voxelised point clouds, sparse and as their dense equivalents on volumes.

A sparse network and its dense equivalent are one class with two sets of layers. They have the same parameters under the
same names, so a state dictionary of one fits the other. A sparse network takes a SparseTensor with D = 3, a dense one a
volume (B, C, D, H, W).

Their results and gradients are equal if each convolution receives the same values:

- if all voxels of a volume are active and its sizes are multiples of the largest stride;
- for any cloud in evaluation, if the outputs of the dense layers are set to zero at inactive voxels.

Otherwise the dense network also computes at inactive voxels. Biases and shifts make them non-zero, they enter the
statistics of batch norm, and neighbouring voxels receive them.

::

    layers  Sparse and dense layers of which the networks consist
    resnet  A ResNet-18-like classifier
    unet    A U-Net that labels each site
    vgg     VGG-16 with batch norm, a classifier
"""

from .resnet import dense_resnet, sparse_resnet
from .unet import dense_unet, sparse_unet
from .vgg import dense_vgg16_bn, sparse_vgg16_bn

__all__ = ["dense_resnet", "dense_unet", "dense_vgg16_bn", "sparse_resnet", "sparse_unet", "sparse_vgg16_bn"]
