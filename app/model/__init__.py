"""The classifier: from the Hub, from a folder, or the embedded tiny BERT."""
