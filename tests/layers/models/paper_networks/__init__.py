"""Networks written from their papers, as a user of PyTorch would, with few and narrow layers.

::

    audio     WaveNet and Conv-TasNet
    networks  All of them, with their inputs
    vision    VMamba
    volumes   CosmoFlow and STU-Net
    weather   ClimaX, and the grid parts of GraphCast
"""
