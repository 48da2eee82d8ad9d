"""CUDA sources run on a CPU, thread by thread, so that kernels can be proved without a GPU."""
