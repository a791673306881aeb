"""Corpora: text of any size, cleaned, deduplicated and tokenised into shards."""
