"""Corpora for pre-training: text of any size, cleaned, deduplicated and tokenised into shards."""
