"""Networks for voxelised point clouds, each sparse and as its dense twin on volumes.

Twins are one class with two sets of layers; they have the same parameters under the same names, so that a state
dictionary of one fits the other. A sparse one takes a SparseTensor with D = 3, a dense one a volume (B, C, D, H, W).

They are equal, with all gradients, where each convolution meets the same numbers: if all voxels of a volume are
active whose extents are multiples of the largest stride; and for any cloud in evaluation, if what the layers of the
dense twin give is set to zero at inactive voxels. Otherwise the dense twin computes at inactive voxels too: biases and
shifts make them non-zero, they enter the statistics of batch norm, and the neighbours see them.

::

    layers  The layers that the networks are made of: sparse, and dense
    resnet  A ResNet-18-like classifier
    unet    A U-Net that labels each site
    vgg     VGG-16 with batch norm, a classifier
"""

from .resnet import dense_resnet, sparse_resnet
from .unet import dense_unet, sparse_unet
from .vgg import dense_vgg16_bn, sparse_vgg16_bn

__all__ = ["dense_resnet", "dense_unet", "dense_vgg16_bn", "sparse_resnet", "sparse_unet", "sparse_vgg16_bn"]
