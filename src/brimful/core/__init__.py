"""The nouns: what every part may import, and the standard library only."""
