"""A world small enough to be learned in a minute: a made-up language, texts whose order decides, stories of them."""
