"""Made-up data that small models learn in a minute: a language to translate, texts with opinions, and stories."""
