"""What both training paths need before and during training."""
