"""Fine-tune a text classifier on two roads, a DDP loop by hand and transformers.Trainer, and compare them."""
