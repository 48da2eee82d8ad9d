"""Backend of our own CUDA sources, compiled by nvcc at load and launched through PyCUDA."""
