"""Labelled data: files, folders and objects in memory as splits of typed examples."""
