"""One op a file, in plain torch, on CPU and CUDA: what it declares, its `bind` and its `run`."""
