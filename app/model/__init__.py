"""The tokenizer and the classifier: from the Hub, from a local folder, or the tiny default model."""
