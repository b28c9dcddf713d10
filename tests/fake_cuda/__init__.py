"""GPUs that do not exist: PyTorch takes tensors for CUDA tensors, with real numbers on the CPU. See README.md here."""
