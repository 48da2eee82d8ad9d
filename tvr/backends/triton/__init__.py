"""The Triton backend: on NVIDIA GPUs, and on the CPU under Triton's interpreter."""
