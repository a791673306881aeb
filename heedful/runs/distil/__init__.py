"""Distillation: settings, students, the teacher's cached outputs, the run, its verdict, and a search over students."""
