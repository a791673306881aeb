"""The queue of a server: requests of many clients become batches of one engine thread, within limits."""
