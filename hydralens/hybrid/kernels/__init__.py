"""Triton kernels of the hybrid, each beside the torch code that it replaces. Imported only where they run."""
