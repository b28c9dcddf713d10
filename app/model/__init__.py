"""The tokenizer and the classifier."""
