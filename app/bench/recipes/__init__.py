"""Flat scripts that train the same model in other ways. They use nothing of this project; torchrun starts them."""
