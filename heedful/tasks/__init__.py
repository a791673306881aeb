"""Layer 7: tasks. A task learns from labelled examples, answers inputs, and evaluates its answers."""
