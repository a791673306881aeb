"""Knowledge distillation: objectives that learn from a teacher, and teachers that produce their targets."""
