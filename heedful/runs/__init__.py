"""Layer 9: what a person asks for, made of the layers below."""
