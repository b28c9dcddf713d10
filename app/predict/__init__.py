"""Predictions with a trained model."""
