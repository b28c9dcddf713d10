"""What both paths need before and during training."""
