"""Decoders with a pipeline plan (embedding, layers, norm): their structure, found by running their own code."""
