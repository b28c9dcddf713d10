"""Fake GPUs: PyTorch treats tensors as CUDA tensors, and the CPU computes their data. See README.md here."""
