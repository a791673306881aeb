"""Made-up data that small models learn in a minute: a language to translate, opinions, and stories of opinions."""
