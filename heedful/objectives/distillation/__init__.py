"""Knowledge distillation: objectives that learn from a teacher, and the teachers."""
