"""Epochs: what is stored of them, what is decided about them, and who carries it out."""
