"""The cache of one model: sequences (who is where), layers (the bytes), pools (pages), and their accounting."""
