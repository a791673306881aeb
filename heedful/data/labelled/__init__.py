"""Labelled data: files, folders and objects in memory, read as splits of typed examples."""
