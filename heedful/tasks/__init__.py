"""Layer 7: tasks. They learn from labelled examples, answer inputs, and evaluate their answers."""
