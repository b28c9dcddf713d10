"""samebits: fine-tune a text classifier with PyTorch DDP and with transformers.Trainer, bitwise identically."""
